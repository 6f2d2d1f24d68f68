"""The body of POST /v1/cache/warm."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from tandem.server.openai.messages import Conversation, wrong
from tandem.server.openai.schemas import ChatRequest, normalise_prompt


class WarmRequest(ChatRequest):
    """Chat request whose prompt is to be cached, or completion prompts."""

    messages: Conversation = Field(default_factory=list)
    prompt: Annotated[list[Any] | None, BeforeValidator(normalise_prompt)] = None
    """Strings or lists of token ids, as /v1/completions takes them."""
    unfinished: bool = False
    """True when later requests extend the last message."""

    @model_validator(mode="after")
    def _one_of(self) -> WarmRequest:
        if (self.prompt is None) != bool(self.messages):
            raise wrong("one_of", "give either 'prompt' or 'messages'")
        if self.unfinished and (not self.messages or self.messages[-1].tool_calls):
            raise wrong("unfinished", "'unfinished' is about the text of the last of 'messages'")
        return self
