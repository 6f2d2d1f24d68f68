"""POST /v1/responses."""

from __future__ import annotations

import time
import uuid
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from tandem.errors import RequestError
from tandem.server.answer import collect
from tandem.server.body import parse
from tandem.server.chat import start_chat
from tandem.server.context import get_api
from tandem.server.failures import envelope
from tandem.server.generate import Delta, Generation
from tandem.server.openapi import documented
from tandem.server.reply import Reply
from tandem.server.responses.output import Output
from tandem.server.responses.schemas import IGNORED, ResponsesRequest
from tandem.server.responses.translate import chat_request, in_own_words
from tandem.server.sse import ChunkWriter, encode_json, named_event, open_stream

router = APIRouter()
Json = dict[str, Any]


@router.post("/v1/responses", openapi_extra=documented(ResponsesRequest, streams=True))
async def responses(http: Request) -> Response:
    """Answer as OpenAI's Responses API does, in one piece or as a stream. Nothing is stored."""
    api = get_api(http)
    fields = await parse(http, ResponsesRequest, api.max_body, ignored=IGNORED)
    try:
        plan, generation, model = await start_chat(http, chat_request(fields), f"resp_{uuid.uuid4().hex}")
    except RequestError as error:
        raise in_own_words(error) from None
    answer = Answering(fields, generation, model, Reply(plan))
    if fields.stream:
        return await open_stream(generation, answer, include_usage=True, heartbeat_s=api.heartbeat_s)
    [whole] = await collect(generation, 1)
    answer.take(Delta(0, whole.text, whole.logprobs, whole.finish_reason))
    return Response(encode_json(answer.response()), media_type="application/json")


class Answering(ChunkWriter):
    """One response while it is written, and its events."""

    def __init__(self, fields: ResponsesRequest, generation: Generation, model: str, reply: Reply) -> None:
        self._fields = fields
        self._generation = generation
        self._model = model
        self._reply = reply
        self._output = Output(reply)
        self._created = int(time.time())
        self._status = "in_progress"
        self._sent = 0

    def head(self) -> bytes:
        """The response opens."""
        kinds = ("response.created", "response.in_progress")
        return self._events([{"type": kind, "response": self.response()} for kind in kinds])

    def take(self, delta: Delta) -> list[Json]:
        """Events for new text."""
        ended = delta.finish_reason is not None
        events = [event for read in self._reply.read(delta.text, last=ended) for event in self._output.add(read)]
        if ended:
            self._status = "incomplete" if delta.finish_reason == "length" else "completed"
            events += self._output.close(self._status)
        return events

    def delta(self, delta: Delta, extras: Json | None) -> bytes:
        """What the text adds."""
        return self._events(self.take(delta))

    def usage(self, usage: Json, extras: Json) -> bytes:
        """The response closes."""
        return self._events([{"type": f"response.{self._status}", "response": self.response()}])

    def done(self) -> bytes:
        """Nothing: the last event said it."""
        return b""

    def error(self, error: RequestError) -> bytes:
        """The stream fails."""
        fields = envelope(error)["error"]
        return self._events([{"type": "error", **{name: fields[name] for name in ("code", "message", "param")}}])

    def response(self) -> Json:
        """The response object as it is now."""
        cut, over = self._status == "incomplete", self._status != "in_progress"
        return {
            "id": self._generation.request_id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if self._status == "completed" else None,
            "status": self._status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "model": self._model,
            "output": self._output.items,
            "usage": self._usage() if over else None,
            "background": False,
            "store": False,
            "previous_response_id": None,
            "truncation": "disabled",
            **self._echo(),
        }

    def _echo(self) -> Json:
        """What was asked for, with the defaults."""
        fields = self._fields
        form = fields.text.format if fields.text is not None else None
        return {
            "instructions": fields.instructions,
            "max_output_tokens": fields.max_output_tokens,
            "metadata": fields.metadata or {},
            "parallel_tool_calls": fields.parallel_tool_calls is not False,
            "reasoning": fields.reasoning.model_dump() if fields.reasoning is not None else None,
            "temperature": 1.0 if fields.temperature is None else fields.temperature,
            "text": {"format": form.model_dump(by_alias=True, exclude_none=True) if form else {"type": "text"}},
            "tool_choice": fields.tool_choice or "auto",
            "tools": [tool.model_dump() for tool in fields.tools or ()],
            "top_p": 1.0 if fields.top_p is None else fields.top_p,
        }

    def _usage(self) -> Json:
        """Tokens; those of the reasoning are counted from its text."""
        counted: Any = self._generation.usage()
        output = counted["completion_tokens"]
        thought = self._generation.tokenizer.encode(self._output.reasoning, add_special_tokens=False)
        return {
            "input_tokens": counted["prompt_tokens"],
            "input_tokens_details": counted["prompt_tokens_details"],
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
