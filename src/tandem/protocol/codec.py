"""Messages as MessagePack: bytes of another process become exactly one known type, or one error, whatever they are."""

from __future__ import annotations

from typing import Generic, TypeVar, cast

import msgspec

from tandem.errors import TransportError

Message = TypeVar("Message")

UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)
"""Exceptions of msgspec for malformed bytes; text that is not UTF-8 and endless nesting raise no `MsgspecError`."""


encode = msgspec.msgpack.Encoder().encode
"""Encode a message as MessagePack. Thread-safe."""


class Decoder(Generic[Message]):
    """Decodes MessagePack into `Message`, a struct or a union of tagged ones."""

    def __init__(self, kind: object) -> None:
        """Decode into `kind`, which is `Message` as a value."""
        self._decode = msgspec.msgpack.Decoder(kind).decode

    def decode(self, data: bytes | memoryview) -> Message:
        """Return the message in `data`. Raises TransportError if it is none of `kind`."""
        try:
            return cast(Message, self._decode(data))
        except UNREADABLE as error:
            raise TransportError(f"{len(data)} bytes cannot be read as a message: {error}") from None
