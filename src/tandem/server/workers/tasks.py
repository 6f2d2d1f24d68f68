"""Tasks of worker processes, and their answers."""

from __future__ import annotations

from typing import Literal

from msgspec import Raw, Struct

FILES_AWAY = "tokenizer_unavailable"
"""Code of what is refused because files of the model cannot be read: none of the client's doing."""


class TextsOf(Struct, frozen=True):
    """The model whose tokenizer and template are to be used, as the api itself has loaded them."""

    source: str
    """Directory of the model."""
    name: str
    chat_template: str | None
    """A file that replaces the model's template."""
    trust_remote_code: bool


class Judge(Struct, tag=True):
    """Is this body a good request? Answer: None."""

    route: str
    """Name of its schema."""
    body: bytes
    unknown: Literal["refuse", "warn", "ignore"] = "refuse"
    """What becomes of fields that the schema does not have."""


class Encode(Struct, tag=True):
    """Token ids of texts. Answer: a list of bytes, int32 each."""

    model: TextsOf
    texts: list[str]
    context: int
    """Most tokens that any of them may have."""
    param: str
    """The field that they came in."""
    special: bool = True
    """With the tokens that a text begins with."""
    closed: bool = False
    """With the token that ends a text which is to be embedded."""


class Render(Struct, tag=True):
    """The prompt of a conversation. Answer: its token ids as bytes, int32 each, and the end of its text."""

    model: TextsOf
    context: int
    conversation: bytes
    """JSON, which knows whole numbers of any size: the arguments of `prompt_text` by their names."""


class Describe(Struct, tag=True):
    """The grammar of a form. Answer: a text."""

    form: bytes
    """JSON: a field of `StructuredOutputs` and its value."""


class Compare(Struct, tag=True):
    """Layouts of a model over machines. Answer: bytes, a JSON object."""

    model: str
    revision: str | None
    hosts: list[str]
    link: list[str]
    context: int
    streams: int
    goal: str | None


Task = Judge | Encode | Render | Describe | Compare


class Done(Struct, tag=True):
    """The answer."""

    answer: Raw
    last: bool = False
    """The process ends now, to give back its memory."""


class Refused(Struct, tag=True):
    """The request is at fault."""

    message: str
    param: str | None
    code: str | None
    status: int
    last: bool = False


class Broken(Struct, tag=True):
    """An exception that nobody foresaw: its name, and the places in the code."""

    name: str
    frames: str
    last: bool = True


Reply = Done | Refused | Broken
