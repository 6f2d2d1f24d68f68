"""HTTP requests with sequences in the engine: quota, timeout, outputs, cancellation."""

from __future__ import annotations

import asyncio
import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from msgspec.structs import replace

from tandem.crash_guard import start_task
from tandem.errors import RequestError, ServerError, TimeoutExceeded
from tandem.json_types import JsonObject
from tandem.protocol.control import Output, Timing
from tandem.protocol.logprobs import PromptLogprobs, TokenLogprob
from tandem.protocol.pictures import Picture
from tandem.protocol.request import EngineRequest, SamplingParams
from tandem.protocol.thinking import ThinkingTokens, Thought, begin, follow
from tandem.server.context import get_api, get_group, gone, new_id
from tandem.server.engines.served_model import Served
from tandem.server.failures import ClientGone, internal_error, refused
from tandem.server.openai.schemas import SamplingFields
from tandem.server.quotas import Lease
from tandem.text.stream import TextStream
from tandem.text.tokenizer import Tokenizer

MOST_UNREAD = 16_384
"""Most parts of each choice of a stream to keep for a client that reads slowly."""


class Running(ABC):
    """Sequences of one HTTP request in the engine, and their outputs.

    The creator must `close` it, which aborts running sequences. A disconnect, a timeout, a cancel and the loss of the
    engine all make waiting methods raise a RequestError.
    """

    def __init__(
        self,
        http: Request,
        served: Served,
        work: Sequence[tuple[list[int], SamplingParams]],
        *,
        request_id: str,
        prompt_tokens: int,
        stream: bool,
        timeout: float | None,
        window: int | None = None,
        replicas: Sequence[int] | None = None,
        **fields: Any,
    ) -> None:
        """Submit a sequence for each (prompt token ids, parameters) in `work`, to `replicas[i]` if given.

        `window`: sequences to submit now; subclasses submit more with `_go_on`. `timeout`: seconds. `fields`: further
        fields of each EngineRequest. Raises UnavailableError, OverloadedError.
        """
        self.request_id, self.model, self.route, self.stream = request_id, served.name, http.url.path, stream
        self.prompt_tokens, self.completion_tokens, self.choices = prompt_tokens, 0, len(work)
        self.created, self.started_at = time.time(), time.monotonic()
        self.group, self.api = get_group(http), get_api(http)
        http.scope["tandem.running"] = self
        self.replica: int | None = None
        self.timings: list[tuple[str, float, Timing]] = []
        """Queue and prefill times as the engine reports them: id of the sequence, time of the report, and times."""
        self.cached_tokens, self.first_at, self.last_at = 0, 0.0, 0.0
        self.error: RequestError | None = None
        """Error that ended the request, if any."""
        self.ended = False
        """True when all sequences have finished; set by `take`."""
        self._news = self._nudged = self._awaits_end = False
        self._waiter: asyncio.Future[None] | None = None
        self._served = served
        self._lease: Lease = http.scope["tandem.lease"]
        self._lease.prompt(prompt_tokens)
        self._requests = [
            EngineRequest(
                request_id=f"{request_id}-{index}",
                prompt=prompt,
                params=params,
                group=self.group,
                weight=self._lease.weight,
                adapter=served.adapter,
                **fields,
            )
            for index, (prompt, params) in enumerate(work)
        ]
        self._open = self._requests[:window]
        served.client.requests.open(self._open, self, replicas)
        self.api.live[request_id] = self
        self._watcher = start_task(self._watch(http), name="client-watch", on_failure=self._unwatched)
        self._deadline = self._limit(timeout)

    @property
    def done(self) -> bool:
        """True when all sequences have finished and all outputs have been read."""
        return self.ended and not self._news

    @abstractmethod
    def take(self, output: Output) -> None:
        """Process one output of a sequence."""

    # --- answers ---

    def push(self, output: Output) -> None:
        """Process one output and wake the waiting task. An exception fails only this request."""
        self._news = True
        if output.timing is not None:
            self.timings.append((output.request_id, time.monotonic(), output.timing))
        try:
            self.take(output)
        except Exception as error:  # noqa: BLE001 - see the docstring
            self._news = False
            self.fail(internal_error(error, self.route))
        if self.ended or not self._awaits_end:
            self._wake()

    def fail(self, error: RequestError) -> None:
        """End the request with `error`: outputs received already can be read, then waiting methods raise it."""
        if self.error is None:
            self.error = error
        self._wake()

    def nudge(self) -> None:
        """Wake the waiting task without an output."""
        self._nudged = True
        self._wake()

    async def _wait(self) -> None:
        """Wait for an output, an error, or a nudge."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    async def _wait_for_end(self) -> None:
        """Wait until all sequences have finished, then close. Raises RequestError."""
        self._awaits_end = True
        try:
            while not self.ended:
                if self.error is not None:
                    raise self.error
                await self._wait()
            self._news = False
        finally:
            self.close()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # --- life ---

    def _go_on(self, requests: list[EngineRequest]) -> None:
        """Submit further `requests`, once the previous ones have finished. Raises UnavailableError."""
        self._open = requests
        self._served.client.requests.open(self._open, self, accepted=True)

    def _stop(self) -> None:
        for request in self._open:
            self._served.client.requests.abort(request.request_id)

    def end(self, error: RequestError) -> None:
        """Abort running sequences; waiting methods raise `error`."""
        self._stop()
        self.fail(error)

    def close(self) -> None:
        """Abort running sequences and release the request's quota. Idempotent."""
        if self.api.live.pop(self.request_id, None) is None:
            return
        self._lease.end()
        self._watcher.cancel()
        if self._deadline is not None:
            self._deadline.cancel()
        if not self.ended:
            self._stop()

    def _unwatched(self, error: BaseException) -> None:
        """End the request, as the task that watches for a disconnect has failed."""
        self.fail(ServerError("Internal server error", code="internal_error"))

    async def _watch(self, http: Request) -> None:
        """Abort the request as soon as its client disconnects."""
        await gone(http)
        if self.done:  # closed by the server after the answer
            return
        self.api.metrics.disconnects.inc()
        self.end(ClientGone("The client left."))

    def _limit(self, timeout: float | None) -> asyncio.TimerHandle | None:
        limits = [limit for limit in (timeout, self.api.settings.server.request_timeout) if limit is not None]
        if not limits:
            return None
        seconds = min(limits)
        message = f"Request timeout after {seconds:g}s. Server may be overloaded."
        error = TimeoutExceeded(message, code="request_timeout")

        return asyncio.get_running_loop().call_later(seconds, self.end, error)


