"""One response while it is written, and its events."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.responses import Response

from tandem.errors import RequestError
from tandem.server.failures import envelope
from tandem.server.generation.generate import Delta, Generation
from tandem.server.responses.output import OutputItems
from tandem.server.responses.schemas import ResponsesRequest
from tandem.server.responses.shape import Json, empty_response
from tandem.server.sse import AnswerWriter, json_response, named_event


def error_event(error: RequestError) -> Json:
    """The event that ends a stream that failed, but for its number."""
    fields = envelope(error)["error"]
    return {"type": "error", **{name: fields[name] for name in ("code", "message", "param")}}


class Answering(AnswerWriter):
    """Turns what a generation yields into the events of one response."""

    def __init__(self, fields: ResponsesRequest, generation: Generation, model: str, output: OutputItems,
                 created: int) -> None:
        """`created` in seconds since 1970."""
        params = generation.params
        self._start = {**empty_response(fields, generation.request_id, model, created, "in_progress"),
                       "temperature": params.temperature, "top_p": params.top_p}
        self.generation = generation
        self.created = created
        self.keep: Callable[[], Awaitable[None]] | None = None
        """What writes the response down when it is over, for those that are to be stored."""
        self._output = output
        self._status = "in_progress"
        self._completed_at: int | None = None
        self._sent = 0
        self.stored = False
        """It is written down, or about to be."""

    async def whole(self, answers: list[Delta]) -> Response:
        """The response object."""
        self.take(answers[0])
        await self.end()
        return json_response(self.response())

    def head(self) -> bytes:
        """The response opens."""
        kinds = ("response.created", "response.in_progress")
        return self._events([{"type": kind, "response": self.response()} for kind in kinds])

    def take(self, delta: Delta) -> list[Json]:
        """Events for new text."""
        ended = delta.finish_reason is not None
        events = self._output.read(delta.text, last=ended)
        if ended:
            self._status = "incomplete" if delta.finish_reason == "length" else "completed"
            self._completed_at = int(time.time()) if self._status == "completed" else None
            events += self._output.close(self._status)
        return events

    async def end(self) -> None:
        """The response is over, and about to be told: write it down, if it is to be stored."""
        self.stored = self.keep is not None
        if self.keep is not None:
            await self.keep()

    def delta(self, delta: Delta, extras: Json | None) -> bytes:
        """What the text adds."""
        return self._events(self.take(delta))

    def usage(self, usage: Json, extras: Json) -> bytes:
        """The response closes."""
        return self._events([{"type": f"response.{self._status}", "response": self.response()}])

    def last_event(self) -> bytes:
        """The event that closes the response."""
        event = {"type": f"response.{self._status}", "response": self.response(), "sequence_number": self._sent}
        return named_event(event)

    def done(self) -> bytes:
        """Nothing: the last event said it."""
        return b""

    def error(self, error: RequestError) -> bytes:
        """The stream fails."""
        return self._events([error_event(error)])

    def response(self) -> Json:
        """The response object as it is now."""
        cut, over = self._status == "incomplete", self._status != "in_progress"
        return {
            **self._start,
            "store": self._start["store"] or self.stored,
            "status": self._status,
            "completed_at": self._completed_at,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self._output.items,
            "usage": self._usage() if over else None,
        }

    def _usage(self) -> Json:
        """Tokens; those of the reasoning are counted from its text."""
        counted: Any = self.generation.usage()
        output = counted["completion_tokens"]
        thought = self.generation.tokenizer.encode(self._output.reasoning, add_special_tokens=False)
        return {
            "input_tokens": counted["prompt_tokens"],
            "input_tokens_details": {**counted["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": output,
            "output_tokens_details": {"reasoning_tokens": min(len(thought), output)},
            "total_tokens": counted["total_tokens"],
        }

    def _events(self, events: list[Json]) -> bytes:
        written = b""
        for event in events:
            written += named_event({**event, "sequence_number": self._sent})
            self._sent += 1
        return written
