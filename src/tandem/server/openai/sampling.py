"""Checks of a request against the model (context length, token ids), and its sampling parameters."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeVar

from msgspec.structs import replace

from tandem.errors import RequestError, invalid
from tandem.protocol.control import EngineStatus
from tandem.protocol.request import SamplingParams, StructuredOutputs
from tandem.server.engines.served_model import Served
from tandem.server.openai.schemas import SamplingFields
from tandem.text.tokenizer import too_long

Number = TypeVar("Number", int, float)

MOST_PROMPT_LOGPROBS = 2**20
"""Most log probabilities of prompts in one answer: about 70 MB of JSON."""
_SEED_MASK = 2**64 - 1


def check_token_ids(tokens: Collection[int], vocab_size: int, param: str) -> None:
    """Raise RequestError if a token id is not in the vocabulary."""
    for token in (min(tokens), max(tokens)) if tokens else ():
        if not 0 <= token < vocab_size:
            raise invalid(param, f"Invalid '{param}': token id {token} is not in the vocabulary (0 to {vocab_size - 1}).")


def check_sizes(fields: SamplingFields, *, most_choices: int, prompts: int = 1, echo: bool = False) -> None:
    """Raise RequestError for too many sequences, for `max_tokens` 0 without a use, or for prompt logprobs in a stream.

    `most_choices`: limit of sequences per request; `prompts`: number of prompts; `echo`: the prompt is returned.
    """
    n = fields.n or 1
    if prompts > most_choices:
        raise RequestError(f"At most {most_choices} prompts in one request, not {prompts}.", param="prompt")
    if n * prompts > most_choices:
        times = f" for each of {prompts} prompts" if prompts > 1 else ""
        raise invalid("n", f"At most {most_choices} choices in one request, not {n}{times}.")
    if fields.max_tokens == 0 and fields.prompt_logprobs is None and not echo:
        message = (
            "'max_tokens' is 0; it must be at least 1, but where the prompt itself is asked for, with "
            "'prompt_logprobs' (or, of /v1/completions, with 'echo')."
        )
        raise invalid("max_tokens", message)
    if fields.stream and fields.prompt_logprobs is not None:
        message = "'prompt_logprobs' are not available in a stream; leave out 'stream', or 'prompt_logprobs'."
        raise invalid("prompt_logprobs", message)


def check_prompt_logprobs(param: str, count: int | None, tokens: int, choices: int) -> None:
    """Raise RequestError for more log probabilities of prompts than `MOST_PROMPT_LOGPROBS`, to bound the api's memory.

    `count`: most likely tokens per position (None: not requested); `tokens`: prompt tokens in all; `choices`: choices
    per prompt.
    """
    if count is not None and (told := tokens * choices * (count + 1)) > MOST_PROMPT_LOGPROBS:
        times = f", in each of {choices} choices" if choices > 1 else ""
        message = (
            f"'{param}' of {count} for {tokens} prompt tokens{times} comes to {told} log probabilities; an "
            f"answer may hold {MOST_PROMPT_LOGPROBS}. Ask for fewer, or send shorter prompts."
        )
        raise invalid(param, message)


def room(prompt: Sequence[int], asked: int | None, served: Served, status: EngineStatus, *, param: str) -> int:
    """Return the output limit in tokens, capped by what is left of the context.

    The limit is the request's (`asked`), else the server's, else the model's, else the rest of the context. Raises
    RequestError, in OpenAI's words, if the prompt is empty or leaves no room.
    """
    context, default = status.max_context, served.settings.server.default_max_tokens or status.defaults.max_tokens
    if not prompt:
        raise invalid(param, f"'{param}' holds no tokens; give at least one.")
    left = context - len(prompt)
    if left < (asked != 0):
        raise too_long(context, param, len(prompt))
    return min(default or left if asked is None else asked, left)


def sequences_of(
    prompt: list[int],
    fields: SamplingFields,
    served: Served,
    status: EngineStatus,
    *,
    param: str,
    asked: int | None,
    logprobs: int | None,
    form: StructuredOutputs | None,
    prompt_logprobs: int | None,
) -> list[tuple[list[int], SamplingParams]]:
    """Return (prompt, sampling parameters) for each choice of one prompt, with the model's defaults for missing fields.

    `asked`: output limit of the request, which may exceed the context. Without streaming, only the first choice computes
    the prompt's log probabilities. A given seed is increased by the choice's number, so that each choice is reproducible
    and different. Raises RequestError naming `param`.
    """
    max_tokens = room(prompt, asked, served, status, param=param)
    if form is not None:
        for name in ("min_tokens", "ignore_eos"):
            if getattr(fields, name):
                raise invalid(name, f"'{name}' contradicts structured output, whose form decides where the answer ends.")
    if (fields.min_tokens or 0) > max_tokens:
        raise invalid("min_tokens", f"'min_tokens' ({fields.min_tokens}) must not be more than the output limit ({max_tokens}).")
    check_token_ids(fields.stop_token_ids or (), status.vocab_size, "stop_token_ids")
    own = status.defaults
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=fields.min_tokens or 0,
        temperature=_first(fields.temperature, own.temperature, 1.0),
        top_p=_first(fields.top_p, own.top_p, 1.0),
        top_k=max(_first(fields.top_k, own.top_k, 0), 0),
        min_p=_first(fields.min_p, own.min_p, 0.0),
        repetition_penalty=_first(fields.repetition_penalty, own.repetition_penalty, 1.0),
        frequency_penalty=fields.frequency_penalty or 0.0,
        presence_penalty=fields.presence_penalty or 0.0,
        logit_bias=_logit_bias(fields.logit_bias or {}, status.vocab_size),
        stop=tuple(fields.stop or ()),
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        ignore_eos=bool(fields.ignore_eos),
        logprobs=logprobs,
        structured_outputs=form,
        prompt_logprobs=prompt_logprobs,
    )
    return [(prompt, _of_choice(params, choice, fields)) for choice in range(fields.n or 1)]


def _of_choice(params: SamplingParams, choice: int, fields: SamplingFields) -> SamplingParams:
    seed = None if fields.seed is None else (fields.seed + choice) & _SEED_MASK
    alike = not choice or not params.max_tokens or bool(fields.stream)
    return replace(params, seed=seed, prompt_logprobs=params.prompt_logprobs if alike else None)


def _first(asked: Number | None, own: Number | None, default: Number) -> Number:
    return asked if asked is not None else default if own is None else own


def _logit_bias(given: dict[str, float], vocab_size: int) -> dict[int, float]:
    bias = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise invalid("logit_bias", f"Invalid 'logit_bias': key '{key[:40]}' is not a token id.")
        bias[int(key)] = value
    check_token_ids(bias, vocab_size, "logit_bias")
    return bias
