"""Messages as MessagePack: bytes of another process become exactly one known type, or one error, whatever they are."""

from __future__ import annotations

from typing import Generic, TypeVar, cast

import msgspec

from tandem.errors import TransportError

Message = TypeVar("Message")

UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)
"""What msgspec raises for bytes that are not what they should be; text that is not UTF-8 and nesting without end are no
`MsgspecError`."""


encode = msgspec.msgpack.Encoder().encode
"""A message as MessagePack. From any thread."""


class Decoder(Generic[Message]):
    """Decodes MessagePack into `Message`, a struct or a union of tagged ones."""

    def __init__(self, kind: object) -> None:
        """`kind` is `Message` once more, as a value."""
        self._decode = msgspec.msgpack.Decoder(kind).decode

    def decode(self, data: bytes | memoryview) -> Message:
        """The message in `data`. Raises TransportError for anything else."""
        try:
            return cast(Message, self._decode(data))
        except UNREADABLE as error:
            raise TransportError(f"{len(data)} bytes cannot be read as a message: {error}") from None
