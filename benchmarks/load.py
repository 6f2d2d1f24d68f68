"""A client that streams completions and takes the time of every piece: asyncio sockets, next to nothing per token.

Client and servers share the machine, so what the client computes is taken from them; an HTTP library would take more
than the servers' own HTTP does.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness import Server
from tokenizers import Tokenizer

LINE_LIMIT = 2**20
WORDS = ("time", "person", "year", "way", "day", "thing", "man", "world", "life", "hand", "part", "child", "eye",
         "woman", "place", "work", "week", "case", "point", "company", "number", "group", "problem", "fact", "river",
         "mountain", "window", "garden", "letter", "music", "paper", "stone", "bridge", "winter", "summer")


@dataclass(frozen=True)
class Job:
    """One request to send."""

    prompt: str
    max_tokens: int
    name: str = ""


@dataclass
class Answer:
    """What became of it; times are of time.perf_counter()."""

    job: Job
    sent: float
    pieces: list[float] = field(default_factory=list)
    """When each event with text came."""
    ended: float = 0.0
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    text: str = ""

    @property
    def ttft(self) -> float:
        """Seconds to the first text."""
        return self.pieces[0] - self.sent

    @property
    def longest_gap(self) -> float:
        """Most seconds between two pieces."""
        return max((b - a for a, b in zip(self.pieces, self.pieces[1:], strict=False)), default=0.0)

    @property
    def decode_rate(self) -> float:
        """Tokens per second after the first."""
        return (self.tokens - 1) / (self.pieces[-1] - self.pieces[0])


class Prompts:
    """Prompts of a given number of tokens that have no beginning in common, so that no prefix cache helps."""

    def __init__(self, model: Path, seed: int = 0) -> None:
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._random = random.Random(seed)

    def length(self, shortest: int, longest: int) -> int:
        """A length drawn evenly."""
        return self._random.randint(shortest, longest)

    def make(self, tokens: int) -> str:
        """A text of about `tokens` tokens: random words behind a random number."""
        words = [str(self._random.randrange(10**9)), *self._random.choices(WORDS, k=tokens)]
        ids = self._tokenizer.encode(" ".join(words), add_special_tokens=False).ids
        return str(self._tokenizer.decode(ids[:tokens], skip_special_tokens=False))


async def send(server: Server, job: Job) -> Answer:
    """One streaming completion. Raises SystemExit when the server answers with an error."""
    body: dict[str, object] = {"model": server.model, "prompt": job.prompt, "max_tokens": job.max_tokens,
                               "temperature": 0.0, "stream": True, "stream_options": {"include_usage": True}}
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=LINE_LIMIT)
    head = (f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n")
    answer = Answer(job, time.perf_counter())
    writer.write(head.encode() + data)
    try:
        status = await reader.readline()
        if b" 200 " not in status:
            raise SystemExit(f"{server.name}: {status.decode().strip()}: {(await reader.read()).decode()[-1000:]}")
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                _take(answer, json.loads(line[6:]), time.perf_counter())
    finally:
        writer.close()
    answer.ended = time.perf_counter()
    if not answer.pieces or not answer.tokens:
        raise SystemExit(f"{server.name}: an answer without tokens")
    return answer


def _take(answer: Answer, event: dict[str, object], now: float) -> None:
    choices, usage = event.get("choices"), event.get("usage")
    if isinstance(choices, list) and choices and (text := choices[0].get("text")):
        answer.pieces.append(now)
        answer.text += text
    if isinstance(usage, dict):
        answer.tokens, answer.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]
        answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)


def one(server: Server, job: Job) -> Answer:
    """One request, alone."""
    return asyncio.run(send(server, job))


def closed_loop(server: Server, jobs: Sequence[Job], concurrency: int) -> list[Answer]:
    """Work through `jobs` with `concurrency` clients, each sending its next one when its last is answered."""

    async def run() -> list[Answer]:
        left = iter(jobs)
        answers: list[Answer] = []

        async def client() -> None:
            for job in left:
                answers.append(await send(server, job))

        await asyncio.gather(*(client() for _ in range(concurrency)))
        return answers

    return asyncio.run(run())


def rate(answers: Sequence[Answer]) -> float:
    """Generated tokens of all answers per second, from the first request to the last answer."""
    return sum(a.tokens for a in answers) / (max(a.ended for a in answers) - min(a.sent for a in answers))
