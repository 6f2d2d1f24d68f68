"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from tandem.errors import RequestError
from tandem.protocol.control import EngineStatus
from tandem.protocol.request import SamplingParams, StructuredOutputs
from tandem.server.body import parse
from tandem.server.chats.fitting import too_long
from tandem.server.chats.forms import form_of
from tandem.server.chats.request_texts import RequestTexts
from tandem.server.context import get_api, get_group
from tandem.server.engines.served_model import Served
from tandem.server.generation.answer import collect, engine_requests
from tandem.server.generation.generate import Delta, Generation
from tandem.server.generation.model_wait import answered_by
from tandem.server.ids import new_id
from tandem.server.openai.chat import FINGERPRINT
from tandem.server.openai.logprobs import CompletionLogprobs
from tandem.server.openai.sampling import check_choices, check_token_ids, room, sampling_params
from tandem.server.openai.schemas import CompletionRequest
from tandem.server.openapi import documented
from tandem.server.sse import ChunkWriter, Envelope, encode_json, open_stream

router = APIRouter()


@router.post("/v1/completions", openapi_extra=documented(CompletionRequest, streams=True))
async def completions(http: Request) -> Response:
    """Continue prompts, in one piece or as a stream. Choices are numbered prompt by prompt."""
    fields = await parse(http, CompletionRequest)
    return await answered_by(http, fields.model, lambda served: _answer(http, served, fields), stream=fields.stream)


async def _answer(http: Request, served: Served, fields: CompletionRequest) -> Response:
    api, n = get_api(http), fields.n or 1
    check_choices(served, n, len(fields.prompt))
    if fields.echo and fields.logprobs is not None:
        raise RequestError("'echo' together with 'logprobs' is not supported.", param="echo", code="unsupported_value")
    texts = await RequestTexts.of(http, served)
    tokenizer, status = texts.tokenizer, texts.status
    prompts = await encode_prompts(texts, fields.prompt, "prompt")
    form = await form_of(texts, fields)
    request_id = new_id("cmpl")
    work = _work(fields, prompts, served, status, n, form)
    requests = engine_requests(request_id, get_group(http), work)
    echoes = await _echoes(texts, fields, n)
    generation = Generation(
        api,
        http,
        served,
        requests,
        tokenizer,
        request_id=request_id,
        prompt_tokens=sum(map(len, prompts)),
        stream=bool(fields.stream),
        timeout=fields.timeout,
        continues=True,
    )
    head = _head(request_id, status.model)
    logprobs = [CompletionLogprobs(tokenizer) if fields.logprobs is not None else None for _ in requests]
    if fields.stream:
        writer = CompletionWriter(head, echoes, logprobs, include_usage=fields.include_usage)
        return await open_stream(generation, writer, include_usage=fields.include_usage, heartbeat_s=api.heartbeat_s)
    return await _whole(generation, head, echoes, logprobs)


async def _whole(
    generation: Generation, head: dict[str, Any], echoes: list[str], logprobs: list[CompletionLogprobs | None]
) -> Response:
    answers = await collect(generation, len(echoes))
    choices = [
        {
            "text": echo + answer.text,
            "index": index,
            "logprobs": formatter.format(answer.logprobs) if formatter else None,
            "finish_reason": answer.finish_reason,
        }
        for index, (echo, formatter, answer) in enumerate(zip(echoes, logprobs, answers, strict=True))
    ]
    body = {**head, "choices": choices, "usage": generation.usage(), "performance": generation.performance()}
    return Response(encode_json(body), media_type="application/json")


def _head(request_id: str, model: str) -> dict[str, Any]:
    return {
        "id": request_id,
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": FINGERPRINT,
    }


async def encode_prompts(
    texts: RequestTexts, prompts: Sequence[str | list[int]], param: str, *, closed: bool = False
) -> list[list[int]]:
    """Token ids of every prompt; ids that the client gave are checked. Raises RequestError naming `param`."""
    status = texts.status
    encoded = iter(await texts.encode([one for one in prompts if isinstance(one, str)], param, closed=closed))
    for prompt in prompts:
        if not isinstance(prompt, str):
            if len(prompt) > status.max_context:
                raise too_long(status.max_context, param, len(prompt))
            check_token_ids(prompt, status.vocab_size, param)
    return [next(encoded) if isinstance(prompt, str) else prompt for prompt in prompts]


def _work(
    fields: CompletionRequest,
    prompts: list[list[int]],
    served: Served,
    status: EngineStatus,
    n: int,
    form: StructuredOutputs | None,
) -> list[tuple[list[int], SamplingParams]]:
    work = []
    for prompt in prompts:
        max_tokens = room(prompt, fields.max_tokens, served, status, param="prompt")
        for choice in range(n):
            params = sampling_params(
                fields, status, max_tokens=max_tokens, logprobs=fields.logprobs, choice=choice, form=form
            )
            work.append((prompt, params))
    return work


async def _echoes(texts: RequestTexts, fields: CompletionRequest, n: int) -> list[str]:
    """The text to put before each choice."""
    echoes = []
    for prompt in fields.prompt:
        text = ""
        if fields.echo:
            text = prompt if isinstance(prompt, str) else await texts.decode(prompt)
        echoes += [text] * n
    return echoes


class CompletionWriter(ChunkWriter):
    """Chunks of a streamed completion."""

    def __init__(
        self,
        head: dict[str, Any],
        echoes: list[str],
        logprobs: list[CompletionLogprobs | None],
        *,
        include_usage: bool,
    ) -> None:
        self._echoes = echoes
        self._logprobs = logprobs
        self._envelope = Envelope(head, include_usage=include_usage)

    def head(self) -> bytes:
        """The prompts, when they are to be echoed."""
        return b"".join(
            self._envelope.chunk({"text": echo, "index": index, "logprobs": None, "finish_reason": None})
            for index, echo in enumerate(self._echoes)
            if echo
        )

    def delta(self, delta: Delta, extras: dict[str, Any] | None) -> bytes:
        """One chunk; the last one of a choice carries its finish_reason."""
        formatter = self._logprobs[delta.index]
        choice = {
            "text": delta.text,
            "index": delta.index,
            "logprobs": formatter.format(delta.logprobs) if formatter else None,
            "finish_reason": delta.finish_reason,
        }
        return self._envelope.chunk(choice, extras)

    def usage(self, usage: dict[str, Any], extras: dict[str, Any]) -> bytes:
        """The last chunk, without choices."""
        return self._envelope.without_choice({"usage": usage, **extras})
