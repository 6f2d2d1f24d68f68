"""vLLM's platform class for Tandem: device properties and configuration."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING

import torch
from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.platforms.interface import Platform, PlatformEnum
from vllm.utils.network_utils import get_ip

from tandem.env import machine_memory, variable
from tandem.launchers.ray.nodes import UNIT
from tandem.protocol.kv_blocks import BLOCK_SIZE
from tandem.vllm_plugin.compat import apply
from tandem.vllm_plugin.params import check
from tandem.vllm_plugin.rendezvous import add_keys
from tandem.vllm_plugin.unsupported import refuse_unsupported
from tandem.vllm_plugin.variables import DEVICES, FROM_VLLM_METAL, WITHOUT_EFFECT, check_devices, read_options

if TYPE_CHECKING:
    from vllm import PoolingParams, SamplingParams
    from vllm.config import VllmConfig

logger = init_logger("vllm.tandem")


class TandemPlatform(Platform):
    """MLX through Tandem. torch only carries metadata and sees a CPU."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    dispatch_key = "CPU"
    dist_backend = "gloo"
    device_control_env_var = DEVICES
    simple_compile_backend = "eager"
    additional_env_vars = [
        "TANDEM_MEMORY_FRACTION",
        "VLLM_METAL_MEMORY_FRACTION",
        "TANDEM_BASE_PORT",
        "VLLM_METAL_RING_BASE_PORT",
        "TANDEM_DTYPE",
        "TANDEM_BLAS",
        "TANDEM_LAYER_SPLIT",
        "TANDEM_THREADS_PER_RANK",
    ]

    @property
    def ray_device_key(self) -> str:
        """Ray resource of one device: `mlx`, or `GPU` in a cluster without `mlx`."""
        if "ray" not in sys.modules:
            return UNIT
        from tandem.vllm_plugin.ray_cluster import device_key  # Ray may not be installed

        return device_key()

    @property
    def supported_dtypes(self) -> list[torch.dtype]:
        """Dtypes that MLX computes in."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        """Return the device's name for logs."""
        return "mlx"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        """Return the machine's memory in bytes, which an Apple GPU shares."""
        return machine_memory()

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        """Do nothing, since torch computes nothing."""

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        """Do nothing: random numbers come from MLX, with a seed per request."""

    @classmethod
    def inference_mode(cls) -> torch.no_grad:
        """Return torch.no_grad(), since torch computes nothing."""
        return torch.no_grad()

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        """Return False: no array is copied to a device."""
        return False

    @classmethod
    def import_kernels(cls) -> None:
        """Do nothing, since vLLM's kernels are not used."""

    @classmethod
    def import_ir_kernels(cls) -> None:
        """Do nothing, since vLLM's IR kernels are not used."""

    @classmethod
    def _find_non_ssm_backends(cls, vllm_config: VllmConfig) -> list[object]:
        return []

    @classmethod
    def validate_environ(cls, hard_fail: bool) -> None:
        """Register vllm-metal's variables, so that vLLM does not report them as unknown; log those without effect."""
        from vllm import envs

        for name in FROM_VLLM_METAL:
            envs.environment_variables.setdefault(name, partial(variable, name))
        for name, instead in WITHOUT_EFFECT.items():
            if variable(name) is not None:
                logger.warning_once("%s has no effect: %s", name, instead)
        super().validate_environ(hard_fail)

    @classmethod
    def validate_request(cls, processed_inputs: object, params: SamplingParams | PoolingParams) -> None:
        """Raise VLLMValidationError (HTTP status 400) for parameters that Tandem does not support."""
        if hasattr(params, "temperature"):
            try:
                check(params)
            except ValueError as error:
                raise VLLMValidationError(str(error)) from error

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Set worker, executor and compilation mode in vLLM's configuration. Raises ConfigError for unsupported settings."""
        from vllm.config import CompilationMode, CUDAGraphMode  # vllm.config imports the platform

        apply()
        refuse_unsupported(vllm_config)
        read_options()
        check_devices()
        parallel, compilation = vllm_config.parallel_config, vllm_config.compilation_config
        if parallel.worker_cls == "auto":
            parallel.worker_cls = "tandem.vllm_plugin.worker.TandemWorker"
        if parallel.distributed_executor_backend == "ray":
            from tandem.vllm_plugin.ray_cluster import check_start
            from tandem.vllm_plugin.ray_executor import TandemRayExecutor

            check_start(parallel, get_ip())

            # A class, since vLLM would not recognise its name in a string as a Ray executor.
            parallel.distributed_executor_backend = TandemRayExecutor
        cache = vllm_config.cache_config
        if not cache.user_specified_block_size:
            cache.block_size = BLOCK_SIZE
        add_keys(vllm_config)
        compilation.mode = CompilationMode.NONE
        compilation.cudagraph_mode = CUDAGraphMode.NONE
        parallel.disable_custom_all_reduce = True
