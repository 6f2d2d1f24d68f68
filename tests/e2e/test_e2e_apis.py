"""Anthropic's official client drives `tandem serve` of the demo model in two stages: the API's other face, for real."""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import anthropic
import jsonschema
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.demo]
SCHEMA = {"type": "object", "additionalProperties": False, "required": ["city", "unit"], "properties": {
    "city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["C", "F"]}}}
ASK: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    command = [sys.executable, "-m", "tandem", "serve", "demo", "--pipeline-parallel-size", "2", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                               env={**os.environ, "OPENBLAS_NUM_THREADS": "1"})
    try:
        assert process.stdout is not None
        readable, _, _ = select.select([process.stdout], [], [], 300)
        line = process.stdout.readline() if readable else ""
        ready = re.search(r"Tandem is ready: (\S+)", line)
        assert ready, f"not ready: {line!r}"
        yield ready[1]
    finally:
        process.terminate()
        process.communicate(timeout=60)


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
        fields = {**self.FIELDS, "tools": [self.TOOL], "extra_body": {"temperature": 0},
                  "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
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
