"""Requests of a storm: every kind that the server answers, how to send one, and when two answers are the same."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

PATIENCE_S = 240.0
"""Seconds without a byte after which a request counts as hung."""
CLOSE = 2e-3
"""Log probabilities and vectors may differ by so much: float32, added in another order in another batch."""

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOL = {
    "name": "weather",
    "description": "of a place",
    "parameters": {"type": "object", "properties": {"place": {"enum": ["Oslo", "Rome", "Lima"]}}, "required": ["place"]},
}


@dataclass(frozen=True)
class Request:
    """A request whose answer must always be the same."""

    path: str
    body: dict[str, Any]

    @property
    def name(self) -> str:
        """Path and fields, for messages."""
        extra = sorted(set(self.body) - {"model", "messages", "prompt", "input", "max_tokens", "stream"})
        return f"{self.path}{' streamed' if self.body.get('stream') else ''} {' '.join(extra)}"


@dataclass
class Outcome:
    """End of a request."""

    kind: str
    """answered, refused (429 or 503 with Retry-After), failed (any other answer), broken (the connection ended),
    hung."""
    detail: str = ""
    answer: dict[str, Any] = field(default_factory=dict)
    twice: bool = False
    """A role that came again, or a piece after the end."""
    disk_tokens: int = 0
    """Tokens of the prompt that were read from disk; not told of streams."""


def requests(rng: random.Random) -> list[Request]:
    """Return the set: greedy and seeded, short and long, whole and streamed, of every endpoint."""

    def ids(count: int) -> list[int]:
        return [rng.randrange(10, 500) for _ in range(count)]

    def talk(words: int) -> list[dict[str, Any]]:
        return [{"role": "user", "content": " ".join(rng.choice(["one", "two", "red", "sea"]) for _ in range(words))}]

    hot = {"temperature": 1.0, "seed": 11, "top_p": 0.9}
    penal = {**hot, "presence_penalty": 0.5, "repetition_penalty": 1.1, "frequency_penalty": 0.3}
    shared = ids(200)
    made: list[Request] = []
    for number in range(12):
        prompt = ids(rng.choice([3, 30, 300]))
        made.append(
            Request(
                "/v1/completions",
                {
                    "prompt": shared + prompt if number % 4 == 0 else prompt,
                    "max_tokens": rng.choice([4, 40, 160]),
                    "stream": number % 3 > 0,
                    "ignore_eos": True,
                    **(penal if number % 2 else {"temperature": 0}),
                },
            )
        )
    for stream in (False, True):
        base: dict[str, Any] = {"stream": stream, "max_tokens": 24}
        cold = {**base, "temperature": 0}
        form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
        tools = [{"type": "function", "function": TOOL}]
        chat = "/v1/chat/completions"
        made += [
            Request(chat, {**cold, "messages": talk(8)}),
            Request(chat, {**base, **hot, "messages": talk(8)}),
            Request(chat, {**base, **hot, "n": 3, "messages": talk(6)}),
            Request(chat, {**cold, "n": 3, "logprobs": True, "top_logprobs": 2, "messages": talk(6)}),
            Request(chat, {**base, **hot, "max_tokens": 60, "response_format": form, "messages": talk(5)}),
            Request(chat, {**base, **hot, "tools": tools, "tool_choice": "required", "messages": talk(5)}),
            Request(
                chat,
                {
                    **cold,
                    "tools": tools,
                    "messages": talk(5),
                    "tool_choice": {"type": "function", "function": {"name": "weather"}},
                },
            ),
            Request(chat, {**base, **penal, "stop": ["q"], "messages": talk(40)}),
            Request("/v1/completions", {**cold, "prompt": ids(20), "logprobs": 2, "ignore_eos": True}),
            Request(
                "/v1/responses",
                {"stream": stream, "max_output_tokens": 24, "temperature": 0, "store": False, "input": "tell me " * 6},
            ),
            Request("/v1/messages", {**cold, "messages": talk(7)}),
        ]
    made.append(Request("/v1/embeddings", {"input": ["red sea", "one two three"]}))
    return [Request(one.path, {"model": "default", **one.body}) for one in made]


def long_requests(rng: random.Random) -> list[Request]:
    """Return prompts of several KV blocks, which begin alike by threes; greedy and seeded, whole and streamed."""
    made = []
    for number in range(24):
        if number % 3 == 0:
            stem = [rng.randrange(10, 500) for _ in range(rng.choice([300, 900, 1400]))]
        prompt = [*stem, *(rng.randrange(10, 500) for _ in range(rng.choice([5, 300])))]
        how = {"temperature": 0} if number % 2 else {"temperature": 1.0, "seed": 7 + number, "top_p": 0.9}
        made.append(
            Request(
                "/v1/completions",
                {
                    "model": "default",
                    "prompt": prompt,
                    "max_tokens": rng.choice([4, 40, 300]),
                    "stream": number % 4 == 3,
                    "ignore_eos": True,
                    **how,
                },
            )
        )
    return made


def ask(url: str, request: Request) -> Outcome:
    """Send it and read the answer to its end."""
    try:
        with httpx.stream("POST", url + request.path, json=request.body, timeout=PATIENCE_S) as got:
            if got.status_code != 200:
                got.read()
                return outcome_of(got)
            if not request.body.get("stream"):
                got.read()
                body = got.json()
                details = (body.get("usage") or {}).get("prompt_tokens_details") or {}
                return Outcome("answered", answer=read_whole(request, body), disk_tokens=details.get("disk_cached_tokens") or 0)
            return _stream(request.path, _events(got))
    except httpx.TimeoutException:
        return Outcome("hung", request.name)
    except httpx.TransportError as error:
        return Outcome("broken", type(error).__name__)


def outcome_of(got: httpx.Response) -> Outcome:
    """Return the outcome of an answer that has another status than 200."""
    try:
        error = got.json()["error"]
        code = error.get("code") or error["type"]
    except (ValueError, KeyError, TypeError):
        code = got.text[:80]
    promised = got.status_code in (429, 503) and "retry-after" in got.headers
    return Outcome("refused" if promised else "failed", f"{got.status_code} {code}")


def _events(got: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in got.iter_lines():
        if line.startswith("data: "):
            yield {"done": True} if line == "data: [DONE]" else json.loads(line[6:])


def _stream(path: str, events: Iterator[dict[str, Any]]) -> Outcome:
    """Read a stream to its end."""
    over = False
    outcome = Outcome("answered")
    roles: set[int] = set()
    for event in events:
        outcome.twice |= over and not event.get("done")
        if event.get("done") or event.get("type") in ("response.completed", "response.incomplete", "message_stop"):
            over = True
        elif "error" in event or event.get("type") in ("error", "response.failed"):
            return Outcome("failed", f"in the stream: {json.dumps(event)[:120]}")
        else:
            _READ[path](event, outcome.answer)
            for choice in event.get("choices", ()):
                if (choice.get("delta") or {}).get("role"):
                    outcome.twice |= choice["index"] in roles
                    roles.add(choice["index"])
    return outcome if over else Outcome("broken", "the stream ended early")


def _add(answer: dict[str, Any], key: str, text: str | None) -> None:
    if text:
        answer[key] = answer.get(key, "") + text


def _choice(choice: dict[str, Any], answer: dict[str, Any], part: str) -> None:
    number = choice["index"]
    said = choice if part == "text" else choice[part]
    _add(answer, f"text {number}", said.get("text") or said.get("content"))
    _add(answer, f"thought {number}", said.get("reasoning_content"))
    for call in said.get("tool_calls") or ():
        _add(answer, f"call {number}", call["function"].get("name"))
        _add(answer, f"arguments {number}", call["function"].get("arguments"))
    if logprobs := choice.get("logprobs"):
        found = logprobs.get("token_logprobs") or [one["logprob"] for one in logprobs.get("content") or ()]
        answer.setdefault(f"logprobs {number}", []).extend(found)
        tokens = [bytes(one["bytes"]) for one in logprobs.get("content") or ()] or map(_bytes, logprobs.get("tokens") or ())
        _add(answer, f"tokens {number}", "".join(f"{json.dumps(token.decode('latin-1'))}\n" for token in tokens))
    if choice.get("finish_reason"):
        answer[f"finish {number}"] = choice["finish_reason"]


def _bytes(token: str) -> bytes:
    """Return a token's bytes from its name in log probabilities of completions."""
    return bytes.fromhex(token.removeprefix("bytes:").replace("\\x", "")) if token.startswith("bytes:") else token.encode()


