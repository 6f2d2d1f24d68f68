"""vLLM's Ray executor for devices that Ray does not detect: the resource `mlx`, or `GPU` without it."""

from __future__ import annotations

import ray
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.utils.network_utils import get_ip
from vllm.v1.executor import ray_executor_v2
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2, RayWorkerProc

from tandem.vllm_plugin.ray_cluster import join, look

logger = init_logger("vllm.tandem")


class TandemRayWorkerProc(RayWorkerProc):
    """vLLM's worker in a Ray actor."""

    def get_node_and_physical_gpu_ids(self) -> tuple[str, list[int]]:
        """Return the actor's node id and device indices, which Ray omits for custom resources."""
        context = ray.get_runtime_context()
        key = look().device_key
        logger.info("tandem: patched Ray V2 worker get_node_and_physical_gpu_ids on RayWorkerProc (custom Ray resource %s)", key)
        return context.get_node_id(), list(range(int(context.get_assigned_resources().get(key, 1))))

    def initialize_worker(self, *args: object, **kwargs: object) -> None:
        """Add the node's number of devices and its address to the worker's configuration, then initialise the worker."""
        cluster = look()
        node = next(node for node in cluster.nodes if node.node_id == ray.get_runtime_context().get_node_id())
        config: VllmConfig = self._init_kwargs["vllm_config"]
        config.additional_config = {
            **(config.additional_config or {}),
            "tandem_units": cluster.units(node),
            "tandem_address": node.address,
        }
        super().initialize_worker(*args, **kwargs)


class TandemRayExecutor(RayExecutorV2):
    """vLLM's Ray executor, with an early check of the cluster and Tandem's worker class."""

    def _init_executor(self) -> None:
        parallel = self.parallel_config
        join(runtime_env=parallel.ray_runtime_env)
        if parallel.placement_group is None:
            look().require(parallel.world_size, get_ip())
        stock = ray_executor_v2.RayWorkerProc
        ray_executor_v2.RayWorkerProc = TandemRayWorkerProc
        try:
            super()._init_executor()
        finally:
            ray_executor_v2.RayWorkerProc = stock
