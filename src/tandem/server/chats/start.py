"""From a chat request to sequences that are under way: for every dialect of a chat."""

from __future__ import annotations

from fastapi import Request

from tandem.errors import RequestError
from tandem.server.chats.plan import ChatPlan, plan_chat
from tandem.server.chats.request_texts import RequestTexts
from tandem.server.engines.served_model import Served
from tandem.server.generation.generate import Generation
from tandem.server.openai.sampling import check_prompt_logprobs, check_sizes, room, sampling_params
from tandem.server.openai.schemas import ChatRequest


async def prepare_chat(http: Request, served: Served, fields: ChatRequest) -> tuple[ChatPlan, RequestTexts]:
    """What the request comes to, for a model that is loaded. Raises RequestError."""
    check_sizes(fields, most_choices=served.settings.server.max_choices)
    return await plan_chat(http, served, fields)


async def start_chat(
    http: Request, served: Served, fields: ChatRequest, request_id: str, *, clip: bool = False
) -> tuple[ChatPlan, Generation, str]:
    """Check the request and submit it; the generation is the caller's to close. Also the model's name.

    With `clip` an output limit beyond the context is no error. Raises RequestError.
    """
    plan, texts = await prepare_chat(http, served, fields)
    check_prompt_logprobs("prompt_logprobs", fields.prompt_logprobs, len(plan.prompt), 1)
    max_tokens = room(plan.prompt, _asked_tokens(fields), served, texts.status, param="messages", clip=clip)
    logprobs = (fields.top_logprobs or 0) if fields.logprobs else None
    params = [
        sampling_params(
            fields, texts.status, max_tokens=max_tokens, logprobs=logprobs, choice=choice, form=plan.form,
            prompt_logprobs=None if choice and max_tokens else fields.prompt_logprobs)  # one says it for all
        for choice in range(fields.n or 1)
    ]
    work = [(plan.prompt, one) for one in params]
    generation = Generation(http, served, fields, work, texts.tokenizer, request_id=request_id,
                            prompt_tokens=len(plan.prompt), continues=plan.form is not None, shown=plan.shown)
    return plan, generation, texts.status.model


def _asked_tokens(fields: ChatRequest) -> int | None:
    """The output limit, which OpenAI has renamed. Raises RequestError when both names are used with two values."""
    old, new = fields.max_tokens, fields.max_completion_tokens
    if old is not None and new is not None and old != new:
        message = f"'max_tokens' ({old}) and 'max_completion_tokens' ({new}) contradict each other; give one of them."
        raise RequestError(message, param="max_tokens", code="invalid_value")
    return new if new is not None else old
