"""Tools and reasoning over HTTP, with an engine that answers from a script in the words of each family."""

from __future__ import annotations

import json

import pytest

from tandem.config.settings import ModelSettings
from tandem.testing import CHAT_TEMPLATE

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
ASK = [{"role": "user", "content": "Weather in Paris?"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TEMPLATES = {
    "hermes": "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}" + CHAT_TEMPLATE,
    "qwen3": "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}{# </think> #}" + CHAT_TEMPLATE,
    "thinks": "{# </think> #}" + CHAT_TEMPLATE + "<think>\n",
    "mistral": "{{ tools | tojson }}[TOOL_CALLS]" + CHAT_TEMPLATE,
    "llama3": '{{ tools | tojson }}<|start_header_id|>"parameters"' + CHAT_TEMPLATE,
    "harmony": "{{ tools | tojson }}{# <|channel|><|message|> #}" + CHAT_TEMPLATE,
    "glm": "{{ tools | tojson }}<arg_key><tool_call></think>" + CHAT_TEMPLATE,
    "kimi": "{{ tools | tojson }}<|tool_calls_section_begin|></think>" + CHAT_TEMPLATE,
    "minimax": "{{ tools | tojson }}<minimax:tool_call></think>" + CHAT_TEMPLATE + "<think>\n",
    "longcat": "{{ tools | tojson }}<longcat_tool_call></longcat_think>" + CHAT_TEMPLATE,
    "pythonic": "{{ tools | tojson }}<|tool_list_start|>" + CHAT_TEMPLATE,
}


@pytest.fixture
def family(serve, engine, tmp_path):
    """A server whose chat template is that of a family, and what its model says."""

    def start(name, says, **server):
        template = tmp_path / f"{name}.jinja"
        template.write_text(TEMPLATES[name])
        engine.reply = engine.tokenizer.encode(says)
        engine.set_status(max_context=4096)
        model = ModelSettings(model="org/tiny", served_name=("tiny",), chat_template=str(template))
        return serve(model=model, **server)

    return start


def streamed(server, **fields):
    """The message and finish_reason that a stream's deltas add up to, by the official client."""
    message = {"content": "", "reasoning_content": "", "tool_calls": []}
    finish = None
    with server.openai() as client:
        for chunk in client.chat.completions.create(model="tiny", stream=True, **fields):
            choice = chunk.choices[0]
            message["content"] += choice.delta.content or ""
            message["reasoning_content"] += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or ():
                if call.id:
                    assert call.index == len(message["tool_calls"])
                    message["tool_calls"].append([call.function.name, ""])
                message["tool_calls"][call.index][1] += call.function.arguments
            finish = choice.finish_reason or finish
    return message, finish


def whole(server, **fields):
    with server.openai() as client:
        choice = client.chat.completions.create(model="tiny", **fields).choices[0]
    calls = [[call.function.name, call.function.arguments] for call in choice.message.tool_calls or ()]
    assert len({call.id for call in choice.message.tool_calls or ()}) == len(calls)
    reasoning = getattr(choice.message, "reasoning_content", None) or ""
    return {"content": choice.message.content or "", "reasoning_content": reasoning, "tool_calls": calls}, choice.finish_reason


@pytest.mark.parametrize(
    ("name", "says", "content", "reasoning", "arguments"),
    [
        ("hermes", f"I'll look.\n{CALL}", "I'll look.", "", '{"city": "Paris"}'),
        ("qwen3", f"<think>\nHm, Paris.\n</think>\n\n{CALL}", "", "Hm, Paris.\n", '{"city": "Paris"}'),
        ("thinks", f"Hm.</think>{CALL}", "", "Hm.", '{"city": "Paris"}'),
        ("mistral", '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Paris"}}]', "", "", '{"city": "Paris"}'),
        ("llama3", '{"name": "weather", "parameters": {"city": "Paris"}}', "", "", '{"city": "Paris"}'),
        (
            "harmony",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.weather"
            '<|message|>{"city":"Paris"}',
            "",
            "Hm.",
            '{"city":"Paris"}',
        ),
        (
            "glm",
            "<think>Hm.</think><tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>",
            "",
            "Hm.",
            '{"city": "Paris"}',
        ),
        (
            "kimi",
            "<think>Hm.</think><|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
            '<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|><|tool_calls_section_end|>',
            "",
            "Hm.",
            '{"city": "Paris"}',
        ),
        (
            "minimax",
            'Hm.</think>Sure.<minimax:tool_call>\n<invoke name="weather">\n'
            '<parameter name="city">Paris</parameter>\n'
            "</invoke>\n</minimax:tool_call>",
            "Sure.",
            "Hm.",
            '{"city": "Paris"}',
        ),
        (
            "longcat",
            "<longcat_think>Hm.</longcat_think><longcat_tool_call>weather\n<longcat_arg_key>city</longcat_arg_key>"
            "\n<longcat_arg_value>Paris</longcat_arg_value>\n</longcat_tool_call>",
            "",
            "Hm.",
            '{"city": "Paris"}',
        ),
        ("pythonic", '<|tool_call_start|>[weather(city="Paris")]<|tool_call_end|>', "", "", '{"city": "Paris"}'),
    ],
)
def test_calls_and_reasoning_of_each_family(family, name, says, content, reasoning, arguments):
    server = family(name, says)
    fields = {"messages": ASK, "tools": [WEATHER, NOW]}
    expected = ({"content": content, "reasoning_content": reasoning, "tool_calls": [["weather", arguments]]}, "tool_calls")
    assert whole(server, **fields) == expected
    assert streamed(server, **fields) == expected


def test_the_id_that_the_model_gave_a_call_is_the_clients_too_unless_it_comes_twice(family):
    call = "<|tool_call_begin|>functions.now:7<|tool_call_argument_begin|>{}<|tool_call_end|>"
    server = family("kimi", call + call)
    with server.openai() as client:
        message = client.chat.completions.create(model="tiny", messages=ASK, tools=[NOW]).choices[0].message
    first, second = (call.id for call in message.tool_calls)
    assert first == "functions.now:7"
    assert second != first


@pytest.mark.parametrize("says", ["Just text.", "<tool_call>broken", "<tool_call>{}</tool_call> more", '{"a": 1}'])
def test_what_is_no_call_is_content(family, says):
    server = family("hermes", says)
    expected = ({"content": says, "reasoning_content": "", "tool_calls": []}, "stop")
    assert whole(server, messages=ASK, tools=[NOW]) == expected
    assert streamed(server, messages=ASK, tools=[NOW]) == expected


def test_without_tools_or_with_none_chosen_text_stays_text(family, engine):
    server = family("hermes", CALL)
    assert whole(server, messages=ASK)[0]["content"] == CALL
    engine.submitted.clear()
    assert whole(server, messages=ASK, tools=[NOW], tool_choice="none")[0]["content"] == CALL
    assert "now" not in prompt_of(engine)


def test_parsers_can_be_chosen(family):
    says = "<think>x</think>[TOOL_CALLS]now[ARGS]{}"
    server = family("hermes", says, tool_parser="mistral", reasoning_parser="think")
    message, _ = whole(server, messages=ASK, tools=[NOW])
    assert (message["reasoning_content"], message["tool_calls"]) == ("x", [["now", "{}"]])


def test_none_turns_them_off(family):
    server = family("qwen3", "<think>x</think>y", tool_parser="none", reasoning_parser="none")
    assert whole(server, messages=ASK)[0]["content"] == "<think>x</think>y"
    response = server.chat(tools=[NOW])
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools"


def prompt_of(engine):
    return engine.tokenizer.decode(next(iter(engine.submitted.values())).prompt, skip_special_tokens=False)


CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    *ASK,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}},
            {"id": "call_2", "type": "function", "function": {"name": "now", "arguments": ""}},
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "noon"}]},
]


