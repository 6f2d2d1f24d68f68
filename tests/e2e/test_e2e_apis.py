"""The official clients drive the APIs of `tandem serve`: a tiny model over two ranks of a stage and one of the next."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import jsonschema
import pytest
from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel, ConfigDict, Field

from served import served
from tandem.testing import tiny_model

pytestmark = pytest.mark.slow
LONG = {"max_position_embeddings": 4096}
SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["city", "unit"],
    "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["C", "F"]}},
}
ASK: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]


class Place(BaseModel):
    """A structured answer."""

    model_config = ConfigDict(extra="forbid")
    city: str = Field(max_length=12)
    warm: bool


class Weather(BaseModel):
    """The weather of a place."""

    city: str = Field(max_length=10)
    unit: Literal["C", "F"]


class Answer(BaseModel):
    """A structured answer with a list."""

    model_config = ConfigDict(extra="forbid")
    ok: bool
    tags: list[Literal["a", "b"]] = Field(max_length=3)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("server")
    model = tiny_model(directory / "model", config=LONG)
    with served(str(model), "--parallel", "2,1", "--journal", str(directory / "journal")) as address:
        yield address


@pytest.fixture
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300) as one:
        yield one


class TestMessages:
    """Anthropic's client."""

    TOOL: Any = {"name": "weather", "description": "Tells the weather of a city.", "input_schema": SCHEMA}
    FIELDS: Any = {"model": "default", "max_tokens": 200, "messages": ASK}

    @pytest.fixture
    def client(self, url: str) -> Iterator[anthropic.Anthropic]:
        with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=300) as one:
            yield one

    def test_a_stream_adds_up_to_the_whole_answer(self, client: anthropic.Anthropic) -> None:
        fields = {**self.FIELDS, "max_tokens": 30, "system": "Be brief.", "extra_body": {"temperature": 0}}
        whole = client.messages.create(**fields)
        with client.messages.stream(**fields) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        assert text == whole.content[0].text
        assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
        count = client.messages.count_tokens(model="default", messages=ASK, system="Be brief.").input_tokens
        assert count == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)

    def test_a_tool_is_used_and_its_result_answered(self, client: anthropic.Anthropic) -> None:
        fields = {
            **self.FIELDS,
            "tools": [self.TOOL],
            "extra_body": {"temperature": 0},
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        }
        whole = client.messages.create(**fields)
        [use] = whole.content
        assert (whole.stop_reason, use.type, use.name) == ("tool_use", "tool_use", "weather")
        jsonschema.validate(use.input, SCHEMA)
        with client.messages.stream(**fields) as stream:
            assert stream.get_final_message().content[0].input == use.input
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "18 degrees, sunny"}
        messages = [*ASK, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
        again = client.messages.create(**{**self.FIELDS, "messages": messages, "max_tokens": 5}, tools=[self.TOOL])
        assert again.usage.output_tokens <= 5

    def test_structured_output(self, client: anthropic.Anthropic) -> None:
        form = {"format": {"type": "json_schema", "schema": SCHEMA}}
        answer = client.messages.create(**self.FIELDS, output_config=form)
        jsonschema.validate(json.loads(answer.content[0].text), SCHEMA)


class TestResponses:
    """OpenAI's client."""

    TOOL: Any = {
        "type": "function",
        "name": "weather",
        "description": "Tells the weather of a city.",
        "parameters": SCHEMA,
        "strict": True,
    }
    FIELDS: Any = {"model": "default", "max_output_tokens": 200, "input": ASK[0]["content"], "temperature": 0}

    def test_a_stream_adds_up_to_the_whole_answer(self, client: OpenAI) -> None:
        fields = {**self.FIELDS, "max_output_tokens": 30, "instructions": "Be brief."}
        whole = client.responses.create(**fields)
        events = list(client.responses.create(**fields, stream=True))
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert text == whole.output_text == events[-1].response.output_text
        assert events[-1].type == f"response.{whole.status}"
        assert events[-1].response.usage.output_tokens == whole.usage.output_tokens

    def test_a_tool_is_called_and_its_result_answered(self, client: OpenAI) -> None:
        fields = {**self.FIELDS, "tools": [self.TOOL], "tool_choice": "required", "parallel_tool_calls": False}
        [call] = client.responses.create(**fields).output
        jsonschema.validate(json.loads(call.arguments), SCHEMA)
        with client.responses.stream(**fields) as stream:
            [streamed] = stream.get_final_response().output
        assert (streamed.name, streamed.arguments) == ("weather", call.arguments)
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees, sunny"}
        again = client.responses.create(
            **{**self.FIELDS, "input": [*ASK, call, result], "max_output_tokens": 5}, tools=[self.TOOL]
        )
        assert again.usage.output_tokens <= 5

    def test_structured_output(self, client: OpenAI) -> None:
        assert isinstance(client.responses.parse(**self.FIELDS, text_format=Place).output_parsed, Place)

    def test_in_the_background(self, client: OpenAI) -> None:
        fields = {**self.FIELDS, "max_output_tokens": 30}
        whole = client.responses.create(**fields)
        started = client.responses.create(**fields, background=True)
        events = list(client.responses.retrieve(started.id, stream=True))
        assert events[-1].response.output_text == whole.output_text
        kept = client.responses.retrieve(started.id)
        assert (kept.status, kept.output_text, kept.background) == (whole.status, whole.output_text, True)
        long = client.responses.create(**{**fields, "max_output_tokens": 2000}, background=True)
        assert client.responses.cancel(long.id).status == "cancelled"


class TestEmbeddings:
    """OpenAI's client."""

    TEXTS = ("A cat sat on the mat.", "The stock market fell by three per cent on Tuesday.", "x " * 150)

    def test_alone_together_and_beside_a_chat(self, client: OpenAI) -> None:
        fields: Any = {"model": "default", "messages": ASK, "max_tokens": 30, "temperature": 0}
        before = client.chat.completions.create(**fields).choices[0].message.content
        stream = client.chat.completions.create(**fields, stream=True)
        together = client.embeddings.create(model="default", input=list(self.TEXTS))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == before
        assert together.usage.prompt_tokens > 150 and len(together.data) == len(self.TEXTS)
        for text, one in zip(self.TEXTS, together.data, strict=True):
            alone = client.embeddings.create(model="default", input=text, encoding_format="float").data[0]
            assert one.embedding == pytest.approx(alone.embedding, abs=1e-4)
            assert sum(value**2 for value in one.embedding) == pytest.approx(1)
        cut = client.embeddings.create(model="default", input=self.TEXTS[0], dimensions=64).data[0].embedding
        assert len(cut) == 64 and sum(value**2 for value in cut) == pytest.approx(1)


class TestChats:
    """OpenAI's client: tools and structured output, streaming or not."""

    TOOL = pydantic_function_tool(Weather)
    CHAT: dict[str, Any] = {
        "model": "default",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 600,
        "temperature": 1,
    }

    @pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "Weather"}}])
    def test_forced_calls(self, client: OpenAI, choice: Any) -> None:
        for seed in range(3):
            completion = client.chat.completions.parse(
                **self.CHAT, tools=[self.TOOL], tool_choice=choice, seed=seed, parallel_tool_calls=False
            )
            message = completion.choices[0].message
            assert not message.content
            [call] = message.tool_calls or []
            assert isinstance(call.function.parsed_arguments, Weather)
            assert completion.choices[0].finish_reason == ("tool_calls" if choice == "required" else "stop")

    def test_streamed_calls_add_up_to_the_whole_ones(self, client: OpenAI) -> None:
        fields = {**self.CHAT, "tools": [self.TOOL], "tool_choice": "required", "parallel_tool_calls": False, "seed": 5}
        whole = client.chat.completions.create(**fields).choices[0].message.tool_calls[0].function
        name, arguments, pieces = "", "", 0
        for chunk in client.chat.completions.create(**fields, stream=True):
            for call in chunk.choices[0].delta.tool_calls or ():
                name += call.function.name or ""
                arguments += call.function.arguments
                pieces += 1
        assert (name, arguments) == (whole.name, whole.arguments)
        assert pieces > 3, "arguments stream"

    def test_structured_output(self, client: OpenAI) -> None:
        completion = client.chat.completions.parse(**self.CHAT, response_format=Answer, n=3, seed=1)
        assert all(isinstance(choice.message.parsed, Answer) for choice in completion.choices)
        fields = {
            **self.CHAT,
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

    def test_forms_in_completions_too(self, client: OpenAI) -> None:
        forms: list[tuple[dict[str, Any], str]] = [
            ({"guided_choice": ["red", "green"]}, "red|green"),
            ({"guided_regex": "[a-c]{3}"}, "[a-c]{3}"),
            ({"structured_outputs": {"grammar": 'root ::= "x" [0-9] | "y"'}}, "x[0-9]|y"),
        ]
        for extra, pattern in forms:
            completion = client.completions.create(model="default", prompt="It is", max_tokens=20, n=2, extra_body=extra)
            assert all(re.fullmatch(pattern, choice.text) for choice in completion.choices)

    def test_a_conversation_with_calls_and_results_goes_on(self, client: OpenAI) -> None:
        first = client.chat.completions.create(**self.CHAT, tools=[self.TOOL], tool_choice="required", parallel_tool_calls=False)
        message = first.choices[0].message
        messages = [
            *self.CHAT["messages"],
            message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"},
        ]
        second = client.chat.completions.create(**{**self.CHAT, "messages": messages, "max_tokens": 5}, tools=[self.TOOL])
        assert second.choices[0].finish_reason in ("stop", "length")
        assert second.usage.prompt_tokens > first.usage.prompt_tokens
