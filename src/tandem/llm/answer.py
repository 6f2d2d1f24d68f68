"""What becomes of a prompt, and how it grows out of the engine's events."""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem.protocol.control import Output
from tandem.protocol.logprobs import PromptLogprobs, TokenLogprob
from tandem.protocol.request import EngineRequest
from tandem.text.stream import TextStream
from tandem.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Logprob:
    """Of one token in one place of a prompt. The names are vLLM's."""

    logprob: float
    """Natural logarithm of the probability that the model itself gave it."""
    rank: int
    """1 for the most likely token of the place."""
    decoded_token: str


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
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """With `SamplingParams.prompt_logprobs`: for each token of the prompt, by id, itself and the most likely ones in
    its place; None for the first, before which there is nothing."""


class Answer:
    """One request's output so far."""

    def __init__(self, request: EngineRequest, tokenizer: Tokenizer) -> None:
        self.output = RequestOutput(request.prompt)
        self._text = TextStream(tokenizer, request.params.stop, continues=True)
        self._name = tokenizer.token_text

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
        if event.prompt_logprobs is not None:
            output.prompt_logprobs = self._places(event.prompt_logprobs)
        output.finish_reason = event.finish_reason
        if self._text.stopped:
            output.finish_reason = "stop"
        elif output.finish_reason:
            piece += self._text.finish()
        output.text += piece
        return piece

    def _places(self, found: PromptLogprobs) -> list[dict[int, Logprob] | None]:
        places: list[dict[int, Logprob] | None] = [None]
        for token, one in zip(self.output.prompt_token_ids[1:], found, strict=True):
            place = {token: Logprob(one.logprob, one.rank, self._name(token))}
            for rank, (other, logprob) in enumerate(one.top, 1):
                place.setdefault(other, Logprob(logprob, rank, self._name(other)))
            places.append(place)
        return places