def test_templates_get_tools_and_calls_as_they_expect(family, engine):
    template = (
        "{{ tools | tojson }}{% for m in messages %}[{{ m.role }}|{{ m.content }}|{{ m.tool_call_id }}|"
        "{% for c in m.tool_calls %}{{ c.function.name }} {{ c.function.arguments | tojson }};{% endfor %}]"
        "{% endfor %}<tool_call>"
    )
    TEMPLATES["echo"] = template
    server = family("echo", "ok")
    assert server.chat(messages=CONVERSATION, tools=[WEATHER, NOW]).status_code == 200
    assert prompt_of(engine) == (
        json.dumps([WEATHER, NOW]) + "[system|Be brief.||][user|Weather in Paris?||]"
        '[assistant|||weather {"city": "Paris"};now {};][tool|sunny|call_1|][tool|noon|call_2|]<tool_call>'
    )


def test_models_without_tools_in_their_template_are_told_in_words(serve, engine):
    engine.set_status(max_context=4096)
    server = serve()
    assert server.chat(messages=CONVERSATION, tools=[WEATHER, NOW]).status_code == 200
    prompt = prompt_of(engine)
    assert json.dumps(WEATHER) in prompt
    assert "Be brief." in prompt.split("<|im_end|>")[0]
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>' in prompt
    assert "<tool_response>\nsunny\n</tool_response>\n<tool_response>\nnoon\n</tool_response>" in prompt


