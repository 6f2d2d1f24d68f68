"""Ask a server for everything with one of the official libraries, which then checks the shape of each answer.

usage: python strict.py openai|anthropic URL

The library comes from the interpreter's path, so that several versions can be tried. It prints its version and the calls
that it made; an answer that does not have the library's types ends it with a traceback.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

TOOL = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}
HELLO: list[Any] = [{"role": "user", "content": "Name a colour."}]
PNG = "iVBORw0KGgoAAAANSUhEUgAAABgAAAAQCAIAAACDRijCAAAAHElEQVR4nGM8ISfHQA3ARBVTRg0aNWjUoBFsEADurgEkli4RWAAAAABJRU5ErkJggg=="
"""A red picture."""
URL = f"data:image/png;base64,{PNG}"
LINE = json.dumps({"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": HELLO}})


def with_openai(url: str) -> list[str]:
    """Call every route of OpenAI's library that the server has, but `completions` in streams and with echoed log
    probabilities: there the library's own types are narrower than what the service sends."""
    import openai

    client: Any = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, _strict_response_validation=True)
    chat: dict[str, Any] = {"model": "default", "messages": HELLO, "max_tokens": 4}
    named = {"type": "function", "function": {"name": "weather", "parameters": TOOL}}
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": TOOL}}
    ask: dict[str, Any] = {"model": "default", "input": "Name a colour.", "max_output_tokens": 4}
    tool = {"type": "function", "name": "weather", "parameters": TOOL, "strict": False}
    done = []

    def did(name: str, answer: Any) -> Any:
        assert answer is not None
        done.append(name)
        return answer

    models = did("models.list", list(client.models.list()))
    did("models.retrieve", client.models.retrieve(models[0].id))
    blind = did("chat", client.chat.completions.create(**chat, n=2, logprobs=True, top_logprobs=2))
    did("chat stream", list(client.chat.completions.create(**chat, stream=True, stream_options={"include_usage": True})))
    called = client.chat.completions.create(**{**chat, "max_tokens": 60}, tools=[named], tool_choice="required")
    assert did("chat tools", called).choices[0].message.tool_calls[0].function.name == "weather"
    did("chat tools stream", list(client.chat.completions.create(**chat, tools=[named], tool_choice="required", stream=True)))
    did("chat form", client.chat.completions.create(**{**chat, "max_tokens": 60}, response_format=form))
    did("completions", client.completions.create(model="default", prompt="A", max_tokens=4, logprobs=1))
    did("embeddings", client.embeddings.create(model="default", input=["A", "B"], encoding_format="float"))
    first = did("responses", client.responses.create(**ask))
    events = did("responses stream", list(client.responses.create(**ask, stream=True, tools=[tool])))
    assert events[-1].response.id != first.id
    did("responses tools", client.responses.create(**{**ask, "max_output_tokens": 60}, tools=[tool], tool_choice="required"))
    did("responses.retrieve", client.responses.retrieve(first.id))
    did("responses.input_items", list(client.responses.input_items.list(first.id)))
    did("previous_response_id", client.responses.create(**ask, previous_response_id=first.id))
    reference = {"type": "item_reference", "id": first.output[0].id}
    did("item_reference", client.responses.create(**{**ask, "input": [*HELLO, reference, *HELLO]}))
    shown = {"type": "image_url", "image_url": {"url": URL, "detail": "low"}}
    asked = [{"role": "user", "content": [{"type": "text", "text": HELLO[0]["content"]}, shown]}]
    seen = did("chat picture", client.chat.completions.create(**{**chat, "messages": asked}))
    assert seen.usage.prompt_tokens > blind.usage.prompt_tokens
    shown = {"type": "input_image", "image_url": URL, "detail": "auto"}
    asked = [{"role": "user", "content": [shown, {"type": "input_text", "text": "Which colour?"}]}]
    seen = did("responses picture", client.responses.create(**{**ask, "input": asked}))
    did("responses picture again", client.responses.create(**ask, previous_response_id=seen.id))
    later = did("background", client.responses.create(**ask, background=True))
    while client.responses.retrieve(later.id).status in ("queued", "in_progress"):
        time.sleep(0.1)
    did("responses.cancel", client.responses.cancel(later.id))
    client.responses.delete(did("responses.delete", later).id)
    file = did("files.create", client.files.create(file=("a.jsonl", LINE.encode()), purpose="batch"))
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    while did("batches.retrieve", client.batches.retrieve(batch.id)).status not in ("completed", "failed"):
        time.sleep(0.1)
    did("batches.list", [*client.batches.list(), *client.files.list()])
    did("files.delete", client.files.delete(file.id))
    for wrong in ({"model": "other"}, {"temperature": 9}):
        try:
            client.chat.completions.create(**{**chat, **wrong})
        except openai.APIStatusError as error:
            did(f"error {error.status_code}", error.request_id)
    return [f"openai {openai.__version__}", *dict.fromkeys(done)]


def with_anthropic(url: str) -> list[str]:
    """Call every route of Anthropic's library that the server has."""
    import anthropic

    client: Any = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, _strict_response_validation=True)
    ask: dict[str, Any] = {"model": "default", "max_tokens": 60, "messages": HELLO}
    tool = {"name": "weather", "input_schema": TOOL}
    done = []

    def did(name: str, answer: Any) -> Any:
        assert answer is not None
        done.append(name)
        return answer

    did("models.list", list(client.models.list()))
    did("models.retrieve", client.models.retrieve("default"))
    did("count_tokens", client.messages.count_tokens(model="default", messages=HELLO))
    did("messages", client.messages.create(**ask, thinking={"type": "enabled", "budget_tokens": 20}))
    events = did("messages stream", list(client.messages.create(**ask, stream=True)))
    assert events[-1].type == "message_stop"
    with client.messages.stream(**ask) as stream:
        did("messages helper", stream.get_final_message())
    called = did("messages tools", client.messages.create(**ask, tools=[tool], tool_choice={"type": "any"}))
    assert called.content[0].name == "weather"
    result = {"type": "tool_result", "tool_use_id": called.content[0].id, "content": "sunny"}
    talk = [*HELLO, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
    did("tool result", client.messages.create(**{**ask, "messages": talk}, tools=[tool]))
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}
    did("picture", client.messages.create(**{**ask, "messages": [{"role": "user", "content": [image]}]}))
    counts = []
    for content in ("sunny", [{"type": "text", "text": "sunny"}, image]):
        talk[-1] = {"role": "user", "content": [{**result, "content": content}]}
        counts.append(client.messages.count_tokens(model="default", messages=talk).input_tokens)
    did("tool result picture", client.messages.create(**{**ask, "messages": talk}, tools=[tool]))
    assert counts[1] > counts[0]
    try:
        client.messages.create(**{**ask, "model": "other"})
    except anthropic.NotFoundError as error:
        did("error 404", error.request_id)
    return [f"anthropic {anthropic.__version__}", *done]


if __name__ == "__main__":
    print(*(with_openai if sys.argv[1] == "openai" else with_anthropic)(sys.argv[2]), sep="\n")
