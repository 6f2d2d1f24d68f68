"""A chat request and the conversation that it belongs to."""

from __future__ import annotations

import uuid
from typing import Any

from fastapi import Request
from pydantic_core import from_json

from tandem.errors import RequestError
from tandem.server.body import read_body, understood
from tandem.server.chats.conversations import Conversations
from tandem.server.chats.texts import LARGE, off_loop
from tandem.server.context import get_api, get_group
from tandem.server.openai.schemas import ChatRequest
from tandem.server.sse import encode_json

_INSTRUCTIONS = ("system", "developer")
Json = dict[str, Any]


class Turn:
    """One request's part in its conversation."""

    def __init__(self, given: str | None, store: Conversations | None = None, owner: str = "", asked: bytes = b"",
                 past: int = 0) -> None:
        """`asked`: all messages of the request as a JSON list, of which the first `past` were kept."""
        self._name = owner, given or str(uuid.uuid4())
        self._carried = given is not None
        self._store, self._asked = store, asked
        self.shown: Json = {"conversation_id": self._name[1]}
        """Fields of the answer."""
        if store is not None:
            self.shown["conversation_messages"] = past

    @property
    def kept(self) -> bool:
        """Conversations are kept."""
        return self._store is not None

    def answered(self, message: Json) -> None:
        """The conversation goes on with `message`, if it is kept."""
        if self._store is not None:
            self._store.put(self._name, self._asked[:-1] + b"," + encode_json(message) + b"]", carried=self._carried)


async def parse_turn(http: Request) -> tuple[ChatRequest, Turn]:
    """The request's body, behind what is kept of its conversation. Raises RequestError."""
    api = get_api(http)
    raw = await read_body(http, api.max_body)
    fields = await understood(http, raw, ChatRequest)
    given, store, owner = fields.conversation_id, api.conversations, get_group(http)
    if store is None or "tandem.seed" in http.scope:  # from the journal, which outlives what is kept here
        return fields, Turn(given)
    past = store.get((owner, given)) if given is not None else None
    if past is None or any(message.role == "assistant" for message in fields.messages):
        asked = await off_loop(len(raw) > LARGE, lambda: encode_json(from_json(raw)["messages"]))
        return fields, Turn(given, store, owner, asked)
    whole, asked, count = await off_loop(len(past) + len(raw) > LARGE, _joined, past, raw)
    if len(whole) > api.max_body:
        raise RequestError(f"The conversation has become larger than the limit of {api.max_body} bytes "
                           "(--max-body-mb); begin another 'conversation_id'.", param="conversation_id",
                           code="context_length_exceeded")
    http.scope.pop("tandem.ignored", None)  # its fields are read once more
    return await understood(http, whole, ChatRequest), Turn(given, store, owner, asked, count)


def _joined(past: bytes, raw: bytes) -> tuple[bytes, bytes, int]:
    """The body with the messages of `past` first, these messages, and how many are of `past`. Instructions that the
    request has take the place of those before."""
    body: Json = from_json(raw)
    before: list[Json] = from_json(past)
    asked: list[Json] = body["messages"]
    instructions = [one for one in asked if one["role"] in _INSTRUCTIONS]
    if instructions:
        asked = [one for one in asked if one["role"] not in _INSTRUCTIONS]
        before = [one for one in before if one["role"] not in _INSTRUCTIONS]
    body["messages"] = [*instructions, *before, *asked]
    return encode_json(body), encode_json(body["messages"]), len(before)
