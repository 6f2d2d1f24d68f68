"""Which tokens the prompts have in common that begin like one that is to be warmed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from tandem.errors import RequestError
from tandem.server.cache.schemas import WarmRequest
from tandem.server.chats.fitting import too_long
from tandem.server.chats.plan import callable_tools
from tandem.server.chats.request_texts import RequestTexts
from tandem.server.chats.variables import template_variables
from tandem.server.openai.completions import encode_prompts
from tandem.server.openai.messages import Message, ToolChoice

_GOES_ON = (" a", "\n1")
"""Two ways in which a text may go on: what they share with it is certain, whatever follows."""


async def warm_prompts(texts: RequestTexts, fields: WarmRequest) -> list[list[int]]:
    """Token ids of each prompt. Raises RequestError."""
    if fields.prompt is not None:
        prompts = await encode_prompts(texts, fields.prompt, "prompt")
    else:
        prompts = [await _conversation(texts, fields)]
    context = texts.status.max_context
    if (longest := max(map(len, prompts))) > context:
        raise too_long(context, "prompt" if fields.prompt is not None else "messages", longest)
    if not all(prompts):
        raise RequestError("'prompt' holds no tokens; give at least one.", param="prompt", code="invalid_value")
    return prompts


async def _conversation(texts: RequestTexts, fields: WarmRequest) -> list[int]:
    """One that ends with a user's message is answered next, and is the prompt as it is. Of others, and of one whose
    last message goes on, that part is the prompt which any way to go on has: templates put the ends of messages, and
    some the beginning, where the next message decides."""
    variables = template_variables(texts.http, fields, texts.tokenizer)
    tools = callable_tools(fields, fields.tool_choice or ToolChoice(mode="auto"))
    given = [tool.model_dump(exclude_none=True) for tool in fields.tools or ()] if tools is not None else []

    async def render(messages: Sequence[Message]) -> list[int]:
        return (await texts.render(messages, dict(variables), tools=given)).tokens

    last = fields.messages[-1]
    if fields.unfinished:
        variants = [[*fields.messages[:-1], last.model_copy(update={"content": (last.content or "") + more})]
                    for more in _GOES_ON]
    elif last.role in ("user", "tool"):
        return await render(fields.messages)
    else:
        variants = [[*fields.messages, Message(role="user", content=more.strip())] for more in _GOES_ON]
    first, second = [await render(messages) for messages in variants]
    return _common(first, second)


def _common(first: list[Any], second: list[Any]) -> list[Any]:
    return first[:len(os.path.commonprefix([first, second]))]
