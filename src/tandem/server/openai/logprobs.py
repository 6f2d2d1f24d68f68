"""Log probabilities in the shapes of the two endpoints."""

from __future__ import annotations

import codecs
import math
from typing import Any

from tandem.protocol.request import TokenLogprob
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


class CompletionLogprobs:
    """`choices[].logprobs` of one completion, which may come in several chunks. Offsets are in characters."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

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
