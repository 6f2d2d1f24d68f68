"""All monkey patches of vLLM and torch, in one table. Everything else is subclassing.

Each entry names its target, reason and versions; a test fails for an entry that is no longer needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING

from tandem.vllm_plugin.unsupported import refuse_model

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig


@dataclass(frozen=True)
class Override:
    """One patched attribute."""

    target: str
    reason: str
    versions: str
    apply: Callable[[], None]


def _empty() -> None:
    """Do nothing, since torch uses no accelerator."""


def _emptying(name: str) -> Callable[[], None]:
    """Return a function that patches `torch.accelerator.<name>` if there is no accelerator."""

    def replace() -> None:
        import torch

        if not torch.accelerator.is_available():
            setattr(torch.accelerator, name, _empty)

    return replace


def _validate_v2_model_runner(config: VllmConfig) -> None:
    unsupported = config._get_v2_model_runner_unsupported_features()
    if unsupported:
        raise ValueError(f"vLLM's second scheduling contract does not support {', '.join(unsupported)}")


def _replace_validation() -> None:
    from vllm.config import VllmConfig

    VllmConfig._validate_v2_model_runner = _validate_v2_model_runner


def _is_multimodal(architecture: str) -> bool:
    from vllm.model_executor.models.registry import _MULTIMODAL_MODELS

    return architecture in _MULTIMODAL_MODELS


def _look_at_models_first() -> None:
    from vllm.engine.arg_utils import EngineArgs

    stock = EngineArgs.create_model_config
    if hasattr(stock, "__wrapped__"):
        return  # already patched

    @wraps(stock)
    def create_model_config(args: EngineArgs) -> ModelConfig:
        refuse_model(args.model, args.revision, _is_multimodal)
        return stock(args)

    EngineArgs.create_model_config = create_model_config


def _keep_sigterm() -> None:
    from vllm.v1.engine.utils import CoreEngineActorManager

    stock = CoreEngineActorManager.__init__
    if hasattr(stock, "__wrapped__"):
        return  # already patched

    @wraps(stock)
    def initialise(manager: CoreEngineActorManager, *args: object, **kwargs: object) -> None:
        from tandem.vllm_plugin.ray_cluster import join

        join()
        stock(manager, *args, **kwargs)

    CoreEngineActorManager.__init__ = initialise


OVERRIDES = (
    Override(
        target="vllm.engine.arg_utils.EngineArgs.create_model_config",
        reason="vLLM imports a model's classes, which may need packages that are not here, before it asks a platform "
        "anything; an architecture that Tandem lacks would be found by the workers, minutes later",
        versions="vllm 0.32",
        apply=_look_at_models_first,
    ),
    Override(
        target="vllm.config.VllmConfig._validate_v2_model_runner",
        reason="only the contract of vLLM's second model runner schedules ahead under pipeline parallelism; it demands "
        "Triton for kernels that are not used here",
        versions="vllm 0.32",
        apply=_replace_validation,
    ),
    Override(
        target="vllm.v1.engine.utils.CoreEngineActorManager.__init__",
        reason="ray.init takes SIGTERM over from the server of replicas, which then ends with code 15 or, when that "
        "takes more than 3 s, by SIGABRT",
        versions="vllm 0.32, ray 2.60",
        apply=_keep_sigterm,
    ),
    *(
        Override(
            target=f"torch.accelerator.{name}",
            reason="vLLM calls it when any platform but its own CPU one shuts down; without an accelerator torch raises",
            versions="vllm 0.32, torch 2.13",
            apply=_emptying(name),
        )
        for name in ("empty_cache", "empty_host_cache")
    ),
)


def apply() -> None:
    """Apply every override. Idempotent."""
    for override in OVERRIDES:
        override.apply()