class Prompts(Running):
    """Prefill-only prompts (embeddings, cache warming): one output each, no generated text.

    At most `window` are submitted at once, so that a long list does not fill the engine's queue.
    """

    def __init__(
        self,
        http: Request,
        served: Served,
        prefix: str,
        prompts: Sequence[list[int]],
        *,
        timeout: float | None,
        replicas: Sequence[int] | None = None,
        window: int | None = None,
        **fields: Any,
    ) -> None:
        """Submit the first `window` of `prompts` (token ids), or all. Ids start with `prefix`.

        `fields`: further fields of each EngineRequest. Raises UnavailableError, OverloadedError.
        """
        self._window = window or len(prompts)
        self._outputs: dict[str, Output] = {}
        params = SamplingParams(max_tokens=0)
        super().__init__(
            http,
            served,
            [(prompt, params) for prompt in prompts],
            request_id=new_id(prefix),
            stream=False,
            timeout=timeout,
            prompt_tokens=sum(map(len, prompts)),
            window=self._window,
            replicas=replicas,
            **fields,
        )

    def take(self, output: Output) -> None:
        """Store the output; submit the next window when this one has finished."""
        self._outputs[output.request_id] = output
        count = len(self._outputs)
        self.ended = count == len(self._requests)
        if count % self._window == 0 and not self.ended and self.error is None:
            try:
                self._go_on(self._requests[count : count + self._window])
            except RequestError as error:
                self.fail(error)

    async def outputs(self) -> list[Output]:
        """Wait for all outputs and return them in the order of the prompts. Closes the request; raises RequestError."""
        await self._wait_for_end()
        return [self._outputs[request.request_id] for request in self._requests]


