"""Are sampling parameters within their ranges? One answer for HTTP, the command line and the Python API."""

from __future__ import annotations

from tandem.errors import RequestError
from tandem.protocol.ranges import BIAS, MAX_BIASES, MAX_LOGPROBS, MAX_STOPS, RANGES
from tandem.protocol.request import EngineRequest, SamplingParams, StructuredOutputs


def check_params(params: SamplingParams, vocab_size: int) -> None:
    """Raise RequestError, naming field, value and range, for the first parameter that is out of its range."""
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
        raise RequestError(f"stop has {len(params.stop)} strings; give at most {MAX_STOPS}, none of them empty",
                           param="stop")
    if params.min_tokens > params.max_tokens:
        raise RequestError(f"min_tokens is {params.min_tokens}, more than max_tokens ({params.max_tokens})",
                           param="min_tokens")
    _check_tokens(params, vocab_size)
    if params.structured_outputs is not None:
        _check_form(params, params.structured_outputs)


def check_request(request: EngineRequest, vocab_size: int) -> None:
    """Raise RequestError for parameters out of their ranges, and for a pooled request that asks for tokens too."""
    if request.warms:
        if request.params.max_tokens or request.pooling is not None:
            raise RequestError(f"max_tokens is {request.params.max_tokens}; it must be 0 where a prompt is warmed, "
                               "which yields no tokens", param="max_tokens")
    elif request.pooling is None:
        check_params(request.params, vocab_size)
    elif request.params.max_tokens or request.produced:
        raise RequestError(f"max_tokens is {request.params.max_tokens}; it must be 0 with pooling, which yields no "
                           "tokens", param="max_tokens")


def _check_form(params: SamplingParams, form: StructuredOutputs) -> None:
    given = [name for name in form.__struct_fields__ if getattr(form, name) not in (None, False)]
    if len(given) != 1:
        raise RequestError(f"structured_outputs has {' and '.join(given) or 'nothing'}; give exactly one of "
                           f"{', '.join(form.__struct_fields__)}", param="structured_outputs")
    for name in ("min_tokens", "ignore_eos"):
        if getattr(params, name):
            raise RequestError(f"{name} contradicts structured_outputs, whose form decides where the output ends; "
                               "leave it out", param=name)


def _check_tokens(params: SamplingParams, vocab_size: int) -> None:
    for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
        for token in ids:
            if not 0 <= token < vocab_size:
                raise RequestError(f"{name} names token {token}; the model's are 0 to {vocab_size - 1}", param=name)
    if len(params.logit_bias) > MAX_BIASES:
        raise RequestError(f"logit_bias has {len(params.logit_bias)} entries; give at most {MAX_BIASES}",
                           param="logit_bias")
    for token, bias in params.logit_bias.items():
        if bias not in BIAS:
            raise RequestError(f"logit_bias of token {token} is {bias}; it must be {BIAS}", param="logit_bias")
