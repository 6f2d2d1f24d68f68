"""Configurations and models that the plugin refuses before anything starts, with one sentence for each."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from tandem.checkpoints.config import read_config
from tandem.checkpoints.resolve import resolve
from tandem.errors import ConfigError, ModelNotFound, UnsupportedModel
from tandem.models.description import describe
from tandem.models.dry_run import require_dry_run

if TYPE_CHECKING:
    from vllm.config import VllmConfig

Check = tuple["Callable[[VllmConfig], bool]", str]

_CHECKS: tuple[Check, ...] = (
    (lambda c: c.lora_config is not None, "LoRA adapters are not supported; merge the adapter into the model"),
    (
        lambda c: c.speculative_config is not None and c.speculative_config.method != "ngram",
        "of speculative decoding only the method ngram is supported; change --speculative-config",
    ),
    (
        lambda c: c.speculative_config is not None and c.parallel_config.world_size > 1,
        "speculative decoding is "
        "supported for one rank (and replicas of it); leave out --speculative-config, or use `tandem serve`",
    ),
    (
        lambda c: c.speculative_config is not None and c.scheduler_config.async_scheduling,
        "drafts cannot be scheduled ahead of the tokens that they follow; leave out --async-scheduling",
    ),
    (
        lambda c: c.model_config is not None and c.model_config.runner_type != "generate",
        "only text generation is supported; leave out --runner",
    ),
    (lambda c: c.kv_transfer_config is not None, "KV transfer is not supported; leave out --kv-transfer-config"),
    (
        lambda c: c.parallel_config.prefill_context_parallel_size > 1 or c.parallel_config.decode_context_parallel_size > 1,
        "context parallelism is not supported",
    ),
    (
        lambda c: c.parallel_config.enable_expert_parallel and c.parallel_config.tensor_parallel_size == 1,
        "experts are shared out among the ranks of a stage; give --tensor-parallel-size, or leave out --enable-expert-parallel",
    ),
    (
        lambda c: c.parallel_config.data_parallel_size > 1 and c.model_config is not None and c.model_config.is_moe,
        "data parallelism of a mixture of experts is not supported: vLLM runs its replicas in step; run one server per replica",
    ),
    (
        lambda c: _replicas_by_ray(c) and c.parallel_config.world_size > 1,
        "with --data-parallel-backend ray a replica is one rank; leave out --tensor-parallel-size and "
        "--pipeline-parallel-size, or use `tandem serve --launcher ray --data-parallel-size N`, which has both",
    ),
    (
        lambda c: _replicas_by_ray(c) and c.speculative_config is not None,
        "speculative decoding is not served with --data-parallel-backend ray; leave out --speculative-config, or use "
        "`tandem serve --launcher ray --data-parallel-size N --speculative-method ngram`",
    ),
    (
        lambda c: c.parallel_config.data_parallel_hybrid_lb or c.parallel_config.data_parallel_external_lb,
        "--data-parallel-hybrid-lb and --data-parallel-external-lb are not supported; leave them out, or run a server on "
        "each machine and a balancer before them",
    ),
    (
        lambda c: c.parallel_config.data_parallel_size_local == 0,
        "--data-parallel-size-local 0 is not supported: the machine of the server has a replica; leave it out",
    ),
    (
        lambda c: (
            c.parallel_config.data_parallel_backend == "mp"
            and 0 < c.parallel_config.data_parallel_size_local < c.parallel_config.data_parallel_size
        ),
        "--data-parallel-size-local: replicas on other machines need --data-parallel-backend ray",
    ),
    (
        lambda c: c.parallel_config.distributed_executor_backend == "uni" and c.parallel_config.world_size > 1,
        "--distributed-executor-backend uni runs one rank; use mp or ray for more",
    ),
    (lambda c: c.parallel_config.nnodes > 1, "--nnodes is not supported; use the Ray executor for several machines"),
    (
        lambda c: c.cache_config.cache_dtype not in ("auto", "float32", "bfloat16", "float16"),
        "a quantised KV cache (--kv-cache-dtype) is not supported",
    ),
    (lambda c: c.model_config is not None and c.model_config.enable_sleep_mode, "sleep mode is not supported"),
)


def _replicas_by_ray(config: VllmConfig) -> bool:
    parallel = config.parallel_config
    return bool(parallel.data_parallel_size > 1 and parallel.data_parallel_backend == "ray")


def refuse_unsupported(vllm_config: VllmConfig) -> None:
    """Raise ConfigError with every reason why the configuration is unsupported. (pydantic would turn a ValueError into four
    lines that end with a URL.)"""
    reasons = [reason for applies, reason in _CHECKS if applies(vllm_config)]
    if reasons:
        raise ConfigError("Tandem's vLLM platform: " + "; ".join(reasons))


def refuse_model(model: str, revision: str | None, multimodal: Callable[[str], bool]) -> None:
    """Raise UnsupportedModel if the workers cannot load the model. Runs before vLLM inspects the model, which takes minutes and
    needs more packages. `multimodal` tells whether an architecture takes images, video or sound.

    Returns for a model that is not found: vLLM searches more places. Raises BrokenModel.
    """
    try:
        files = resolve(model, revision=revision if "/" in model and not os.path.isdir(model) else None, weights=False)
    except ModelNotFound:
        return
    require_dry_run(files.path, describe(files))
    for name in read_config(files.path).get("architectures") or ():
        if multimodal(str(name)):
            raise UnsupportedModel(
                f"{files.name}: {name} takes images, video or sound, which is not supported under "
                f"vLLM; `tandem serve {model}` serves its text part"
            )
