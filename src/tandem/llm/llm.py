"""`LLM` and `AsyncLLM`: calls that return when the answer is there, and the same for asyncio.

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
    """A model, loaded and ready. Close it, or use a `with` block.

    Any number of threads may use it, also streams that are read by turns: each request runs at its own pace. A call
    that an exception (Ctrl-C too) ends, and a stream that is closed or forgotten, stop their requests. A forked process
    cannot use it.
    """

    def __init__(self, model: str, *, progress: Progress | None = None, **options: object) -> None:
        """`options` are the fields of all settings sections, as on the command line (docs/configuration.md).

        `progress` is called with (rank, bytes done, bytes in all, `fetch` or `load`). Raises UsageError.
        """
        self._session = Session(model, options)
        # One that is forgotten is closed as well, at the latest when the interpreter ends.
        weakref.finalize(self, EngineThread.close, self._session.engine)
        self._session.engine.start(progress)

    def generate(self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None) -> list[RequestOutput]:
        """Complete each prompt (text, or token ids); all of them run together.

        Those that do not fit into the queue wait for room. When one is refused the others are stopped. Raises
        RequestError.
        """
        return _run(self._session.texts(prompts, params)).outputs

    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> RequestOutput:
        """Answer a conversation in the model's chat template. Raises RequestError."""
        return _run(self._session.reply(messages, params)).outputs[0]

    def stream(self, prompt: Prompt | Sequence[Message], params: SamplingParams | None = None) -> Iterator[str]:
        """Pieces of the completion of a prompt, or of the answer to a conversation, as they come.

        It begins with the first piece that is asked for. Raises RequestError.
        """
        yield from _pieces(self._session.answer(prompt, params))

    def embed(self, prompts: Prompt | Sequence[Prompt], dimensions: int | None = None) -> list[list[float]]:
        """A vector of length 1 for each prompt, pooled as `--pooling` says and cut to `dimensions` numbers if given.

        Raises RequestError.
        """
        return _run(self._session.pooled(prompts, dimensions)).vectors(dimensions)

    def close(self) -> None:
        """End what runs (with UnavailableError), all ranks, and free the model. Idempotent."""
        self._session.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class AsyncLLM(LoadedModel):
    """A model that tasks share: `async with AsyncLLM(...) as llm`, or `await llm.start()` and `await llm.close()`.

    Nothing here holds up the event loop. A task that is cancelled, and a stream that is closed or forgotten, stop their
    work. Several event loops may use one.
    """

    def __init__(self, model: str, *, progress: Progress | None = None, **options: object) -> None:
        """Store the options of `LLM`; `start` loads the model. `progress` is called in another thread."""
        self._model, self._options, self._progress = model, options, progress
        self._ready: Session | None = None
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Load the model. Raises UsageError. When it is cancelled nothing is left running."""
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
        """Yield pieces of the answer as they come, like `LLM.stream`. Raises RequestError."""
        batch = await asyncio.to_thread(self._session.answer, prompt, params)
        async with aclosing(_pieces_async(batch)) as pieces:
            async for piece in pieces:
                yield piece

    async def embed(self, prompts: Prompt | Sequence[Prompt], dimensions: int | None = None) -> list[list[float]]:
        """Embed each prompt, like `LLM.embed`. Raises RequestError."""
        return (await _run_async(self._session.pooled, prompts, dimensions)).vectors(dimensions)

    async def close(self) -> None:
        """End what runs, all ranks, and free the model, like `LLM.close`."""
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
    """Run a batch to its end, or stop it."""
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
    """Run a batch to its end, or stop it."""
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