@pytest.mark.parametrize("name", ["hermes", "mistral", "llama3", "harmony", "glm", "qwen3", "thinks"])
@pytest.mark.parametrize(
    ("choice", "asked"),
    [("required", {}), ({"type": "function", "function": {"name": "weather"}}, {}), ("auto", {"guided_regex": "x+"})],
)
def test_forced_calls_reach_the_engine_as_a_grammar_that_compiles(family, engine, name, choice, asked):
    server = family(name, "x")
    response = server.chat(messages=ASK, tools=[WEATHER, NOW], tool_choice=choice, **asked)
    assert response.status_code == 200, response.text
    grammar = next(iter(engine.submitted.values())).params.structured_outputs.grammar
    assert "weather" in grammar
    assert ("now" in grammar) == isinstance(choice, str)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tool_choice": "required"}, "tool_choice", "needs 'tools'"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}, "tools": [NOW]}, "tool_choice", "no tool 'x'"),
        ({"tool_choice": "any", "tools": [NOW]}, "tool_choice", "expected"),
        ({"tool_choice": {"type": "allowed_tools"}, "tools": [NOW]}, "tool_choice", "expected"),
        ({"tools": [NOW, NOW]}, "tools", "two tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "pattern"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "object", "not": {}}}}],
                "tool_choice": "required",
            },
            "tools",
            "not",
        ),
        ({"tools": [NOW], "tool_choice": "required", "guided_regex": "a"}, "guided_regex", "contradicts"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0]", "tool_call_id"),
        (
            {
                "messages": [
                    {"role": "user", "content": "x", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "a"}}]}
                ]
            },
            "messages[0]",
            "assistant",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages[0].tool_calls[0].function", "Missing"),
    ],
    ids=str,
)
def test_what_cannot_be_is_a_400_naming_field_and_reason(shared, fields, param, words):
    response = shared.chat(**fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert words in error["message"]


def test_log_probabilities_come_with_calls(family):
    server = family("hermes", CALL)
    chunks = [
        json.loads(line.removeprefix("data: "))
        for line in server.chat(messages=ASK, tools=[WEATHER], stream=True, logprobs=True).text.split("\n\n")
        if line.startswith("data: {")
    ]
    entries = [entry for chunk in chunks for entry in (chunk["choices"][0]["logprobs"] or {}).get("content", ())]
    assert "".join(entry["token"] for entry in entries) == CALL
