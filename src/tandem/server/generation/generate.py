"""One generating HTTP request: its sequences in the engine, their tokens turned into text, and how it ends."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

from fastapi import Request
from msgspec.structs import replace

from tandem.protocol.control import Output
from tandem.protocol.logprobs import PromptLogprobs, TokenLogprob
from tandem.protocol.request import EngineRequest, SamplingParams
from tandem.server.context import get_group
from tandem.server.engines.served_model import Served
from tandem.server.generation.lifetime import Running
from tandem.server.openai.schemas import SamplingFields
from tandem.text.stream import TextStream
from tandem.text.tokenizer import Tokenizer


@dataclass(slots=True)
class Delta:
    """New text of one choice, or all of it. `finish_reason` is set on the last one."""

    index: int
    text: str
    logprobs: list[TokenLogprob]
    finish_reason: str | None
    stop: str | None = None
    """The stop string that ended it."""
    prompt: PromptLogprobs | None = None
    """Of its prompt, with the first delta, if they were asked for."""


class Choice:
    """One sequence: counts its tokens and turns them into text that is safe to show."""

    def __init__(self, index: int, tokenizer: Tokenizer, stop: Sequence[str], *, continues: bool,
                 shown: frozenset[int], logs_end: bool = False) -> None:
        """`logs_end`: the log probability of the token that ends the text is handed on, although it has no text."""
        self.tokens = 0
        self.finish_reason: str | None = None
        self._index = index
        self._text = TextStream(tokenizer, stop, continues=continues, shown=shown)
        self._one_by_one = bool(stop)
        self._logs_end = logs_end
        self._pending: list[TokenLogprob] = []
        self._prompt: PromptLogprobs | None = None

    def take(self, output: Output) -> Delta | None:
        """What an output adds; None while its text is held back. Log probabilities wait for their text."""
        visible = output.tokens[:-1] if output.stop_token else output.tokens
        text, used = self._push(visible)
        self._pending += output.logprobs[:None if self._logs_end and not self._text.stopped else used]
        if output.prompt_logprobs is not None:
            self._prompt = output.prompt_logprobs
        if self._text.stopped:
            self.tokens += used
            self.finish_reason = "stop"
        else:
            self.tokens += len(output.tokens)
            self.finish_reason = output.finish_reason
            if self.finish_reason is not None:
                text += self._text.finish()
        if not text and self.finish_reason is None:
            return None
        logprobs, self._pending = self._pending, []
        prompt, self._prompt = self._prompt, None
        return Delta(self._index, text, logprobs, self.finish_reason, self._text.matched, prompt)

    def _push(self, tokens: list[int]) -> tuple[str, int]:
        """New text, and how many of `tokens` it took: where a stop string ends must not depend on batching."""
        if not self._one_by_one:
            return (self._text.push(tokens) if tokens else ""), len(tokens)
        parts = []
        for used, token in enumerate(tokens, 1):
            parts.append(self._text.push([token]))
            if self._text.stopped:
                return "".join(parts), used
        return "".join(parts), len(tokens)


def _seeded(requests: Sequence[EngineRequest], name: str | None) -> list[EngineRequest]:
    """With seeds that follow from `name` where the client gave none: what is begun again draws the same text."""
    def seed(index: int) -> int:
        return int.from_bytes(hashlib.blake2b(f"{name}:{index}".encode(), digest_size=8).digest())

    return [one if name is None or one.params.seed is not None else
            replace(one, params=replace(one.params, seed=seed(index))) for index, one in enumerate(requests)]


class Generation(Running):
    """Sequences that produce text."""

    def __init__(self, http: Request, served: Served, fields: SamplingFields,
                 work: Sequence[tuple[list[int], SamplingParams]], tokenizer: Tokenizer, *, request_id: str,
                 prompt_tokens: int, continues: bool = False, shown: frozenset[int] = frozenset(),
                 logs_end: bool = False) -> None:
        """Submit a sequence for each prompt and its parameters in `work`; the position of each is the index of its
        choice. Raises UnavailableError, OverloadedError.

        `continues`: the text goes on from the prompt, rather than being a message of its own.
        `shown`: special tokens that are part of the text. `logs_end`: as for `Choice`.
        """
        self.params = work[0][1]
        """Sampling parameters of choice 0; other choices differ in seed and prompt logprobs."""
        requests = [EngineRequest(request_id=f"{request_id}-{index}", prompt=prompt, params=params,
                                  group=get_group(http), **fields.caching)
                    for index, (prompt, params) in enumerate(work)]
        super().__init__(http, served, _seeded(requests, http.scope.get("tandem.seed")), request_id=request_id,
                         prompt_tokens=prompt_tokens, stream=bool(fields.stream), timeout=fields.timeout)
        self.tokenizer = tokenizer
        self._choices = {
            request.request_id: Choice(index, tokenizer, request.params.stop, continues=continues, shown=shown,
                                       logs_end=logs_end)
            for index, request in enumerate(requests)
        }
        self._left = len(requests)
        self._cached = self._from_disk = 0
        self._first_at = self._last_at = 0.0

    @property
    def done(self) -> bool:
        """True when all choices have finished."""
        return self._left == 0

    async def next(self) -> list[Delta] | None:
        """What has come since the last call (maybe no text); None after a nudge. Raises RequestError."""
        outputs = await self.subscription.get()
        if not outputs:
            return None
        now = time.monotonic()
        deltas = []
        for output in outputs:
            choice = self._choices[output.request_id]
            if choice.finish_reason is not None:
                continue
            if output.tokens:
                self._cached += output.cached_tokens
                self._from_disk += output.disk_tokens
                self._last_at = now
                if not self._first_at:
                    self._first_at = now
                    self.api.metrics.first_token.observe(now - self.started_at)
            before = choice.tokens
            delta = choice.take(output)
            self.completion_tokens += choice.tokens - before
            self._lease.spend(choice.tokens - before)
            if choice.finish_reason is not None:
                self._left -= 1
                self._served.client.requests.abort(output.request_id, answered=True)
            if delta is not None:
                deltas.append(delta)
        return deltas

    def usage(self) -> dict[str, object]:
        """OpenAI's `usage` object; where some of the prompt was read from disk, it says how much."""
        output = self.completion_tokens
        tiers = {"disk_cached_tokens": min(self._from_disk, self.prompt_tokens)} if self._from_disk else {}
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": output,
            "total_tokens": self.prompt_tokens + output,
            "prompt_tokens_details": {"cached_tokens": min(self._cached, self.prompt_tokens), **tiers},
        }

    def performance(self) -> dict[str, object]:
        """Speeds as this request saw them: waiting in the queue counts as prompt time."""
        first = self._first_at - self.started_at if self._first_at else 0.0
        decode_s = self._last_at - self._first_at
        later = self.completion_tokens - self.choices
        return {
            "prompt_eval_tokens_per_second": round(self.prompt_tokens / first, 3) if first > 0 else 0.0,
            "eval_tokens_per_second": round(later / decode_s, 3) if decode_s > 0 and later > 0 else 0.0,
            "cache_hit": self._cached > 0,
            "ttft_seconds": round(first, 6),
            "total_seconds": round(time.monotonic() - self.started_at, 6),
        }


async def collect(generation: Generation) -> list[Delta]:
    """Run to the end: all of each choice in one piece. Closes the generation; raises RequestError."""
    parts: list[list[str]] = [[] for _ in range(generation.choices)]
    answers = [Delta(index, "", [], "stop") for index in range(generation.choices)]
    try:
        while not generation.done:
            for delta in await generation.next() or ():
                parts[delta.index].append(delta.text)
                answers[delta.index].logprobs += delta.logprobs
                answers[delta.index].finish_reason = delta.finish_reason or "stop"
                answers[delta.index].stop = delta.stop
                answers[delta.index].prompt = answers[delta.index].prompt if delta.prompt is None else delta.prompt
    finally:
        generation.close()
    for answer, texts in zip(answers, parts, strict=True):
        answer.text = "".join(texts)
    return answers
