"""`LLM`: calls that return when the answer is there.

    from tandem import LLM, SamplingParams

    with LLM("demo", pipeline_parallel_size=2) as llm:
        print(llm.generate("The capital of France is", SamplingParams(max_tokens=8, temperature=0))[0].text)
"""

from __future__ import annotations

import queue
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Self

from tandem.engine.thread import EngineThread, Event
from tandem.executors.base import Progress
from tandem.llm.answer import RequestOutput
from tandem.llm.session import Batch, LoadedModel, Message, Prompt, Session
from tandem.protocol.request import SamplingParams


class LLM(LoadedModel):
    """A model, loaded and ready. Close it, or use a `with` block.

    Any number of threads may use one, and of streams that are read by turns: each request goes on at its own pace. What
    nobody waits for any more is stopped: a call that an exception (Ctrl-C too) ends, a stream that is closed, or
    forgotten. In a process that was forked from this one it cannot be used.
    """

    def __init__(self, model: str, *, progress: Progress | None = None, **options: Any) -> None:
        """`options` are the fields of all settings sections, as on the command line (docs/configuration.md).

        `progress` is called with (rank, bytes done, bytes in all, `fetch` or `load`). Raises UsageError.
        """
        self._session = Session(model, options)
        # One that is forgotten is closed as well, at the latest when the interpreter ends.
        weakref.finalize(self, EngineThread.close, self._session.engine)
        self._session.engine.start(progress)

    def generate(self, prompts: Prompt | Sequence[Prompt],
                 params: SamplingParams | None = None) -> list[RequestOutput]:
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
