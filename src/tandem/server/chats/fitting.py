"""Texts that cannot fit into the context are refused before they are tokenised, or as soon as that shows. Pure."""

from __future__ import annotations

from tandem.errors import RequestError
from tandem.text.tokenizer import Tokenizer

CHARS_PER_TOKEN = 8
"""Texts of more characters than this for each token of the context are tokenised piece by piece: few of them fit."""
SLACK = 256
"""Tokens more that the beginning of a text may have than the text, at most: its last word is cut."""


def too_long(context: int, param: str, tokens: int | None, *, least: bool = False) -> RequestError:
    """OpenAI's words. `tokens` are those of the text, `least` so many or more; None when they were not counted."""
    many = f"more than {context}" if tokens is None else f"{'at least ' if least else ''}{tokens}"
    return RequestError(f"This model's maximum context length is {context} tokens. However, your {param} resulted in "
                        f"{many} tokens. Please reduce the length of the {param}.", param=param,
                        code="context_length_exceeded")


def check_bytes(tokenizer: Tokenizer, text: str, context: int, param: str) -> None:
    """Raises RequestError for a text of more bytes than the tokens of the context can stand for."""
    if tokenizer.longest_token is None:
        return
    most = context * tokenizer.longest_token
    if 4 * len(text) > most and len(text.encode("utf-8", "replace")) > most:
        raise too_long(context, param, None)


def encode_fitting(tokenizer: Tokenizer, text: str, context: int, param: str, *, special: bool = True,
                   closed: bool = False) -> list[int]:
    """Token ids of a text; with `special` as a text begins, with `closed` as one ends that is to be embedded.

    There may be some more than `context`. Raises RequestError when there are many more.
    """
    check_bytes(tokenizer, text, context, param)
    size = CHARS_PER_TOKEN * context
    while len(text) > size:
        least = len(tokenizer.encode(text[:size], special)) - SLACK
        if least > context:
            raise too_long(context, param, least, least=True)
        size *= 2
    return tokenizer.encode_closed(text) if closed else tokenizer.encode(text, special)
