"""Prefill prompts at replicas ahead of requests, to fill their prefix caches."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterable, Sequence

from fastapi import Request

from tandem.errors import RequestError, UnavailableError
from tandem.json_types import JsonObject
from tandem.server.cache.schemas import WarmRequest
from tandem.server.chats.plan import callable_tools, effort_of, template_variables
from tandem.server.chats.request_texts import RequestTexts
from tandem.server.context import note_ignored
from tandem.server.engines.served_model import Served
from tandem.server.generation import Prompts
from tandem.server.openai.completions import encode_prompts
from tandem.server.openai.messages import Message, ToolChoice
from tandem.text.tokenizer import too_long

_GOES_ON = (" a", "\n1")
"""Two different continuations of a text; tokens common to both do not depend on what follows."""


async def warm(http: Request, served: Served, fields: WarmRequest, replicas: Iterable[int] | None = None) -> JsonObject:
    """Prefill the prompts at all ready replicas, or those among `replicas`; return the API's response object.

    With KV on disk, the first replica computes and the others read. Raises RequestError.
    """
    prompts = await _prompts(await RequestTexts.of(http, served), fields)
    started = time.monotonic()
    ready = [
        shown.replica
        for shown in served.client.replicas()
        if shown.state == "ready" and (replicas is None or shown.replica in replicas)
    ]
    if not ready:
        served.status()
        raise UnavailableError("No replica is ready to warm a prompt; try again shortly.")
    status = served.status()
    if status.prefix_cache.startswith("off"):
        raise RequestError(
            f"This server keeps no prefixes ({status.prefix_cache}), so nothing can be warmed; start it "
            "with --prefix-cache above 0.",
            code="prefix_cache_off",
        )
    shared = status.kv_disk == "on"
    cached: dict[int, int] = {}
    for group in [ready[:1], ready[1:]] if shared and len(ready) > 1 else [ready]:
        if shared:  # a cache query makes ranks finish their writes and look for blocks of other replicas
            for some in (cached, group):
                await asyncio.gather(*(served.client.cache(replica=replica) for replica in some))
        jobs = [(replica, prompt) for replica in group for prompt in prompts]
        outputs = await Prompts(
            http,
            served,
            "warm",
            [prompt for _, prompt in jobs],
            timeout=fields.timeout,
            replicas=[replica for replica, _ in jobs],
            warms=True,
            on_disk=fields.caching["on_disk"],
        ).outputs()
        for (replica, _), output in zip(jobs, outputs, strict=True):
            cached[replica] = cached.get(replica, 0) + output.cached_tokens
    parts = [await _replica(served, replica, prompts, cached[replica]) for replica in ready]
    total = sum(map(len, prompts))
    return {
        "object": "cache.warmed",
        "model": served.name,
        "prompts": len(prompts),
        "prompt_tokens": total,
        "computed_tokens": sum(part["computed_tokens"] for part in parts),
        "replicas": parts,
        "seconds": round(time.monotonic() - started, 3),
    }


async def _replica(served: Served, replica: int, prompts: list[list[int]], cached: int) -> dict[str, int]:
    """Return the tokens of the prompts that `replica` has now in memory and on disk. `cached`: had before warming."""
    reports = [(await served.client.cache(prompt, replica=replica)).get(replica) for prompt in prompts]
    known = [report for report in reports if report is not None]
    return {
        "replica": replica,
        "cached_tokens": cached,
        "computed_tokens": sum(map(len, prompts)) - cached,
        "memory_tokens": sum(report.memory_has for report in known),
        "disk_tokens": sum(report.disk_has for report in known),
    }


async def _prompts(texts: RequestTexts, fields: WarmRequest) -> list[list[int]]:
    """Return the token ids of each prompt. Raises RequestError."""
    if fields.prompt is not None:
        return await encode_prompts(texts, fields.prompt, "prompt")
    tokens, context = await _conversation(texts, fields), texts.status.max_context
    if len(tokens) > context:
        raise too_long(context, "messages", len(tokens))
    return [tokens]


async def _conversation(texts: RequestTexts, fields: WarmRequest) -> list[int]:
    """Return the token ids to warm for the messages.

    A conversation that ends with a user or tool message is rendered as it is. Others, and those with `unfinished`, are
    rendered with two continuations, and the common prefix is used: what templates put after a message depends on the next.
    """
    variables, vain = template_variables(fields, effort_of(fields), texts.tokenizer)
    if vain:
        note_ignored(texts.http, *vain)
    tools = callable_tools(fields, fields.tool_choice or ToolChoice(mode="auto"))
    shown = [tool.model_dump(exclude_none=True) for tool in fields.tools or ()] if tools is not None else []

    async def render(messages: Sequence[Message]) -> list[int]:
        prompt = await texts.render(messages, dict(variables), tools=shown)
        if prompt.pictures:
            raise RequestError(
                "Prompts with pictures are not warmed; send text alone.", param="messages", code="unsupported_value"
            )
        return prompt.tokens

    last = fields.messages[-1]
    if fields.unfinished:
        variants = [
            [*fields.messages[:-1], last.model_copy(update={"content": (last.content or "") + more})] for more in _GOES_ON
        ]
    elif last.role in ("user", "tool"):
        return await render(fields.messages)
    else:
        variants = [[*fields.messages, Message(role="user", content=more.strip())] for more in _GOES_ON]
    first, second = [await render(messages) for messages in variants]
    return first[: len(os.path.commonprefix([first, second]))]
