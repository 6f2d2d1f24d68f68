"""Log probabilities in the shapes of the two endpoints, and of a prompt's tokens in vLLM's."""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from typing import Any

from msgspec import Raw
from msgspec.json import encode

from tandem.protocol.logprobs import PromptLogprobs, TokenLogprob
from tandem.text.tokenizer import Tokenizer

LOWEST = -9999.0
"""What OpenAI sends for a probability of zero, as JSON has no infinity."""


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST) if math.isfinite(logprob) else LOWEST


def chat_logprobs(tokenizer: Tokenizer, entries: list[TokenLogprob]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat answer: the `bytes` of all entries together are the text."""
    content = [
        {
            **_chat_token(tokenizer, entry.token, entry.logprob),
            "top_logprobs": [_chat_token(tokenizer, token, logprob) for token, logprob in entry.top],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _chat_token(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token)
    return {"token": tokenizer.token_text(token), "logprob": _finite(logprob), "bytes": list(raw)}


def prompt_places(
    tokenizer: Tokenizer, tokens: Sequence[int], found: PromptLogprobs, count: int
) -> list[Raw | None]:
    """`prompt_logprobs` as vLLM has them: for each token of the prompt, by id, itself and the `count` most likely ones
    in its place; None for the first, before which there is nothing. Each place is JSON already, a tenth of its objects.
    """
    places: list[Raw | None] = [None]
    for token, one in zip(tokens[1:], found, strict=True):
        place = {str(token): _place(tokenizer, token, one.logprob, one.rank)}
        for rank, (other, logprob) in enumerate(one.top[:count], 1):
            place.setdefault(str(other), _place(tokenizer, other, logprob, rank))
        places.append(_written(place))
    return places


def _place(tokenizer: Tokenizer, token: int, logprob: float, rank: int) -> dict[str, Any]:
    return {"logprob": _finite(logprob), "rank": rank, "decoded_token": tokenizer.token_text(token)}


def _written(place: dict[str, Any]) -> Raw:
    return Raw(encode(place))


class CompletionLogprobs:
    """`choices[].logprobs` of one completion, which may come in several chunks. Offsets are in characters."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def echoed(self, text: str, tokens: Sequence[int], found: PromptLogprobs, count: int) -> dict[str, Any]:
        """The object for a prompt that the answer begins with, as `text`; before its first token there is nothing to
        tell that one from."""
        names = [self._name(token) for token in tokens]
        logprobs: list[float | None] = [None]
        tops: list[Raw | None] = [None]
        for name, one in zip(names[1:], found, strict=True):
            logprobs.append(_finite(one.logprob))
            top = {self._name(token): _finite(logprob) for token, logprob in one.top[:count]}
            top.setdefault(name, _finite(one.logprob))
            tops.append(_written(top))
        offsets = self._offsets(text, tokens)
        self._offset = len(text)
        return {"tokens": names, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}

    def _offsets(self, text: str, tokens: Sequence[int]) -> list[int]:
        """Where each token begins in `text`, which may lack what the tokenizer put before it: BOS, a space."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        offsets, place = [], 0
        for token in tokens:
            offsets.append(place)
            piece = decoder.decode(self._tokenizer.token_bytes(token))
            if not text.startswith(piece, place):
                piece = "" if token in self._tokenizer.special_ids else piece[1:] if place == 0 else piece
            place = min(place + len(piece), len(text))
        return offsets

    def format(self, entries: list[TokenLogprob]) -> dict[str, Any]:
        """The object for the next tokens."""
        tokens, logprobs, tops, offsets = [], [], [], []
        for entry in entries:
            name = self._name(entry.token)
            tokens.append(name)
            logprobs.append(_finite(entry.logprob))
            top = {self._name(token): _finite(logprob) for token, logprob in entry.top}
            top.setdefault(name, _finite(entry.logprob))
            tops.append(top)
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(entry.token)))
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}

    def _name(self, token: int) -> str:
        """The token's text; parts of a character as OpenAI writes them, so that they stay distinct as keys."""
        raw = self._tokenizer.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
