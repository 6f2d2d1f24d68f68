"""What a cluster has for workers to be placed on."""

from __future__ import annotations

import ray
from vllm.utils.network_utils import get_ip

from tandem.vllm_plugin.options import RESOURCE

GPU = "GPU"
"""Ray counts these by itself, an Apple-silicon machine's among them."""


def device_key() -> str:
    """The resource that stands for a device: `mlx`, or `GPU` where no node has it. One of them, so that no device
    counts twice.
    """
    if not ray.is_initialized():
        return RESOURCE
    resources = ray.cluster_resources()
    return GPU if RESOURCE not in resources and GPU in resources else RESOURCE


def units(node_id: str) -> int:
    """Devices of a node, hence how many workers it may have; at least 1."""
    return max(int(_node(node_id)["Resources"].get(device_key(), 1)), 1)


def address(node_id: str) -> str:
    """A node's address, as the cluster knows it."""
    return str(_node(node_id)["NodeManagerAddress"])


def require(needed: int) -> None:
    """Raise ValueError at once where vLLM would wait half an hour for devices, or for a node that is not there."""
    key = device_key()
    there = ray.cluster_resources().get(key, 0)
    if there < needed:
        raise ValueError(
            f"the layout needs {needed} of the Ray resource {RESOURCE!r} (or, where no node has it, {GPU!r}), and the "
            f"cluster has {there:g} of {key!r}: start each node with ray start ... --resources='{{\"{RESOURCE}\": 1}}'")
    known = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    mine = get_ip()
    if mine not in known:
        raise ValueError(f"vLLM resolves this machine to {mine}, and Ray knows {', '.join(sorted(known))}: set "
                         "VLLM_HOST_IP to one of them, and give ray start the same --node-ip-address")


def _node(node_id: str) -> dict[str, dict[str, float]]:
    return next(node for node in ray.nodes() if node["NodeID"] == node_id)
