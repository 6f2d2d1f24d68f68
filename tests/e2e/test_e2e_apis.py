"""The official clients drive other APIs of `tandem serve`: a tiny model in two stages, and over two ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import jsonschema
import pytest
from openai import OpenAI
from pydantic import BaseModel, ConfigDict, Field

from served import served
from tandem.testing import tiny_model

pytestmark = pytest.mark.slow
LAYOUTS = {"pp 2": ("--pipeline-parallel-size", "2"), "tp 2": ("--tensor-parallel-size", "2")}
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


@pytest.fixture(scope="module", params=LAYOUTS)
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("server")
    model = tiny_model(directory / "model", config=LONG)
    with served(str(model), *LAYOUTS[request.param], "--journal", str(directory / "journal")) as address:
        yield address


@pytest.fixture
def openai_client(url: str) -> Iterator[OpenAI]:
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

    def test_a_stream_adds_up_to_the_whole_answer(self, openai_client: OpenAI) -> None:
        fields = {**self.FIELDS, "max_output_tokens": 30, "instructions": "Be brief."}
        whole = openai_client.responses.create(**fields)
        events = list(openai_client.responses.create(**fields, stream=True))
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert text == whole.output_text == events[-1].response.output_text
        assert events[-1].type == f"response.{whole.status}"
        assert events[-1].response.usage.output_tokens == whole.usage.output_tokens

    def test_a_tool_is_called_and_its_result_answered(self, openai_client: OpenAI) -> None:
        fields = {**self.FIELDS, "tools": [self.TOOL], "tool_choice": "required", "parallel_tool_calls": False}
        [call] = openai_client.responses.create(**fields).output
        jsonschema.validate(json.loads(call.arguments), SCHEMA)
        with openai_client.responses.stream(**fields) as stream:
            [streamed] = stream.get_final_response().output
        assert (streamed.name, streamed.arguments) == ("weather", call.arguments)
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees, sunny"}
        again = openai_client.responses.create(
            **{**self.FIELDS, "input": [*ASK, call, result], "max_output_tokens": 5}, tools=[self.TOOL]
        )
        assert again.usage.output_tokens <= 5

    def test_structured_output(self, openai_client: OpenAI) -> None:
        assert isinstance(openai_client.responses.parse(**self.FIELDS, text_format=Place).output_parsed, Place)

    def test_in_the_background(self, openai_client: OpenAI) -> None:
        fields = {**self.FIELDS, "max_output_tokens": 30}
        whole = openai_client.responses.create(**fields)
        started = openai_client.responses.create(**fields, background=True)
        events = list(openai_client.responses.retrieve(started.id, stream=True))
        assert events[-1].response.output_text == whole.output_text
        kept = openai_client.responses.retrieve(started.id)
        assert (kept.status, kept.output_text, kept.background) == (whole.status, whole.output_text, True)
        long = openai_client.responses.create(**{**fields, "max_output_tokens": 2000}, background=True)
        assert openai_client.responses.cancel(long.id).status == "cancelled"


class TestEmbeddings:
    """OpenAI's client."""

    TEXTS = ("A cat sat on the mat.", "The stock market fell by three per cent on Tuesday.", "x " * 150)

    def test_alone_together_and_beside_a_chat(self, openai_client: OpenAI) -> None:
        fields: Any = {"model": "default", "messages": ASK, "max_tokens": 30, "temperature": 0}
        before = openai_client.chat.completions.create(**fields).choices[0].message.content
        stream = openai_client.chat.completions.create(**fields, stream=True)
        together = openai_client.embeddings.create(model="default", input=list(self.TEXTS))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == before
        assert together.usage.prompt_tokens > 150 and len(together.data) == len(self.TEXTS)
        for text, one in zip(self.TEXTS, together.data, strict=True):
            alone = openai_client.embeddings.create(model="default", input=text, encoding_format="float").data[0]
            assert one.embedding == pytest.approx(alone.embedding, abs=1e-4)
            assert sum(value**2 for value in one.embedding) == pytest.approx(1)
        cut = openai_client.embeddings.create(model="default", input=self.TEXTS[0], dimensions=64).data[0].embedding
        assert len(cut) == 64 and sum(value**2 for value in cut) == pytest.approx(1)
