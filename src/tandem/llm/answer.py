"""What becomes of a prompt, and how it grows out of the engine's events."""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem.protocol.control import Output
from tandem.protocol.request import EngineRequest, TokenLogprob
from tandem.text.stream import TextStream
from tandem.text.tokenizer import Tokenizer


@dataclass
class RequestOutput:
    """What became of one prompt."""

    prompt_token_ids: list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    """Without the token that ended the text."""
    finish_reason: str | None = None
    """`stop` or `length`."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""


class Answer:
    """One request's output so far."""

    def __init__(self, request: EngineRequest, tokenizer: Tokenizer) -> None:
        self.output = RequestOutput(request.prompt)
        self._text = TextStream(tokenizer, request.params.stop, continues=True)

    @property
    def over(self) -> bool:
        """It has its finish reason: the engine's, or a stop string was met."""
        return self.output.finish_reason is not None

    def take(self, event: Output) -> str:
        """Add what has come; returns the new text."""
        output = self.output
        tokens = event.tokens[:-1] if event.stop_token else event.tokens
        piece = ""
        for used, token in enumerate(tokens, 1):  # where a stop string ends must not depend on how many came at once
            piece += self._text.push([token])
            if self._text.stopped:
                tokens = tokens[:used]
                break
        output.token_ids += tokens
        output.logprobs += event.logprobs[:len(tokens)]
        output.cached_tokens += event.cached_tokens
        output.finish_reason = event.finish_reason
        if self._text.stopped:
            output.finish_reason = "stop"
        elif output.finish_reason:
            piece += self._text.finish()
        output.text += piece
        return piece
