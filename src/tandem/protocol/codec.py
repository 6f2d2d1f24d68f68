"""Encode and decode messages as MessagePack. Malformed bytes raise TransportError and nothing else."""

from __future__ import annotations

from typing import Generic, TypeVar, cast

import msgspec

from tandem.errors import TransportError

Message = TypeVar("Message")

UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)
"""Exceptions that decoding can raise. Text that is not UTF-8 and deep nesting raise no `MsgspecError`."""


encode = msgspec.msgpack.Encoder().encode
"""Encode a message as MessagePack. Thread-safe."""


class Decoder(Generic[Message]):
    """Decoder from MessagePack to `Message`, a struct or a union of tagged ones."""

    def __init__(self, kind: object) -> None:
        """Set the type to decode into; `kind` is `Message` as a runtime value."""
        self._decode = msgspec.msgpack.Decoder(kind).decode

    def decode(self, data: bytes | memoryview) -> Message:
        """Return the message in `data`. Raises TransportError if `data` is not a valid `kind`."""
        try:
            return cast(Message, self._decode(data))
        except UNREADABLE as error:
            raise TransportError(f"{len(data)} bytes cannot be read as a message: {error}") from None
