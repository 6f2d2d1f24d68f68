"""The official client drives tools and structured output, streaming or not, over pipeline and tensor-parallel ranks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jsonschema
import pytest
from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel, ConfigDict, Field

from served import served
from tandem.testing import tiny_model

pytestmark = pytest.mark.slow
LAYOUTS = {"pp 2": ("--pipeline-parallel-size", "2"), "tp 2": ("--tensor-parallel-size", "2")}


class Weather(BaseModel):
    """The weather of a place."""

    city: str = Field(max_length=10)
    unit: Literal["C", "F"]


class Answer(BaseModel):
    """A structured answer."""

    model_config = ConfigDict(extra="forbid")
    ok: bool
    tags: list[Literal["a", "b"]] = Field(max_length=3)


TOOL = pydantic_function_tool(Weather)
CHAT: dict[str, Any] = {"model": "default", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 600, "temperature": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"), layers=2, config={"max_position_embeddings": 4096})


@pytest.fixture(scope="module", params=LAYOUTS)
def client(request: pytest.FixtureRequest, model: Path) -> Iterator[OpenAI]:
    with (
        served(str(model), *LAYOUTS[request.param]) as address,
        OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=240) as one,
    ):
        yield one


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "Weather"}}])
def test_forced_calls(client: OpenAI, choice: Any) -> None:
    for seed in range(3):
        completion = client.chat.completions.parse(**CHAT, tools=[TOOL], tool_choice=choice, seed=seed, parallel_tool_calls=False)
        message = completion.choices[0].message
        assert not message.content
        [call] = message.tool_calls or []
        assert isinstance(call.function.parsed_arguments, Weather)
        assert completion.choices[0].finish_reason == ("tool_calls" if choice == "required" else "stop")


def test_streamed_calls_add_up_to_the_whole_ones(client: OpenAI) -> None:
    fields = {**CHAT, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "seed": 5}
    whole = client.chat.completions.create(**fields).choices[0].message.tool_calls[0].function
    name, arguments, pieces = "", "", 0
    for chunk in client.chat.completions.create(**fields, stream=True):
        for call in chunk.choices[0].delta.tool_calls or ():
            name += call.function.name or ""
            arguments += call.function.arguments
            pieces += 1
    assert (name, arguments) == (whole.name, whole.arguments)
    assert pieces > 3, "arguments stream"


def test_structured_output(client: OpenAI) -> None:
    completion = client.chat.completions.parse(**CHAT, response_format=Answer, n=3, seed=1)
    assert all(isinstance(choice.message.parsed, Answer) for choice in completion.choices)
    fields = {
        **CHAT,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": Answer.model_json_schema(), "strict": True},
        },
        "seed": 7,
    }
    whole = client.chat.completions.create(**fields).choices[0].message.content
    jsonschema.validate(json.loads(whole), Answer.model_json_schema())
    chunks = client.chat.completions.create(**fields, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole


def test_forms_in_completions_too(client: OpenAI) -> None:
    forms: list[tuple[dict[str, Any], str]] = [
        ({"guided_choice": ["red", "green"]}, "red|green"),
        ({"guided_regex": "[a-c]{3}"}, "[a-c]{3}"),
        ({"structured_outputs": {"grammar": 'root ::= "x" [0-9] | "y"'}}, "x[0-9]|y"),
    ]
    for extra, pattern in forms:
        completion = client.completions.create(model="default", prompt="It is", max_tokens=20, extra_body=extra, n=2)
        assert all(re.fullmatch(pattern, choice.text) for choice in completion.choices)


def test_a_conversation_with_calls_and_results_goes_on(client: OpenAI) -> None:
    first = client.chat.completions.create(**CHAT, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    message = first.choices[0].message
    messages = [
        *CHAT["messages"],
        message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"},
    ]
    second = client.chat.completions.create(**{**CHAT, "messages": messages, "max_tokens": 5}, tools=[TOOL])
    assert second.choices[0].finish_reason in ("stop", "length")
    assert second.usage.prompt_tokens > first.usage.prompt_tokens