@dataclass(slots=True)
class Delta:
    """New text of one choice, or its whole text. `finish_reason` is set on the choice's last delta."""

    index: int
    text: str
    logprobs: list[TokenLogprob]
    finish_reason: str | None
    stop: str | None = None
    """Stop string that ended the choice; None for another end."""
    prompt: PromptLogprobs | None = None
    """Log probabilities of the prompt, if requested; on the choice's first delta only."""


class ChoiceState:
    """State of one choice: counts its tokens and detokenizes them, holding back text that may become a stop string."""

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        stop: Sequence[str],
        *,
        continues: bool,
        shown: frozenset[int],
        logs_end: bool = False,
        thinking: ThinkingTokens | None = None,
    ) -> None:
        """`continues`: the text continues the prompt. `shown`: special tokens that are part of the text.

        `logs_end`: include the log probability of the stop token, which has no text. `thinking`: token ids around
        reasoning, to count its tokens; None does not count.
        """
        self.tokens = 0
        self.finish_reason: str | None = None
        self._index = index
        self._text = TextStream(tokenizer, stop, continues=continues, shown=shown)
        self._thinking = thinking
        self._thought: Thought | None = None
        self._unread: list[int] = []
        """Output token ids not yet examined for reasoning."""
        self._one_by_one = bool(stop)
        self._logs_end = logs_end
        self._pending: list[TokenLogprob] = []
        self._prompt: PromptLogprobs | None = None

    def take(self, output: Output) -> Delta | None:
        """Return the new text of an output; None while held back. Log probabilities are held back with their text."""
        visible = output.tokens[:-1] if output.stop_token else output.tokens
        text, used = self._push(visible)
        if self._thinking is not None:
            self._unread += visible[:used]
        self._pending += output.logprobs[: None if self._logs_end and not self._text.stopped else used]
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

    @property
    def reasoning_tokens(self) -> int | None:
        """Reasoning tokens so far; None if not counted."""
        if self._thinking is None:
            return None
        self._thought = follow(self._thinking, self._thought or begin(self._thinking), self._unread)
        self._unread.clear()
        return self._thought.spent

    def _push(self, tokens: list[int]) -> tuple[str, int]:
        """Return the new text and the number of `tokens` consumed.

        With stop strings, tokens are pushed one by one, so that the end does not depend on batching.
        """
        if not self._one_by_one:
            return (self._text.push(tokens) if tokens else ""), len(tokens)
        parts = []
        for used, token in enumerate(tokens, 1):
            parts.append(self._text.push([token]))
            if self._text.stopped:
                return "".join(parts), used
        return "".join(parts), len(tokens)


def _seeded(work: Sequence[tuple[list[int], SamplingParams]], name: str | None
            ) -> Sequence[tuple[list[int], SamplingParams]]:  # fmt: skip
    """Derive missing seeds from `name`, so that a restarted job samples the same text; None changes nothing."""

    def seed(index: int) -> int:
        return int.from_bytes(hashlib.blake2b(f"{name}:{index}".encode(), digest_size=8).digest())

    return (
        work
        if name is None
        else [
            (prompt, params if params.seed is not None else replace(params, seed=seed(index)))
            for index, (prompt, params) in enumerate(work)
        ]
    )


