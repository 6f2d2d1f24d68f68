"""Log probabilities in the shapes of the two endpoints, and of a prompt's tokens in vLLM's."""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Raw
from msgspec.json import encode

from tandem.protocol.logprobs import PromptLogprobs, TokenLogprob
from tandem.text.tokenizer import Tokenizer

LOWEST = -9999.0
"""Stands for a probability of zero, as at OpenAI: JSON has no infinity."""


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST) if math.isfinite(logprob) else LOWEST


def chat_logprobs(tokenizer: Tokenizer, entries: list[TokenLogprob]) -> dict[str, object]:
    """`choices[].logprobs` of a chat answer: the `bytes` of all entries together are the text."""
    content = [
        {
            **_chat_token(tokenizer, entry.token, entry.logprob),
            "top_logprobs": [_chat_token(tokenizer, token, logprob) for token, logprob in entry.top],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _chat_token(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, object]:
    raw = tokenizer.token_bytes(token)
    return {"token": tokenizer.token_text(token), "logprob": _finite(logprob), "bytes": list(raw)}


def prompt_places(tokenizer: Tokenizer, tokens: Sequence[int], places: PromptLogprobs, count: int) -> list[Raw | None]:
    """Return `prompt_logprobs` as vLLM has them: for each token of the prompt, by id, itself and the `count` most
    likely ones in its place.

    The first is None: nothing stands before it. Each place is JSON already, a tenth of its objects in memory.
    """
    written: list[Raw | None] = [None]
    for token, place in zip(tokens[1:], places, strict=True):
        shown = {str(token): _place(tokenizer, token, place.logprob, place.rank)}
        for rank, (other, logprob) in enumerate(place.top[:count], 1):
            shown.setdefault(str(other), _place(tokenizer, other, logprob, rank))
        written.append(_written(shown))
    return written


def _place(tokenizer: Tokenizer, token: int, logprob: float, rank: int) -> dict[str, object]:
    return {"logprob": _finite(logprob), "rank": rank, "decoded_token": tokenizer.token_text(token)}


def _written(place: Mapping[str, object]) -> Raw:
    return Raw(encode(place))


class CompletionLogprobs:
    """`choices[].logprobs` of one completion, which may come in several chunks. Offsets are in characters."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def echoed(self, text: str, tokens: Sequence[int], places: PromptLogprobs, count: int) -> dict[str, list[object]]:
        """Return the object for a prompt that the answer begins with, as `text`; its first token has no probability."""
        whole = self._object((token, place.logprob, place.top[:count]) for token, place in zip(tokens[1:], places, strict=True))
        whole["tokens"].insert(0, self._name(tokens[0]))
        for values in (whole["token_logprobs"], whole["top_logprobs"]):
            values.insert(0, None)
        whole["text_offset"] = [*self._offsets(text, tokens)]
        self._offset = len(text)
        return whole

    def _offsets(self, text: str, tokens: Sequence[int]) -> list[int]:
        """Return where each token begins in `text`, which may lack what the tokenizer put before it: BOS, a space."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        offsets, place = [], 0
        for token in tokens:
            offsets.append(place)
            piece = decoder.decode(self._tokenizer.token_bytes(token))
            if not text.startswith(piece, place):
                piece = "" if token in self._tokenizer.special_ids else piece[1:] if place == 0 else piece
            place = min(place + len(piece), len(text))
        return offsets

    def format(self, entries: list[TokenLogprob]) -> dict[str, list[object]]:
        """Return the object for the next tokens."""
        whole = self._object((entry.token, entry.logprob, entry.top) for entry in entries)
        whole["text_offset"] = []
        for entry in entries:
            whole["text_offset"].append(self._offset)
            self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(entry.token)))
        return whole

    def _object(self, entries: Iterable[tuple[int, float, Sequence[tuple[int, float]]]]) -> dict[str, list[object]]:
        """The object without offsets, for tokens with their log probabilities and the likeliest in their place."""
        whole: dict[str, list[object]] = {"tokens": [], "token_logprobs": [], "top_logprobs": []}
        for token, logprob, top in entries:
            name = self._name(token)
            likeliest = {self._name(other): _finite(value) for other, value in top}
            likeliest.setdefault(name, _finite(logprob))
            whole["tokens"].append(name)
            whole["token_logprobs"].append(_finite(logprob))
            whole["top_logprobs"].append(_written(likeliest))
        return whole

    def _name(self, token: int) -> str:
        """The token's text; parts of a character as OpenAI writes them, so that they stay distinct as keys."""
        raw = self._tokenizer.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
