"""From a chat request to sequences that are under way: for every dialect of a chat."""

from __future__ import annotations

from typing import Any

from fastapi import Request

from tandem.errors import RequestError
from tandem.protocol.control import EngineStatus
from tandem.server.chats.plan import ChatPlan, plan_chat
from tandem.server.chats.request_texts import RequestTexts
from tandem.server.chats.thinking import add_thinking, wish_of
from tandem.server.context import get_group
from tandem.server.engines.served_model import Served
from tandem.server.fields.ignored import note_ignored
from tandem.server.generation.answer import engine_requests
from tandem.server.generation.generate import Generation
from tandem.server.openai.sampling import check_sizes, room, sampling_params
from tandem.server.openai.schemas import ChatRequest
from tandem.text.tokenizer import Tokenizer

_RESERVED = frozenset(
    {"self", "messages", "conversation", "tools", "tokenize", "add_generation_prompt", "return_dict", "chat_template"}
)


async def prepare_chat(http: Request, served: Served, fields: ChatRequest) -> tuple[ChatPlan, Tokenizer, EngineStatus]:
    """What the request comes to, for a model that is loaded. Raises RequestError."""
    check_sizes(fields, most_choices=served.settings.server.max_choices)
    texts = await RequestTexts.of(http, served)
    variables = template_variables(http, fields, texts.tokenizer)
    return await plan_chat(served, texts, fields, variables), texts.tokenizer, texts.status


def template_variables(http: Request, fields: ChatRequest, tokenizer: Tokenizer) -> dict[str, Any]:
    """What the chat template is told beside messages and tools. Raises RequestError."""
    variables = _template_kwargs(fields)
    if vain := add_thinking(wish_of(fields), tokenizer, variables):
        note_ignored(http, *vain)
    return variables


async def start_chat(
    http: Request, served: Served, fields: ChatRequest, request_id: str, *, clip: bool = False
) -> tuple[ChatPlan, Generation, str]:
    """Check the request and submit it; the generation is the caller's to close. Also the model's name.

    With `clip` an output limit beyond the context is no error. Raises RequestError.
    """
    plan, tokenizer, status = await prepare_chat(http, served, fields)
    max_tokens = room(plan.prompt, _asked_tokens(fields), served, status, param="messages", clip=clip)
    logprobs = (fields.top_logprobs or 0) if fields.logprobs else None
    params = [
        sampling_params(
            fields, status, max_tokens=max_tokens, logprobs=logprobs, choice=choice, form=plan.form,
            prompt_logprobs=None if choice and max_tokens else fields.prompt_logprobs)  # one says it for all
        for choice in range(fields.n or 1)
    ]
    work = [(plan.prompt, one) for one in params]
    generation = Generation(
        http,
        served,
        engine_requests(request_id, get_group(http), work, fields.caching),
        tokenizer,
        request_id=request_id,
        prompt_tokens=len(plan.prompt),
        stream=bool(fields.stream),
        timeout=fields.timeout,
        continues=plan.form is not None,
        shown=plan.shown,
    )
    return plan, generation, status.model


def _asked_tokens(fields: ChatRequest) -> int | None:
    """The output limit, which OpenAI has renamed. Raises RequestError when both names are used with two values."""
    old, new = fields.max_tokens, fields.max_completion_tokens
    if old is not None and new is not None and old != new:
        message = f"'max_tokens' ({old}) and 'max_completion_tokens' ({new}) contradict each other; give one of them."
        raise RequestError(message, param="max_tokens", code="invalid_value")
    return new if new is not None else old


def _template_kwargs(fields: ChatRequest) -> dict[str, Any]:
    """Variables for the chat template. Also checks that log probabilities are asked for consistently."""
    if fields.top_logprobs is not None and not fields.logprobs:
        raise RequestError("'top_logprobs' needs 'logprobs': true.", param="top_logprobs", code="invalid_value")
    given = checked_template_kwargs(fields.chat_template_kwargs)
    thinking = fields.enable_thinking
    if thinking is not None and given.setdefault("enable_thinking", thinking) != thinking:
        message = "'enable_thinking' contradicts the one in 'chat_template_kwargs'."
        raise RequestError(message, param="enable_thinking", code="invalid_value")
    return given


def checked_template_kwargs(given: dict[str, Any] | None) -> dict[str, Any]:
    """A copy. Raises RequestError when it would replace what the server itself hands to the template."""
    for name in given or {}:
        if name in _RESERVED:
            raise RequestError(f"'{name}' cannot be set in 'chat_template_kwargs'.", param="chat_template_kwargs")
    return dict(given or {})
