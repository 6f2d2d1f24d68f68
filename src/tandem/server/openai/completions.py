"""Route POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, Request
from msgspec.structs import replace
from starlette.responses import Response

from tandem.errors import invalid
from tandem.protocol.logprobs import PromptLogprobs, TokenLogprob
from tandem.server.acquire import acquire
from tandem.server.body import parse
from tandem.server.chats.plan import prompt_budget
from tandem.server.chats.request_texts import RequestTexts
from tandem.server.chats.response_formats import response_format_of
from tandem.server.chats.texts import LARGE, off_loop
from tandem.server.context import head, new_id
from tandem.server.engines.served_model import Served
from tandem.server.generation import Delta, Generation
from tandem.server.openai.logprobs import CompletionLogprobs, prompt_places
from tandem.server.openai.sampling import check_prompt_logprobs, check_sizes, check_token_ids, sequences_of
from tandem.server.openai.schemas import CompletionRequest
from tandem.server.openapi import documented
from tandem.server.sse import ChunkWriter, encode_json, streamed
from tandem.text.tokenizer import Tokenizer, too_long

router = APIRouter()


@router.post("/v1/completions", openapi_extra=documented(CompletionRequest, streams=True))
async def completions(http: Request) -> Response:
    """Continue prompts, in one piece or as a stream. Choices are numbered prompt by prompt."""
    fields = await parse(http, CompletionRequest)
    served, n = await acquire(http, fields.model, stream=fields.stream), fields.n or 1
    generation, choices = await start_completion(http, served, fields, new_id("cmpl"))
    if fields.stream:
        return await streamed(generation, CompletionWriter(fields, generation, choices), include_usage=fields.include_usage)
    answers = await generation.collect()
    for index, answer in enumerate(answers):
        answer.prompt = answers[index - index % n].prompt  # only the first choice of each prompt has them

    def body() -> bytes:
        whole = [{"index": answer.index, **choice.whole(answer)} for choice, answer in zip(choices, answers, strict=True)]
        return encode_json(
            {
                **head("text_completion", generation.request_id, generation.model),
                "choices": whole,
                "usage": generation.usage(),
                "performance": generation.performance(),
            }
        )

    asked = _asked_of_prompt(fields)
    size = generation.prompt_tokens * n * (asked + 1) if asked else 0
    return Response(await off_loop(size > LARGE, body), media_type="application/json")


async def start_completion(
    http: Request, served: Served, fields: CompletionRequest, request_id: str
) -> tuple[Generation, list[_Writing]]:
    """Check the request and submit it to the engine; the caller must close the generation. Raises RequestError."""
    n = fields.n or 1
    check_sizes(fields, most_choices=served.settings.server.max_choices, prompts=len(fields.prompt), echo=bool(fields.echo))
    texts = await RequestTexts.of(http, served)
    prompts = await encode_prompts(texts, fields.prompt, "prompt")
    tokens = sum(map(len, prompts))
    for param, count in (("prompt_logprobs", fields.prompt_logprobs), ("logprobs", fields.logprobs)):
        if param != "logprobs" or fields.echo:
            check_prompt_logprobs(param, count, tokens, n)
    form, asked = await response_format_of(texts, fields), _asked_of_prompt(fields)
    settings = served.settings.server
    budgets = await off_loop(tokens > LARGE, lambda: [prompt_budget(http, fields, texts, settings, prompt) for prompt in prompts])
    work = [
        (sequence, replace(params, thinking=budget))
        for prompt, budget in zip(prompts, budgets, strict=True)
        for sequence, params in sequences_of(
            prompt,
            fields,
            served,
            texts.status,
            param="prompt",
            asked=fields.max_tokens,
            logprobs=fields.logprobs,
            form=form,
            prompt_logprobs=asked,
        )
    ]
    echoes = await _echoes(texts, fields, n)
    generation = Generation(
        http,
        served,
        fields,
        work,
        texts.tokenizer,
        request_id=request_id,
        prompt_tokens=tokens,
        continues=True,
        logs_end=_echoes_logprobs(fields),
    )
    choices = [_Writing(fields, echo, prompt, texts.tokenizer) for echo, (prompt, _) in zip(echoes, work, strict=True)]
    return generation, choices


def _echoes_logprobs(fields: CompletionRequest) -> bool:
    return bool(fields.echo) and fields.logprobs is not None


def _asked_of_prompt(fields: CompletionRequest) -> int | None:
    """Return the number of most likely tokens to report per prompt position; None for no prompt log probabilities."""
    wanted = [fields.prompt_logprobs, fields.logprobs if fields.echo else None, 0 if fields.max_tokens == 0 else None]
    return max((count for count in wanted if count is not None), default=None)


class _Writing:
    """Formatter of one choice: echo, text and log probabilities."""

    def __init__(self, fields: CompletionRequest, echo: str, prompt: list[int], tokenizer: Tokenizer) -> None:
        self.echo = echo
        self.echoes_logprobs = _echoes_logprobs(fields)
        self._fields, self._prompt, self._tokenizer = fields, prompt, tokenizer
        self._logprobs = CompletionLogprobs(tokenizer) if fields.logprobs is not None else None

    def of_prompt(self, places: PromptLogprobs) -> dict[str, list[object]] | None:
        """Return the `logprobs` object of the echoed prompt."""
        assert self._logprobs is not None
        return self._logprobs.echoed(self.echo, self._prompt, places, self._fields.logprobs or 0)

    def of_output(self, entries: list[TokenLogprob]) -> dict[str, list[object]] | None:
        """Return the `logprobs` object of output tokens; None if not requested."""
        return self._logprobs.format(entries) if self._logprobs is not None else None

    def whole(self, answer: Delta) -> dict[str, object]:
        """Return the complete choice object, without its index."""
        parts = [self.of_prompt(answer.prompt)] if self.echoes_logprobs and answer.prompt is not None else []
        parts.append(self.of_output(answer.logprobs))
        logprobs = {name: [value for part in parts if part is not None for value in part[name]] for name in parts[0] or ()}
        choice: dict[str, object] = {
            "text": self.echo + answer.text,
            "logprobs": logprobs or None,
            "finish_reason": answer.finish_reason,
        }
        if self._fields.prompt_logprobs is not None and answer.prompt is not None:
            count = self._fields.prompt_logprobs
            choice["prompt_logprobs"] = prompt_places(self._tokenizer, self._prompt, answer.prompt, count)
        return choice


async def encode_prompts(
    texts: RequestTexts, prompts: Sequence[str | list[int]], param: str, *, closed: bool = False
) -> list[list[int]]:
    """Return the token ids of each prompt (text or token ids), checked against context and vocabulary.

    `closed`: end as embedding models expect. Raises RequestError naming `param`.
    """
    context = texts.status.max_context
    encoded = iter(await texts.encode([prompt for prompt in prompts if isinstance(prompt, str)], param, closed=closed))
    tokens = [next(encoded) if isinstance(prompt, str) else prompt for prompt in prompts]
    for prompt in tokens:
        if not prompt:
            raise invalid(param, f"'{param}' holds no tokens; give at least one.")
        if len(prompt) > context:
            raise too_long(context, param, len(prompt))
        check_token_ids(prompt, texts.status.vocab_size, param)
    return tokens


async def _echoes(texts: RequestTexts, fields: CompletionRequest, n: int) -> list[str]:
    """Return the text to put before each choice: its prompt with `echo`, else empty. `n`: choices per prompt."""
    echoes = []
    for prompt in fields.prompt:
        text = ""
        if fields.echo:
            text = prompt if isinstance(prompt, str) else await texts.decode(prompt)
        echoes += [text] * n
    return echoes


class CompletionWriter(ChunkWriter):
    """Writer of a streamed completion."""

    def __init__(self, fields: CompletionRequest, generation: Generation, choices: list[_Writing]) -> None:
        super().__init__("text_completion", generation, fields)
        self._choices = choices

    def head(self) -> bytes:
        """Return chunks with the echoed prompts; with log probabilities, `delta` returns them instead."""
        return b"".join(
            self._envelope.chunk(_choice(index, choice.echo))
            for index, choice in enumerate(self._choices)
            if choice.echo and not choice.echoes_logprobs
        )

    def delta(self, delta: Delta, extras: dict[str, object] | None) -> bytes:
        """Return a chunk for new text, after the echoed prompt if its log probabilities have arrived."""
        mine, echo = self._choices[delta.index], b""
        if mine.echoes_logprobs and delta.prompt is not None:
            echo = self._envelope.chunk(_choice(delta.index, mine.echo, mine.of_prompt(delta.prompt)))
        choice = _choice(delta.index, delta.text, mine.of_output(delta.logprobs), delta.finish_reason)
        return echo + self._envelope.chunk(choice, extras)


def _choice(index: int, text: str, logprobs: object = None, finish_reason: str | None = None) -> dict[str, object]:
    return {"text": text, "index": index, "logprobs": logprobs, "finish_reason": finish_reason}
