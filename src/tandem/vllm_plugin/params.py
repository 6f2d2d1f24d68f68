"""Conversion of vLLM's sampling parameters to Tandem's, and the refusal of unsupported ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tandem.protocol.request import SamplingParams

if TYPE_CHECKING:
    from vllm import SamplingParams as VllmParams

PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")
SAME = (*PENALTIES, "min_tokens", "temperature", "top_p", "min_p", "seed", "ignore_eos", "logprobs")
"""Fields that both have under one name."""
UNSUPPORTED = {
    "prompt_logprobs": "log probabilities of the prompt (prompt_logprobs, or echo with logprobs)",
    "logprob_token_ids": "log probabilities of named tokens (logprob_token_ids)",
    "allowed_token_ids": "allowed_token_ids",
    "bad_words": "bad_words",
    "thinking_token_budget": "a thinking budget (thinking_token_budget; `tandem serve` has one)",
    "watermarking": "watermarking",
}
"""Unsupported fields of vLLM's SamplingParams -> name for error messages."""


def check(params: VllmParams) -> None:
    """Raise ValueError if the parameters use an unsupported feature."""
    for name, words in UNSUPPORTED.items():
        value = getattr(params, name, None)
        if value or type(value) is int:  # 0 asks for something too
            raise ValueError(f"{words} is not supported by Tandem's platform; leave it out")
    if params.logprobs is not None and params.logprobs < 0:
        raise ValueError("logprobs=-1 (the whole vocabulary) is not supported by Tandem's platform; give a number")


def translate(params: VllmParams) -> SamplingParams:
    """Return Tandem's parameters. Stop strings, stop tokens and lengths are left to vLLM, which ends requests itself."""
    return SamplingParams(
        **{name: getattr(params, name) for name in SAME},
        max_tokens=params.max_tokens or 1,
        top_k=max(params.top_k, 0),
        logit_bias=dict(params.logit_bias or {}),
        stop_token_ids=tuple(sorted(params.all_stop_token_ids)),
    )
