"""`AsyncLLM`: the same for asyncio.

    from tandem import AsyncLLM, SamplingParams

    async with AsyncLLM("demo") as llm:
        async for piece in llm.stream("The capital of France is", SamplingParams(max_tokens=8)):
            print(piece, end="")
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, Self

from tandem.engine.thread import EngineThread, Event
from tandem.executors.base import Progress
from tandem.llm.answer import RequestOutput
from tandem.llm.session import Batch, LoadedModel, Message, Prompt, Session
from tandem.protocol.request import SamplingParams


class AsyncLLM(LoadedModel):
    """A model that tasks share: `async with AsyncLLM(...) as llm`, or `await llm.start()` and `await llm.close()`.

    Nothing here holds up the event loop. A task that is cancelled, and a stream that is closed or forgotten, stop their
    work. Several event loops may use one.
    """

    def __init__(self, model: str, *, progress: Progress | None = None, **options: Any) -> None:
        """As `LLM`; nothing is done yet. `progress` is called in another thread."""
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

    async def generate(self, prompts: Prompt | Sequence[Prompt],
                       params: SamplingParams | None = None) -> list[RequestOutput]:
        """As `LLM.generate`. Raises RequestError."""
        return (await _run(self._session.texts, prompts, params)).outputs

    async def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> RequestOutput:
        """As `LLM.chat`. Raises RequestError."""
        return (await _run(self._session.reply, messages, params)).outputs[0]

    async def stream(self, prompt: Prompt | Sequence[Message],
                     params: SamplingParams | None = None) -> AsyncGenerator[str, None]:
        """As `LLM.stream`. Raises RequestError."""
        batch = await asyncio.to_thread(self._session.answer, prompt, params)
        async with aclosing(_pieces(batch)) as pieces:
            async for piece in pieces:
                yield piece

    async def embed(self, prompts: Prompt | Sequence[Prompt], dimensions: int | None = None) -> list[list[float]]:
        """As `LLM.embed`. Raises RequestError."""
        return (await _run(self._session.pooled, prompts, dimensions)).vectors(dimensions)

    async def close(self) -> None:
        """As `LLM.close`."""
        if self._ready is not None:
            await asyncio.to_thread(self._ready.engine.close)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


async def _run(make: Callable[..., Batch], *arguments: Any) -> Batch:
    batch = await asyncio.to_thread(make, *arguments)
    async with aclosing(_pieces(batch)) as pieces:
        async for _ in pieces:
            pass
    return batch


async def _pieces(batch: Batch) -> AsyncGenerator[str, None]:
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