class Generation(Running):
    """Sequences that produce text."""

    def __init__(
        self,
        http: Request,
        served: Served,
        fields: SamplingFields,
        work: Sequence[tuple[list[int], SamplingParams]],
        tokenizer: Tokenizer,
        *,
        request_id: str,
        prompt_tokens: int,
        pictures: tuple[Picture, ...] = (),
        continues: bool = False,
        shown: frozenset[int] = frozenset(),
        logs_end: bool = False,
        thinking: ThinkingTokens | None = None,
    ) -> None:
        """Submit a sequence for each (prompt token ids, parameters) in `work`, in the order of the choices.

        `pictures`: of each prompt. `continues`, `shown`, `logs_end`, `thinking`: as for `ChoiceState`. Raises
        UnavailableError, OverloadedError.
        """
        self.params = work[0][1]
        """Sampling parameters of choice 0; other choices differ in seed and prompt logprobs."""
        self._left = len(work)
        super().__init__(
            http,
            served,
            _seeded(work, http.scope.get("tandem.seed")),
            request_id=request_id,
            prompt_tokens=prompt_tokens,
            stream=bool(fields.stream),
            timeout=fields.timeout,
            pictures=pictures,
            **fields.caching,
        )
        self.tokenizer = tokenizer
        self._choices = {
            request.request_id: ChoiceState(
                index, tokenizer, request.params.stop, continues=continues, shown=shown, logs_end=logs_end, thinking=thinking
            )
            for index, request in enumerate(self._requests)
        }
        self._deltas: list[Delta] = []
        self._from_disk = 0

    def take(self, output: Output) -> None:
        """Detokenize an output. A choice that reaches a stop string is aborted in the engine."""
        choice = self._choices[output.request_id]
        if choice.finish_reason is not None:
            return
        if output.tokens:
            self.cached_tokens += output.cached_tokens
            self._from_disk += output.disk_tokens
            self.last_at = time.monotonic()
            if not self.first_at:
                self.first_at = self.last_at
                self.api.metrics.first_token.labels(self.model).observe(self.first_at - self.started_at)
        before = choice.tokens
        delta = choice.take(output)
        self.completion_tokens += choice.tokens - before
        if self._lease.meters:
            self._lease.spend(choice.tokens - before)
        if choice.finish_reason is not None:
            self._left -= 1
            self.ended = self._left == 0
            if output.finish_reason is None:
                self._served.client.requests.abort(output.request_id, answered=True)
        if delta is not None:
            self._deltas.append(delta)
        if len(self._deltas) > MOST_UNREAD * self.choices and not (self._awaits_end or self.error):
            self.end(refused(408, f"The client has not read {len(self._deltas)} parts of its answer.", code="slow_client"))

    async def next(self) -> list[Delta] | None:
        """Wait for new text and return it (maybe an empty list); return None after a nudge. Raises RequestError."""
        while not self._news and self.error is None and not self._nudged:
            await self._wait()
        self._nudged = False
        if not self._news:
            if self.error is not None:
                raise self.error
            return None
        self._news = False
        deltas, self._deltas = self._deltas, []
        return deltas

    async def collect(self) -> list[Delta]:
        """Wait for the end and return one Delta per choice with its whole text. Closes the generation; raises RequestError."""
        await self._wait_for_end()
        answers = [Delta(index, "", [], "stop") for index in range(self.choices)]
        texts: list[list[str]] = [[] for _ in answers]
        for delta in self._deltas:
            answer = answers[delta.index]
            texts[delta.index].append(delta.text)
            answer.logprobs += delta.logprobs
            answer.finish_reason, answer.stop = delta.finish_reason or "stop", delta.stop
            answer.prompt = answer.prompt if delta.prompt is None else delta.prompt
        for answer, parts in zip(answers, texts, strict=True):
            answer.text = "".join(parts)
        return answers

    def usage(self) -> JsonObject:
        """Return OpenAI's `usage` object, extended by `disk_cached_tokens` if KV was read from disk."""
        output = self.completion_tokens
        counts = [count for choice in self._choices.values() if (count := choice.reasoning_tokens) is not None]
        tiers = {"disk_cached_tokens": min(self._from_disk, self.prompt_tokens)} if self._from_disk else {}
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": output,
            "total_tokens": self.prompt_tokens + output,
            "prompt_tokens_details": {"cached_tokens": min(self.cached_tokens, self.prompt_tokens), **tiers},
            **({"completion_tokens_details": {"reasoning_tokens": sum(counts)}} if counts else {}),
        }

    def performance(self) -> dict[str, object]:
        """Return speeds (tokens/s) and durations (s) of this request; queueing counts as prompt time."""
        first = self.first_at - self.started_at if self.first_at else 0.0
        decode_s = self.last_at - self.first_at
        later = self.completion_tokens - self.choices
        return {
            "prompt_eval_tokens_per_second": round(self.prompt_tokens / first, 3) if first > 0 else 0.0,
            "eval_tokens_per_second": round(later / decode_s, 3) if decode_s > 0 and later > 0 else 0.0,
            "cache_hit": self.cached_tokens > 0,
            "ttft_seconds": round(first, 6),
            "total_seconds": round(time.monotonic() - self.started_at, 6),
        }
