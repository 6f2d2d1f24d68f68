"""`LLM`, whose calls block until the answer is complete, and `AsyncLLM` for asyncio.

from tandem import LLM, AsyncLLM, SamplingParams

with LLM("demo", pipeline_parallel_size=2) as llm:
    print(llm.generate("The capital of France is", SamplingParams(max_tokens=8, temperature=0))[0].text)

async with AsyncLLM("demo") as llm:
    async for piece in llm.stream("The capital of France is", SamplingParams(max_tokens=8)):
        print(piece, end="")
"""

from __future__ import annotations

import asyncio
import queue
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import ParamSpec, Self

from tandem.engine.thread import EngineThread, Event
from tandem.executors.executor import Progress
from tandem.llm.session import Batch, LoadedModel, Message, Prompt, RequestOutput, Session
from tandem.protocol.request import SamplingParams

P = ParamSpec("P")


class LLM(LoadedModel):
    """A loaded model. Close it, or use a `with` block.

    Thread-safe; requests of several threads and interleaved streams run concurrently. An exception in a call (Ctrl-C
    included) stops its requests, as does closing or dropping a stream. Not usable in a forked process.
    """

    def __init__(self, model: str, *, progress: Progress | None = None, **options: object) -> None:
        """Load the model. `options` are fields of any settings section, as on the command line (docs/configuration.md).

        `progress` is called with (rank, bytes done, total bytes, `fetch` or `load`). Raises UsageError.
        """
        self._session = Session(model, options)
        # A dropped object is closed as well, at the latest when the interpreter exits.
        weakref.finalize(self, EngineThread.close, self._session.engine)
        self._session.engine.start(progress)

    def generate(self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None) -> list[RequestOutput]:
        """Complete each prompt (text or token ids), all of them concurrently; return the outputs in the order of the
        prompts.

        Requests beyond the queue's limit wait. A failed request stops the others. Raises RequestError.
        """
        return _run(self._session.texts(prompts, params)).outputs

    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> RequestOutput:
        """Answer a conversation formatted with the model's chat template. Raises RequestError."""
        return _run(self._session.reply(messages, params)).outputs[0]

    def stream(self, prompt: Prompt | Sequence[Message], params: SamplingParams | None = None) -> Iterator[str]:
        """Yield pieces of text as they are generated: the completion of a prompt, or the answer to a conversation.

        The request starts when the first piece is requested. Raises RequestError.
        """
        yield from _pieces(self._session.answer(prompt, params))

    def embed(self, prompts: Prompt | Sequence[Prompt], dimensions: int | None = None) -> list[list[float]]:
        """Return a unit-length vector for each prompt, pooled as `--pooling` defines and truncated to `dimensions`
        numbers.

        None keeps all dimensions. Raises RequestError.
        """
        return _run(self._session.pooled(prompts, dimensions)).vectors(dimensions)

    def close(self) -> None:
        """Abort running requests with UnavailableError, end all ranks and free the model. Idempotent."""
        self._session.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class AsyncLLM(LoadedModel):
    """A loaded model for asyncio: `async with AsyncLLM(...) as llm`, or `await llm.start()` and `await llm.close()`.

    Never blocks the event loop; several tasks and event loops may share it. Cancelling a task, or closing or dropping a
    stream, stops its requests.
    """

    def __init__(self, model: str, *, progress: Progress | None = None, **options: object) -> None:
        """Store the options, which are those of `LLM`; `start` loads the model. `progress` is called in another thread."""
        self._model, self._options, self._progress = model, options, progress
        self._ready: Session | None = None
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Load the model. Raises UsageError. Cancellation ends all started processes."""
        async with self._starting:
            if self._ready is not None:
                return
            session = await asyncio.to_thread(Session, self._model, self._options)
            weakref.finalize(self, EngineThread.close, session.engine)
            loading = asyncio.ensure_future(asyncio.to_thread(session.engine.start, self._progress))
            try:
                await asyncio.shield(loading)
            except asyncio.CancelledError:
                await asyncio.to_thread(session.engine.close)
                await asyncio.wait([loading])
                loading.exception()
                raise
            self._ready = session

    @property
    def _session(self) -> Session:  # type: ignore[override]
        if self._ready is None:
            raise RuntimeError("the model is not loaded: use `async with AsyncLLM(...) as llm`, or await llm.start()")
        return self._ready

    async def generate(self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None) -> list[RequestOutput]:
        """Complete each prompt, like `LLM.generate`. Raises RequestError."""
        return (await _run_async(self._session.texts, prompts, params)).outputs

    async def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> RequestOutput:
        """Answer a conversation, like `LLM.chat`. Raises RequestError."""
        return (await _run_async(self._session.reply, messages, params)).outputs[0]

    async def stream(self, prompt: Prompt | Sequence[Message], params: SamplingParams | None = None) -> AsyncGenerator[str, None]:
        """Yield pieces of the answer as they are generated, like `LLM.stream`. Raises RequestError."""
        batch = await asyncio.to_thread(self._session.answer, prompt, params)
        async with aclosing(_pieces_async(batch)) as pieces:
            async for piece in pieces:
                yield piece

    async def embed(self, prompts: Prompt | Sequence[Prompt], dimensions: int | None = None) -> list[list[float]]:
        """Embed each prompt, like `LLM.embed`. Raises RequestError."""
        return (await _run_async(self._session.pooled, prompts, dimensions)).vectors(dimensions)

    async def close(self) -> None:
        """Abort running requests, end all ranks and free the model, like `LLM.close`."""
        if self._ready is not None:
            await asyncio.to_thread(self._ready.engine.close)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


def _run(batch: Batch) -> Batch:
    for _ in _pieces(batch):
        pass
    return batch


def _pieces(batch: Batch) -> Iterator[str]:
    """Submit a batch and yield its new text until all requests are finished. Abort the rest on exit."""
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    try:
        batch.submit(events.put).result()
        while batch.open:
            if piece := batch.take(events.get()):
                yield piece
    finally:
        batch.end()


async def _run_async(make: Callable[P, Batch], *args: P.args, **kwargs: P.kwargs) -> Batch:
    batch = await asyncio.to_thread(make, *args, **kwargs)
    async with aclosing(_pieces_async(batch)) as pieces:
        async for _ in pieces:
            pass
    return batch


async def _pieces_async(batch: Batch) -> AsyncGenerator[str, None]:
    """Submit a batch and yield its new text until all requests are finished. Abort the rest on exit."""
    loop, events = asyncio.get_running_loop(), asyncio.Queue[Event]()

    def pass_on(event: Event) -> None:
        loop.call_soon_threadsafe(events.put_nowait, event)

    try:
        await asyncio.wrap_future(batch.submit(pass_on))
        while batch.open:
            if piece := batch.take(await events.get()):
                yield piece
    finally:
        batch.end()
