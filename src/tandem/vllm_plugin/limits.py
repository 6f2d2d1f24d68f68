"""What the plugin's platform cannot do, checked when vLLM's configuration is complete. One sentence each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Check = tuple[Callable[[Any], bool], str]

_CHECKS: tuple[Check, ...] = (
    (lambda c: c.lora_config is not None, "LoRA adapters are not supported; merge the adapter into the model"),
    (lambda c: c.speculative_config is not None and c.speculative_config.method != "ngram",
     "of speculative decoding only the method ngram is supported; change --speculative-config"),
    (lambda c: c.speculative_config is not None and c.parallel_config.world_size > 1, "speculative decoding is "
     "supported for one rank (and replicas of it); leave out --speculative-config, or use `tandem serve`"),
    (lambda c: c.speculative_config is not None and c.scheduler_config.async_scheduling,
     "drafts cannot be scheduled ahead of the tokens that they follow; leave out --async-scheduling"),
    (lambda c: c.model_config is not None and c.model_config.runner_type != "generate",
     "only text generation is supported; leave out --runner"),
    (lambda c: c.kv_transfer_config is not None, "KV transfer is not supported; leave out --kv-transfer-config"),
    (lambda c: c.parallel_config.prefill_context_parallel_size > 1 or
     c.parallel_config.decode_context_parallel_size > 1, "context parallelism is not supported"),
    (lambda c: c.parallel_config.enable_expert_parallel and c.parallel_config.tensor_parallel_size == 1,
     "experts are shared out among the ranks of a stage; give --tensor-parallel-size, or leave out "
     "--enable-expert-parallel"),
    (lambda c: c.parallel_config.data_parallel_size > 1 and c.model_config is not None and c.model_config.is_moe,
     "data parallelism of a mixture of experts is not supported: vLLM runs its replicas in step; run one server per "
     "replica"),
    (lambda c: c.parallel_config.distributed_executor_backend == "uni" and c.parallel_config.world_size > 1,
     "--distributed-executor-backend uni runs one rank; use mp or ray for more"),
    (lambda c: c.parallel_config.nnodes > 1, "--nnodes is not supported; use the Ray executor for several machines"),
    (lambda c: c.cache_config.cache_dtype not in ("auto", "float32", "bfloat16", "float16"),
     "a quantised KV cache (--kv-cache-dtype) is not supported"),
    (lambda c: c.model_config is not None and c.model_config.enable_sleep_mode, "sleep mode is not supported"),
)


def refuse_unsupported(vllm_config: Any) -> None:
    """Raise ValueError with every reason for which this configuration cannot run."""
    reasons = [reason for applies, reason in _CHECKS if applies(vllm_config)]
    if reasons:
        raise ValueError("Tandem's vLLM platform: " + "; ".join(reasons))
