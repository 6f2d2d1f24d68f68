"""What clients were recorded to send (recorded/, by record.py) is answered in the shapes of the official libraries."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic.types
import httpx
import openai.types.chat
import openai.types.responses
import pytest
from pydantic import TypeAdapter

pytestmark = pytest.mark.slow

FILES = sorted((Path(__file__).parents[1] / "recorded").glob("*.json"))
MOST_TOKENS = 32
WHOLE: dict[str, Any] = {
    "/v1/chat/completions": openai.types.chat.ChatCompletion,
    "/v1/completions": openai.types.Completion,
    "/v1/responses": openai.types.responses.Response,
    "/v1/messages": anthropic.types.Message,
    "/v1/messages/count_tokens": anthropic.types.MessageTokensCount,
    "/v1/models": openai.types.Model,
    "/v1/embeddings": openai.types.CreateEmbeddingResponse,
}
PIECES: dict[str, Any] = {
    "/v1/chat/completions": openai.types.chat.ChatCompletionChunk,
    "/v1/completions": openai.types.Completion,
    "/v1/responses": openai.types.responses.ResponseStreamEvent,
    "/v1/messages": anthropic.types.RawMessageStreamEvent,
}
LAST = {
    "/v1/chat/completions": "[DONE]",
    "/v1/completions": "[DONE]",
    "/v1/responses": '"type":"response.',
    "/v1/messages": '"type":"message_stop"',
}


def recorded() -> Iterator[Any]:
    for file in FILES:
        for index, request in enumerate(json.loads(file.read_text())["requests"]):
            yield pytest.param(request, id=f"{file.stem}-{index}-{request['path']}")


def shortened(body: dict[str, Any]) -> dict[str, Any]:
    """The body with a small limit for the answer, which takes long otherwise."""
    return {
        name: min(value, MOST_TOKENS) if name.startswith("max_") and isinstance(value, int) else value
        for name, value in body.items()
    }


@pytest.mark.parametrize("request_", list(recorded()))
def test_the_answer_has_the_official_shape(url: str, request_: dict[str, Any]) -> None:
    path = request_["path"].partition("?")[0]
    body = shortened(request_["body"]) if "body" in request_ else None
    address, headers = url + request_["path"], request_["headers"]
    answer = httpx.request(request_["method"], address, json=body, headers=headers, timeout=240)
    assert answer.status_code == request_["status"], answer.text
    if request_["status"] >= 400 or request_["method"] == "HEAD":
        return
    if body and body.get("stream"):
        pieces = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
        assert LAST[path] in pieces[-1]
        parser = TypeAdapter(PIECES[path])
        for piece in pieces:
            if piece not in ("[DONE]", '{"type":"ping"}'):
                parser.validate_json(piece)
    elif path == "/v1/models":
        assert [TypeAdapter(WHOLE[path]).validate_python(model) for model in answer.json()["data"]]
    else:
        TypeAdapter(WHOLE[path]).validate_json(answer.text)


def test_every_client_is_recorded_with_its_version_and_nothing_private() -> None:
    assert FILES
    for file in FILES:
        text = file.read_text()
        client = json.loads(text)["client"]
        assert any(letter.isdigit() for letter in client), client
        assert len(text) < 40_000
        assert not [word for word in ("sk-", "Bearer", "authorization", "/root", "/home/", "/tmp/") if word in text]
