"""Resources of a Ray cluster for vLLM's workers.

A process connected to Ray must not fork, and vLLM forks. So a subprocess queries the cluster before vLLM starts.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

from tandem.env import set_default, set_variables, variable
from tandem.errors import UsageError
from tandem.launchers.process_groups import visible_gpus
from tandem.launchers.ray.driver import list_nodes, sigterm_kept
from tandem.launchers.ray.nodes import UNIT, NodeList, RayNode, is_loopback

if TYPE_CHECKING:
    from vllm.config import ParallelConfig

log = logging.getLogger("vllm.tandem")
GPU = "GPU"
"""Resource that Ray counts by itself, also on Apple silicon."""
LOOK_S = 300.0
"""Timeout in seconds for listing the nodes: importing Ray is slow on a busy machine. Ray has its own timeout for dead
addresses."""
START = f"ray start --head --resources='{{\"{UNIT}\": 1}}'"


class RayCluster(NodeList, frozen=True):
    """A Ray cluster from vLLM's point of view."""

    @property
    def addresses(self) -> list[str]:
        """Sorted addresses of all nodes."""
        return sorted({node.address for node in self.nodes})

    def total(self, key: str) -> float:
        """Return the cluster's amount of a resource."""
        return sum(node.total.get(key, 0.0) for node in self.nodes)

    @property
    def device_key(self) -> str:
        """Ray resource of one device: `mlx`, or `GPU` if no node has `mlx`. Only one of them, so that no device counts twice."""
        return GPU if not self.total(UNIT) and self.total(GPU) else UNIT

    def units(self, node: RayNode) -> int:
        """Return the number of a node's devices, hence of workers; at least 1."""
        return max(int(node.total.get(self.device_key, 1)), 1)

    def require(self, needed: int, mine: str, *, joined: bool = False) -> None:
        """Raise UsageError where vLLM would wait half an hour: too few devices, or a node that is missing.

        `mine` is this machine's address as vLLM resolves it. `joined` is True if this process connected by `ray.init`.
        """
        key = self.device_key
        if (there := self.total(key)) < needed:
            remedy = f'give ray.init(resources={{"{UNIT}": {needed}}}), or ' if joined else ""
            raise UsageError(
                f"the layout needs {needed} of the Ray resource {UNIT!r} (or, where no node has it, {GPU!r}), and "
                f"the cluster has {there:g} of {key!r}: {remedy}start each node with ray start ... "
                f"--resources='{{\"{UNIT}\": 1}}'"
            )
        if mine not in self.addresses:
            raise UsageError(
                f"vLLM resolves this machine to {mine}, and Ray knows {', '.join(self.addresses)}: set "
                f"VLLM_HOST_IP={self.here}, or give ray start --node-ip-address={mine}"
            )

    def require_local(self, count: int, address: str) -> None:
        """Raise UsageError if the node at `address` is missing or has too few devices for `count` replicas of one rank."""
        node = next((node for node in self.nodes if node.address == address), None)
        if node is None:
            raise UsageError(
                f"--data-parallel-address {address}: no node of the Ray cluster has it; there is {', '.join(self.addresses)}"
            )
        if count > (there := int(node.total.get(self.device_key, 0))):
            raise UsageError(
                f"--data-parallel-size-local {count}: the node {address} has {there} of "
                f"{self.device_key!r}, one for each replica; give --data-parallel-size-local {there}"
                if there
                else f"the node {address} has none of {self.device_key!r}, and the first replica "
                "is placed there; start it with ray start ... --resources='{\"mlx\": 1}'"
            )


def look() -> RayCluster:
    """Return the cluster that this process is connected to."""
    import ray

    mine = ray.get_runtime_context().get_node_id()
    nodes = [
        RayNode(node["NodeID"], node["NodeManagerAddress"], node["NodeManagerHostname"], node["Resources"], {})
        for node in ray.nodes()
        if node["Alive"]
    ]
    return RayCluster(nodes, next(node.address for node in nodes if node.node_id == mine))


def ask() -> RayCluster | None:
    """Return the cluster that vLLM would use, listed by a subprocess. None if vLLM's engine would start its own, with GPUs that
    Ray detects. Raises UsageError."""
    address = variable("RAY_ADDRESS")
    try:
        listed = list_nodes(address or "auto", {}, LOOK_S)
    except UsageError as error:
        if address is None and (sys.platform == "darwin" or visible_gpus()):
            return None
        where = f"at RAY_ADDRESS={address}" if address not in (None, "auto") else "on this machine"
        other = ", or set RAY_ADDRESS" if address is None else ""
        raise UsageError(f"no Ray cluster can be used {where}: start one with {START}{other} ({error.message[:300]})") from None
    return RayCluster([node for node in listed.nodes if not node.trouble], listed.here)


def join(**options: object) -> None:
    """Call `ray.init` unless already connected; keep vLLM's handler of SIGTERM."""
    import ray

    if not ray.is_initialized():
        with sigterm_kept():
            ray.init(**options)


def device_key() -> str:
    """Return the Ray resource of one device in the connected cluster; `mlx` without a connection."""
    import ray

    return look().device_key if ray.is_initialized() else UNIT


def check_start(parallel: ParallelConfig, mine: str) -> None:
    """Check the cluster before vLLM's engine uses it, so that errors take seconds instead of a long wait.

    Changes `parallel`, vLLM's ParallelConfig, and environment variables where needed. `mine` is this machine's address as vLLM
    resolves it. Raises UsageError.
    """
    import ray
    from ray.util.client import ray as client

    if client.is_connected() or (variable("RAY_ADDRESS") or "").startswith("ray://"):
        raise UsageError('a Ray client (ray://) is no node: on a node use ray.init(address="auto") or RAY_ADDRESS=auto')
    joined = ray.is_initialized()
    if joined and ray.get_runtime_context().get_actor_id() is not None:
        return  # the actor's creator has already placed it
    cluster = look() if joined else ask()
    if joined:
        # A process connected to Ray must not fork, so the engine runs in this process. A server's engine cannot.
        set_default("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
        set_variables({"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"})
    if cluster is None:
        return
    if mine not in cluster.addresses and (joined or is_loopback(mine) or variable("VLLM_HOST_IP") is None):
        log.info("VLLM_HOST_IP=%s: this machine's address in the Ray cluster, in place of %s", cluster.here, mine)
        set_variables({"VLLM_HOST_IP": cluster.here})
        mine = cluster.here
    cluster.require(parallel.world_size * parallel.data_parallel_size, mine, joined=joined)
    if parallel.data_parallel_size > 1 and parallel.data_parallel_backend == "ray":
        if is_loopback(parallel.data_parallel_master_ip):
            parallel.data_parallel_master_ip = cluster.here
        cluster.require_local(parallel.data_parallel_size_local, parallel.data_parallel_master_ip)
