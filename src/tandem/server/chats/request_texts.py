"""Tokenizing and rendering for one request: in this process if small, in a worker process if large or costly."""

from __future__ import annotations

import array
from collections.abc import Callable, Mapping, Sequence
from secrets import token_hex
from typing import Any, TypeVar

from fastapi import Request
from msgspec.structs import replace
from pydantic_core import to_json

from tandem.guided.accept import GrammarCheck
from tandem.json_types import JsonObject
from tandem.protocol.control import EngineStatus
from tandem.protocol.pictures import Picture
from tandem.server.body_validation import LARGE_BODY
from tandem.server.chats.picture_fetch import fetch_pictures
from tandem.server.chats.pictures import OMITTED, WEB, check_given, takes_pictures
from tandem.server.chats.prompt import Rendered, rendered, template_input
from tandem.server.chats.texts import LARGE, off_loop
from tandem.server.context import get_api, get_group, unless_gone
from tandem.server.engines.served_model import Served
from tandem.server.openai.messages import GivenPicture, Message
from tandem.text.pictures import Prepared
from tandem.text.template_sandbox import TooExpensive
from tandem.text.tokenizer import Tokenizer, check_bytes, encode_fitting

Result = TypeVar("Result")


class RequestTexts:
    """Tokenizer and chat template for one request. Methods reject texts that cannot fit into the context."""

    def __init__(self, http: Request, served: Served, tokenizer: Tokenizer, status: EngineStatus) -> None:
        self.tokenizer = tokenizer
        self.status = status
        self.http = http
        self.body_size: int = http.scope.get("tandem.body_size", 0)
        """Bytes of the request's body; bounds the size of each of its texts."""
        self._loaded = served.texts

    @property
    def grammars(self) -> GrammarCheck:
        """Grammar checker for the model."""
        return self._loaded.grammars(self.tokenizer)

    @classmethod
    async def of(cls, http: Request, served: Served) -> RequestTexts:
        """Create for a loaded model. Raises UnavailableError if none of its engines takes requests."""
        status = served.status()
        return cls(http, served, await served.texts.tokenizer(status), status)

    async def encode(self, texts: Sequence[str], param: str, *, special: bool = True, closed: bool = False) -> list[list[int]]:
        """Return the token ids of each text. `special`: add the special tokens; `closed`: end as embedding models expect.

        Raises RequestError naming `param`.
        """
        options: Any = {"context": self.status.max_context, "param": param, "special": special, "closed": closed}
        for text in texts:
            check_bytes(self.tokenizer, text, self.status.max_context, param)
        size = sum(map(len, texts))
        if size > LARGE_BODY:
            task = {"model": self._loaded.described(self.status), "texts": list(texts), **options}
            return [_ids(packed) for packed in await self.ask("encode", task, list[bytes], prepare="load")]
        return await self._here(size, lambda: [encode_fitting(self.tokenizer, text, **options) for text in texts])

    async def decode(self, tokens: list[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids."""
        return await self._here(len(tokens), lambda: self.tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens))

    async def render(
        self,
        messages: Sequence[Message],
        variables: JsonObject,
        *,
        tools: Sequence[JsonObject] = (),
        add_generation_prompt: bool = True,
    ) -> Rendered:
        """Render a conversation with the model's chat template. `variables`: further template variables.

        Raises RequestError if there is no template, or it rejects the conversation.
        """
        context, mark = self.status.max_context, ""
        if pictures := [picture for message in messages for picture in message._pictures]:
            asked = any(message.pictures for message in messages if message.role == "user")
            pictures = await self._with_bytes(pictures) if takes_pictures(self.status, asked) else []
            mark = f"<picture {token_hex(16)}>" if pictures else OMITTED

        def conversation() -> JsonObject:
            return {
                "messages": [template_input(message, mark) for message in messages],
                "tools": tools,
                "variables": variables,
                "add_generation_prompt": add_generation_prompt,
            }

        if not pictures and self.body_size <= LARGE_BODY:
            try:
                return await self._here(self.body_size, lambda: rendered(self.tokenizer, context, conversation(), quick=True))
            except TooExpensive:
                pass  # rendered by a worker process instead
        task = {"model": self._loaded.described(self.status), "context": context, "conversation": to_json(conversation())}
        keys = [(self.status.source, picture.url, picture.low) for picture in pictures]
        known = {number: self._loaded.prepared[key] for number, key in enumerate(keys, 1) if key in self._loaded.prepared}
        task |= {"mark": mark, "known": {n: one._replace(picture=replace(one.picture, inputs=b"")) for n, one in known.items()}}
        task["pictures"] = [("" if number in known else url, low) for number, (_, url, low) in enumerate(keys, 1)]
        packed, end, seen, made = await self.ask("render", task, tuple[bytes, str, list[Picture], list[Prepared]], prepare="load")
        prepared = [known.get(number, picture) for number, picture in enumerate(made, 1)]
        if pictures:
            self._loaded.keep(dict(zip(keys, prepared, strict=True)))
        whole = (replace(picture, inputs=one.picture.inputs) for picture, one in zip(seen, prepared, strict=True))
        return Rendered(_ids(packed), end, tuple(whole))

    async def _with_bytes(self, pictures: list[GivenPicture]) -> list[GivenPicture]:
        """Return the pictures as data URIs; those at http(s) URLs are fetched. Raises RequestError."""
        api = get_api(self.http)
        hosts = api.settings.server.image_hosts
        check_given(pictures, hosts)
        if not any(picture.url[:6].lower().startswith(WEB) for picture in pictures):
            return pictures
        async with api.fetch_semaphore.turn(get_group(self.http)):
            return await unless_gone(self.http, fetch_pictures(pictures, hosts, api.max_body))

    async def _here(self, size: int, work: Callable[[], Result]) -> Result:
        """Run `work` in this process: at once if small, else in a thread after a turn of the fair semaphore."""
        if size <= LARGE:
            return work()
        async with get_api(self.http).text_semaphore.turn(get_group(self.http), size):
            return await off_loop(True, work)

    async def ask(self, function: str, arguments: Mapping[str, object], answer: type[Result], *, prepare: str = "") -> Result:
        """Run a function of `workers/work.py` in a worker process and return its result. Raises RequestError."""
        asking = get_api(self.http).workers.ask(get_group(self.http), function, arguments, answer, prepare=prepare)
        return await unless_gone(self.http, asking)


def _ids(packed: bytes) -> list[int]:
    return array.array("i", packed).tolist()
