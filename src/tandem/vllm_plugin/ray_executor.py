"""vLLM's Ray executor on devices that Ray does not count by itself: the resource `mlx`, or `GPU` where it is absent."""

from __future__ import annotations

from typing import Any

import ray
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.network_utils import get_ip
from vllm.v1.executor import ray_executor_v2
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2, RayWorkerProc

logger = init_logger("vllm.tandem")

RESOURCE = "mlx"


class TandemRayWorkerProc(RayWorkerProc):
    """Runs as a Ray actor."""

    def get_node_and_physical_gpu_ids(self) -> tuple[str, list[int]]:
        """Node and devices of this actor. Ray never lists a custom resource among the accelerators."""
        context = ray.get_runtime_context()
        assigned = context.get_assigned_resources()
        key = RESOURCE if RESOURCE in assigned else "GPU"
        logger.info("tandem: patched Ray V2 worker get_node_and_physical_gpu_ids on RayWorkerProc (custom Ray "
                    "resource %s)", key)
        return context.get_node_id(), list(range(int(assigned.get(key, 1))))

    def initialize_worker(self, *args: Any, **kwargs: Any) -> None:
        """Tell the worker its address in the cluster and how many devices, hence workers, its machine may have."""
        node_id = ray.get_runtime_context().get_node_id()
        node = next(node for node in ray.nodes() if node["NodeID"] == node_id)
        units = node["Resources"].get(RESOURCE) or node["Resources"].get("GPU") or 1
        config: Any = self._init_kwargs["vllm_config"]
        config.additional_config = {**(config.additional_config or {}), "tandem_units": int(units),
                                    "tandem_address": node["NodeManagerAddress"]}
        super().initialize_worker(*args, **kwargs)


class TandemRayExecutor(RayExecutorV2):
    """Checks the cluster before it waits for it, and places our worker."""

    def _init_executor(self) -> None:
        parallel = self.parallel_config
        if not ray.is_initialized():
            ray.init(runtime_env=parallel.ray_runtime_env)
        if parallel.placement_group is None:
            type(current_platform).ray_device_key = _device_key(parallel.world_size)
        stock = ray_executor_v2.RayWorkerProc
        ray_executor_v2.RayWorkerProc = TandemRayWorkerProc
        try:
            super()._init_executor()
        finally:
            ray_executor_v2.RayWorkerProc = stock


def _device_key(needed: int) -> str:
    """The resource to place workers on. Raises ValueError at once where vLLM would wait half an hour."""
    resources = ray.cluster_resources()
    key = RESOURCE if RESOURCE in resources else "GPU"
    if resources.get(key, 0) < needed:
        raise ValueError(
            f"the layout needs {needed} of the Ray resource {RESOURCE!r} (or 'GPU'), and the cluster has "
            f"{resources.get(key, 0):g}: start each node with ray start ... --resources='{{\"{RESOURCE}\": 1}}'")
    addresses = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    mine = get_ip()
    if mine not in addresses:
        raise ValueError(f"vLLM resolves this machine to {mine}, and Ray knows {', '.join(sorted(addresses))}: set "
                         "VLLM_HOST_IP to one of them, and give ray start the same --node-ip-address")
    return key