def _completion(event: dict[str, Any], answer: dict[str, Any]) -> None:
    for choice in event.get("choices", ()):
        _choice(choice, answer, "text")


def _chat(event: dict[str, Any], answer: dict[str, Any]) -> None:
    for choice in event.get("choices", ()):
        _choice(choice, answer, "delta" if "delta" in choice else "message")


def _response(event: dict[str, Any], answer: dict[str, Any]) -> None:
    if event.get("type") == "response.output_text.delta":
        _add(answer, "text", event["delta"])
    for item in event.get("output", ()):
        for part in item.get("content") or ():
            _add(answer, "text", part.get("text"))


def _message(event: dict[str, Any], answer: dict[str, Any]) -> None:
    _add(answer, "text", event.get("delta", {}).get("text"))
    for block in event.get("content", ()):
        _add(answer, "text", block.get("text"))


def _embedding(event: dict[str, Any], answer: dict[str, Any]) -> None:
    answer["vectors"] = [number for one in event["data"] for number in one["embedding"]]


_READ: dict[str, Callable[[dict[str, Any], dict[str, Any]], None]] = {
    "/v1/completions": _completion,
    "/v1/chat/completions": _chat,
    "/v1/responses": _response,
    "/v1/messages": _message,
    "/v1/embeddings": _embedding,
}


def read_whole(request: Request, body: dict[str, Any]) -> dict[str, Any]:
    """Return what an answer in one piece says."""
    answer: dict[str, Any] = {}
    _READ[request.path](body, answer)
    return answer


def same(mine: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Whether two answers are equal, numbers as close as float32 allows."""
    if mine.keys() != theirs.keys():
        return False
    for key, value in mine.items():
        other = theirs[key]
        if isinstance(value, list):
            if len(value) != len(other) or any(abs((a or 0.0) - (b or 0.0)) > CLOSE for a, b in zip(value, other, strict=True)):
                return False
        elif value != other:
            return False
    return True
