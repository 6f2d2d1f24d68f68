"""Log probabilities in the formats of chat and completions, and vLLM's `prompt_logprobs`."""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Raw
from msgspec.json import encode

from tandem.protocol.logprobs import PromptLogprobs, TokenLogprob
from tandem.text.tokenizer import Tokenizer

LOWEST = -9999.0
"""Log probability reported for a probability of zero, as at OpenAI: JSON has no infinity."""


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST) if math.isfinite(logprob) else LOWEST


def chat_logprobs(tokenizer: Tokenizer, entries: list[TokenLogprob]) -> dict[str, object]:
    """Return `choices[].logprobs` of a chat answer; the `bytes` of all entries together are the text."""
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
    """Return vLLM's `prompt_logprobs`: for each prompt position, the token itself and the `count` most likely, by id.

    The first position is None. The others are encoded JSON, which takes a tenth of the memory of objects.
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
    """Formatter of `choices[].logprobs` of one completion, over several chunks. Offsets are in characters."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def echoed(self, text: str, tokens: Sequence[int], places: PromptLogprobs, count: int) -> dict[str, list[object]]:
        """Return the object for an echoed prompt with the text `text`; its first token has no log probability.

        `count`: most likely tokens per position.
        """
        whole = self._object((token, place.logprob, place.top[:count]) for token, place in zip(tokens[1:], places, strict=True))
        whole["tokens"].insert(0, self._name(tokens[0]))
        for values in (whole["token_logprobs"], whole["top_logprobs"]):
            values.insert(0, None)
        whole["text_offset"] = [*self._offsets(text, tokens)]
        self._offset = len(text)
        return whole

    def _offsets(self, text: str, tokens: Sequence[int]) -> list[int]:
        """Return each token's offset in `text`, which may lack what the tokenizer has added in front (BOS, a space)."""
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
        """Return the object for the next output tokens."""
        whole = self._object((entry.token, entry.logprob, entry.top) for entry in entries)
        whole["text_offset"] = []
        for entry in entries:
            whole["text_offset"].append(self._offset)
            self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(entry.token)))
        return whole

    def _object(self, entries: Iterable[tuple[int, float, Sequence[tuple[int, float]]]]) -> dict[str, list[object]]:
        """Return the object without offsets from (token id, log probability, most likely tokens) triples."""
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
        """Return the token's text; incomplete UTF-8 as `bytes:\\x..`, as at OpenAI, so that keys stay distinct."""
        raw = self._tokenizer.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
