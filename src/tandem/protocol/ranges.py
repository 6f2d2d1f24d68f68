"""Ranges of sampling parameters, shared by HTTP, command line, Python API and engine, and checks against them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tandem.errors import RequestError
from tandem.protocol.request import EngineRequest, SamplingParams, StructuredOutputs


@dataclass(frozen=True)
class ValueRange:
    """Range of allowed values of a parameter."""

    low: float
    high: float
    above: bool = False
    """True if `low` itself is excluded."""
    off: str = ""
    """Value that disables the parameter, in words; empty if none does."""

    def __contains__(self, value: float) -> bool:
        # Compare without converting: an integer may exceed the range of float. NaN fails every comparison.
        return abs(value) < math.inf and value <= self.high and (value > self.low if self.above else value >= self.low)

    def __str__(self) -> str:
        low = f"above {self.low:g}" if self.above else f"at least {self.low:g}"
        words = low if self.high == math.inf else f"{low} and at most {self.high:g}"
        return f"{words} ({self.off} turns it off)" if self.off else words

    @property
    def bounds(self) -> dict[str, float]:
        """Bounds as keyword arguments of pydantic's `Field`."""
        low = {"gt" if self.above else "ge": self.low}
        return low if self.high == math.inf else {**low, "le": self.high}


RANGES: dict[str, ValueRange] = {
    "max_tokens": ValueRange(1, math.inf),
    "min_tokens": ValueRange(0, math.inf),
    "temperature": ValueRange(0, 2),
    "top_p": ValueRange(0, 1, above=True),
    "top_k": ValueRange(0, 2**31 - 1, off="0"),
    "min_p": ValueRange(0, 1),
    "repetition_penalty": ValueRange(0, 10, above=True),
    "frequency_penalty": ValueRange(-2, 2),
    "presence_penalty": ValueRange(-2, 2),
}
BIAS = ValueRange(-100, 100)
MAX_STOPS = 16
"""Maximum stop strings. OpenAI allows 4; each is searched for at every token."""
MAX_LOGPROBS = 20
MAX_BIASES = 1024


def check_params(params: SamplingParams, vocab_size: int) -> None:
    """Check all parameters. Raises RequestError with field, value and range of the first one out of range."""
    for name, allowed in RANGES.items():
        value = getattr(params, name)
        if value in allowed or (name == "max_tokens" and value == 0 and params.prompt_logprobs is not None):
            continue
        raise RequestError(f"{name} is {value}; it must be {allowed}", param=name)
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(params, name)
        if count is not None and not 0 <= count <= MAX_LOGPROBS:
            raise RequestError(f"{name} is {count}; it must be between 0 and {MAX_LOGPROBS}", param=name)
    if len(params.stop) > MAX_STOPS or any(not text for text in params.stop):
        raise RequestError(f"stop has {len(params.stop)} strings; give at most {MAX_STOPS}, none of them empty", param="stop")
    if params.min_tokens > params.max_tokens:
        raise RequestError(f"min_tokens is {params.min_tokens}, more than max_tokens ({params.max_tokens})", param="min_tokens")
    thinking = params.thinking
    if thinking is not None and (thinking.limit < 0 or not thinking.tokens.opening or not thinking.tokens.closing):
        raise RequestError(
            f"thinking has the limit {thinking.limit}; it must be at least 0, with tokens that open and close the reasoning",
            param="thinking",
        )
    tags = () if thinking is None else (*thinking.tokens.opening, *thinking.tokens.closing, *thinking.message)
    for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias), ("thinking", tags)):
        for token in ids:
            if not 0 <= token < vocab_size:
                raise RequestError(f"{name} names token {token}; the model's are 0 to {vocab_size - 1}", param=name)
    if len(params.logit_bias) > MAX_BIASES:
        raise RequestError(f"logit_bias has {len(params.logit_bias)} entries; give at most {MAX_BIASES}", param="logit_bias")
    for token, bias in params.logit_bias.items():
        if bias not in BIAS:
            raise RequestError(f"logit_bias of token {token} is {bias}; it must be {BIAS}", param="logit_bias")
    if params.structured_outputs is not None:
        _check_form(params, params.structured_outputs)


def check_request(request: EngineRequest, vocab_size: int) -> None:
    """Check a request's parameters. Raises RequestError, also for a pooling or warm-up request that asks for tokens."""
    if request.warms:
        if request.params.max_tokens or request.pooling is not None:
            raise RequestError(
                f"max_tokens is {request.params.max_tokens}; it must be 0 where a prompt is warmed, which yields no tokens",
                param="max_tokens",
            )
    elif request.pooling is None:
        check_params(request.params, vocab_size)
    elif request.params.max_tokens or request.produced:
        raise RequestError(
            f"max_tokens is {request.params.max_tokens}; it must be 0 with pooling, which yields no tokens", param="max_tokens"
        )
    labels = request.label_token_ids
    if labels and (request.pooling != "last" or not 0 <= min(labels) <= max(labels) < vocab_size):
        message = f"label_token_ids is {labels}; it needs pooling 'last', and ids from 0 to {vocab_size - 1}"
        raise RequestError(message, param="label_token_ids")


def _check_form(params: SamplingParams, form: StructuredOutputs) -> None:
    given = [name for name in form.__struct_fields__ if getattr(form, name) not in (None, False)]
    if len(given) != 1:
        raise RequestError(
            f"structured_outputs has {' and '.join(given) or 'nothing'}; give exactly one of {', '.join(form.__struct_fields__)}",
            param="structured_outputs",
        )
    for name in ("min_tokens", "ignore_eos"):
        if getattr(params, name):
            raise RequestError(
                f"{name} contradicts structured_outputs, whose form decides where the output ends; leave it out", param=name
            )
