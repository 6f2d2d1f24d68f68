"""POST /v1/completions."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from tandem.errors import RequestError
from tandem.protocol.control import EngineStatus
from tandem.protocol.request import SamplingParams, StructuredOutputs
from tandem.server.body import parse
from tandem.server.chats.forms import form_of
from tandem.server.chats.texts import decode, encode
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
from tandem.text.tokenizer import Tokenizer

router = APIRouter()


@router.post("/v1/completions", openapi_extra=documented(CompletionRequest, streams=True))
async def completions(http: Request) -> Response:
    """Continue prompts, in one piece or as a stream. Choices are numbered prompt by prompt."""
    fields = await parse(http, CompletionRequest, get_api(http).max_body)
    return await answered_by(http, fields.model, lambda served: _answer(http, served, fields), stream=fields.stream)


async def _answer(http: Request, served: Served, fields: CompletionRequest) -> Response:
    api, status = get_api(http), served.status()
    n = fields.n or 1
    check_choices(served, n, len(fields.prompt))
    if fields.echo and fields.logprobs is not None:
        raise RequestError("'echo' together with 'logprobs' is not supported.", param="echo", code="unsupported_value")
    tokenizer = await served.texts.tokenizer(status)
    prompts = await _encode_all(tokenizer, fields.prompt, status)
    form = await form_of(served.texts, tokenizer, fields)
    request_id = new_id("cmpl")
    work = _work(fields, prompts, status, n, served.settings.server.default_max_tokens, form)
    requests = engine_requests(request_id, get_group(http), work)
    echoes = await _echoes(tokenizer, fields, n)
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


async def _encode_all(tokenizer: Tokenizer, prompts: list[Any], status: EngineStatus) -> list[list[int]]:
    """Token ids of every prompt; ids that the client gave are checked."""
    encoded = []
    for prompt in prompts:
        if isinstance(prompt, str):
            prompt = await encode(tokenizer, prompt)
        elif len(prompt) < status.max_context:  # longer ones are refused anyway
            check_token_ids(prompt, status.vocab_size, "prompt")
        encoded.append(prompt)
    return encoded


def _work(
    fields: CompletionRequest,
    prompts: list[list[int]],
    status: EngineStatus,
    n: int,
    default: int | None,
    form: StructuredOutputs | None,
) -> list[tuple[list[int], SamplingParams]]:
    work = []
    for prompt in prompts:
        max_tokens = room(prompt, fields.max_tokens, status.max_context, default, param="prompt")
        for choice in range(n):
            params = sampling_params(
                fields, status, max_tokens=max_tokens, logprobs=fields.logprobs, choice=choice, form=form
            )
            work.append((prompt, params))
    return work


async def _echoes(tokenizer: Tokenizer, fields: CompletionRequest, n: int) -> list[str]:
    """The text to put before each choice."""
    texts = []
    for prompt in fields.prompt:
        text = ""
        if fields.echo:
            text = prompt if isinstance(prompt, str) else await decode(tokenizer, prompt)
        texts += [text] * n
    return texts


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
