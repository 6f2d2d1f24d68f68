"""A generation that is answered in one piece."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.protocol.logprobs import PromptLogprobs, TokenLogprob
from tandem.protocol.request import EngineRequest, SamplingParams
from tandem.server.generation.generate import Generation


@dataclass
class Answer:
    """All of one choice."""

    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str = "stop"
    stop: str | None = None
    """The stop string that ended it."""
    prompt: PromptLogprobs | None = None
    """Of its prompt, if they were asked for."""


async def collect(generation: Generation, choices: int) -> list[Answer]:
    """Run to the end. Closes the generation; raises RequestError."""
    parts: list[list[str]] = [[] for _ in range(choices)]
    answers = [Answer() for _ in range(choices)]
    try:
        while not generation.done:
            for delta in await generation.next() or ():
                parts[delta.index].append(delta.text)
                answers[delta.index].logprobs += delta.logprobs
                answers[delta.index].finish_reason = delta.finish_reason or "stop"
                answers[delta.index].stop = delta.stop
                answers[delta.index].prompt = answers[delta.index].prompt if delta.prompt is None else delta.prompt
    finally:
        generation.close()
    for answer, texts in zip(answers, parts, strict=True):
        answer.text = "".join(texts)
    return answers


def engine_requests(
    request_id: str, group: str, work: Sequence[tuple[list[int], SamplingParams]], caching: Mapping[str, Any]
) -> list[EngineRequest]:
    """One engine request for each (prompt, parameters); `caching` is what all say of the prefix cache."""
    return [
        EngineRequest(request_id=f"{request_id}-{index}", prompt=prompt, params=params, group=group, **caching)
        for index, (prompt, params) in enumerate(work)
    ]
