"""Budgets of thinking over HTTP, in the words of each API, with an engine that answers from a script."""

from __future__ import annotations

import json

import pytest
from tokenizers import AddedToken, Tokenizer

from tandem.config.settings import ModelSettings
from tandem.protocol.thinking import ThinkingBudget, ThinkingTokens
from tandem.testing import CHAT_TEMPLATE, write_tokenizer

OPEN, CLOSE, CALL = 512, 513, 514
HELLO = [{"role": "user", "content": "hi"}]
THINKS = CHAT_TEMPLATE + "{# </think> #}{% if add_generation_prompt %}<think>\n{% endif %}"
TOKENS = ThinkingTokens((OPEN,), (CLOSE,), begun=True)
HEADER = "x-tandem-ignored-fields"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """A model whose tags around reasoning are tokens of its own."""
    path = tmp_path_factory.mktemp("thinks")
    write_tokenizer(path)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_special_tokens(
        [AddedToken(tag, special=True, normalized=False) for tag in ("<think>", "</think>", "<tool_call>")]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture
def thinking(serve, engine, tmp_path):
    """A server of a model with this template, which thinks for four tokens."""

    def start(template=THINKS, says="abcd</think>Hello", **server):
        file = tmp_path / "template.jinja"
        file.write_text(template)
        engine.reply = engine.tokenizer.encode(says)
        engine.set_status(max_context=4096, vocab_size=520)
        return serve(model=ModelSettings(model="org/tiny", served_name=("tiny",), chat_template=str(file)), **server)

    return start


def budget_in(engine):
    return list(engine.submitted.values())[-1].params.thinking


def fault(response):
    assert response.status_code == 400, response.text
    return response.json()["error"]


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({"reasoning": {"max_tokens": 30}}, 30),
        ({"thinking": {"type": "enabled", "budget_tokens": 31}}, 31),
        ({"thinking_token_budget": 32}, 32),
        ({"reasoning_budget": 33}, 33),
        ({"reasoning_budget_tokens": 34}, 34),
        ({"thinking_budget_tokens": 35}, 35),
        ({"thinking_budget": 36}, 36),
        ({"thinking_budget": 0}, 0),
        ({"reasoning_effort": "none"}, 0),
        ({"enable_thinking": False}, 0),
        ({"thinking": {"type": "disabled"}}, 0),
        ({"thinking_token_budget": 37, "thinking_budget": 37, "reasoning": {"max_tokens": 37}}, 37),
        ({"reasoning_budget": -1}, None),
        ({}, None),
        ({"thinking_budget": 100, "max_tokens": 100}, 100),
        # Words for an effort are shares of the output limit, as the template does not read them.
        ({"reasoning_effort": "low", "max_tokens": 100}, 20),
        ({"reasoning": {"effort": "high"}, "max_tokens": 50}, 40),
        ({"reasoning_effort": "max", "max_tokens": 100}, None),
        ({"reasoning_effort": "low", "thinking_budget": 9}, 9),
    ],
)
def test_each_field_of_a_chat_reaches_the_sampler(thinking, engine, fields, limit):
    response = thinking().chat(**fields)
    assert response.status_code == 200, response.text
    assert HEADER not in response.headers
    assert budget_in(engine) == (None if limit is None else ThinkingBudget(limit, TOKENS))


def test_an_effort_is_a_share_of_the_servers_budget_and_the_sentence_is_tokens(thinking, engine):
    server = thinking(thinking_budget=200, thinking_message="So:")
    assert server.chat().status_code == 200
    assert budget_in(engine) == ThinkingBudget(200, TOKENS, tuple(engine.tokenizer.encode("So:", False)))
    server.chat(reasoning_effort="medium", max_tokens=20, reasoning_budget_message="Now")
    assert budget_in(engine) == ThinkingBudget(100, TOKENS, tuple(engine.tokenizer.encode("Now", False)))
    server.chat(reasoning_budget=-1)
    assert budget_in(engine) is None
    server.chat(thinking_budget=7, reasoning_effort="low")
    assert budget_in(engine).limit == 7


def test_an_effort_is_a_share_of_what_the_context_leaves(thinking, engine):
    server = thinking()
    for fields in ({}, {"max_tokens": 100_000}):
        server.chat(reasoning_effort="medium", **fields)
        assert budget_in(engine).limit == (4096 - len(list(engine.submitted.values())[-1].prompt)) // 2


def test_an_effort_that_the_template_reads_is_left_to_the_model(thinking, engine):
    server = thinking(THINKS + "{# #}{{ reasoning_effort }}")
    server.chat(reasoning_effort="low", max_tokens=100)
    assert budget_in(engine) is None


def test_a_budget_of_nothing_switches_thinking_off_where_the_template_can(thinking, engine):
    server = thinking(CHAT_TEMPLATE + "{# </think> #}[{{ enable_thinking }}|{{ thinking_budget }}]")
    server.chat(thinking_budget=0)
    prompt = engine.tokenizer.decode(list(engine.submitted.values())[-1].prompt)
    assert prompt.endswith("[False|0]")
    assert budget_in(engine).tokens == ThinkingTokens((OPEN,), (CLOSE,))
    server.chat(thinking_budget=5)
    assert engine.tokenizer.decode(list(engine.submitted.values())[-1].prompt).endswith("[|5]")


def test_other_tokens_that_end_reasoning_reach_the_sampler(thinking, engine):
    server = thinking("{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}" + THINKS)
    tool = {"type": "function", "function": {"name": "now"}}
    assert server.chat(thinking_budget=5, tools=[tool]).status_code == 200
    assert budget_in(engine).tokens == ThinkingTokens((OPEN,), (CLOSE,), (CALL,), begun=True)


@pytest.mark.parametrize("stream", [False, True])
def test_usage_tells_how_many_tokens_were_reasoning(thinking, engine, stream):
    server, thought = thinking(), len(engine.tokenizer.encode("abcd"))
    with server.openai() as client:
        if stream:
            *_, last = client.chat.completions.create(
                model="tiny", messages=HELLO, stream=True, stream_options={"include_usage": True}
            )
        else:
            last = client.chat.completions.create(model="tiny", messages=HELLO, n=2)
        times = 1 if stream else 2
        assert last.usage.completion_tokens_details.reasoning_tokens == thought * times
        assert last.usage.completion_tokens == (len(engine.reply) + 1) * times
        response = client.responses.create(model="tiny", input="hi")
        assert response.usage.output_tokens_details.reasoning_tokens == thought
    hidden = server.chat(include_reasoning=False).json()
    assert "reasoning_content" not in hidden["choices"][0]["message"]
    assert hidden["usage"]["completion_tokens_details"] == {"reasoning_tokens": thought}


def test_anthropic_and_responses_have_their_own_fields(thinking, engine):
    server = thinking()
    body = {"model": "tiny", "max_tokens": 100, "messages": HELLO}
    sent = server.http.post("/v1/messages", json={**body, "thinking": {"type": "enabled", "budget_tokens": 64}})
    assert (sent.status_code, budget_in(engine).limit) == (200, 64)
    thought = {"thinking_tokens": len(engine.tokenizer.encode("abcd"))}
    assert sent.json()["usage"]["output_tokens_details"] == thought
    *_, end, _ = server.http.post("/v1/messages", json={**body, "stream": True}).text.strip().split("\n\n")
    assert json.loads(end.partition("data: ")[2])["usage"]["output_tokens_details"] == thought
    body["thinking"] = {"type": "enabled", "budget_tokens": 101}
    error = fault(server.http.post("/v1/messages", json=body))
    assert "'thinking.budget_tokens' (101) must not be more than the output limit (100)" in error["message"]
    sent = server.http.post("/v1/messages", json={**body, "thinking": None, "output_config": {"effort": "low"}})
    assert (sent.status_code, budget_in(engine).limit) == (200, 20)
    sent = server.http.post("/v1/responses", json={"input": "hi", "reasoning": {"max_tokens": 12}})
    assert (sent.status_code, budget_in(engine).limit) == (200, 12)
    assert "max_tokens" not in sent.json()["reasoning"]
    sent = server.http.post("/v1/responses", json={"input": "hi", "max_output_tokens": 50, "reasoning": {"effort": "minimal"}})
    assert (sent.status_code, budget_in(engine).limit) == (200, 5)
    error = fault(
        server.http.post("/v1/responses", json={"input": "hi", "max_output_tokens": 50, "reasoning": {"max_tokens": 51}})
    )
    assert error["param"] == "reasoning.max_tokens"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"thinking_token_budget": -1}, "thinking_token_budget", "greater than or equal to 0"),
        ({"reasoning_budget": -2}, "reasoning_budget", "greater than or equal to -1"),
        ({"thinking": {"type": "enabled", "budget_tokens": -5}}, "thinking.budget_tokens", "greater than"),
        ({"reasoning": {"max_tokens": 2**70}}, "reasoning.max_tokens", "less than or equal to"),
        ({"thinking_budget": 2.5}, "thinking_budget", "integer"),
        ({"thinking_budget": 51, "max_tokens": 50}, "thinking_budget", "must not be more than the output limit (50)"),
        ({"reasoning": {"max_tokens": 5}, "thinking_budget": 6}, "reasoning.max_tokens", "contradicts 'thinking_budget'"),
    ],
)
def test_bad_budgets_are_named(thinking, fields, param, words):
    error = fault(thinking().chat(**fields))
    assert (error["param"], words in error["message"]) == (param, True)


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, "{# [/THINK] #}" + CHAT_TEMPLATE], ids=["none", "text"])
def test_a_model_without_tokens_around_reasoning_has_no_budget(thinking, engine, template):
    server = thinking(template, says="Hello", thinking_budget=50)
    error = fault(server.chat(reasoning_budget=20))
    assert (error["param"], "does not think" in error["message"]) == ("reasoning_budget", True)
    assert server.chat(reasoning_budget=0).status_code == server.chat().status_code == 200
    assert budget_in(engine) is None
    # Agents send it to every model.
    sent = server.http.post(
        "/v1/messages",
        json={"model": "tiny", "max_tokens": 100, "messages": HELLO, "thinking": {"type": "enabled", "budget_tokens": 64}},
    )
    assert (sent.status_code, sent.headers[HEADER]) == (200, "thinking.budget_tokens")


@pytest.mark.parametrize(
    ("prompt", "begun"),
    [
        ("hi", False),
        ("hi<think>so", True),
        ("hi<think>so</think>", False),
        ("<think>a</think>b<think>c", True),
        ([5, OPEN, 6], True),
    ],
)
def test_a_budget_of_a_completion_counts_from_an_open_tag_of_the_prompt(thinking, engine, prompt, begun):
    server = thinking(thinking_message="So:", thinking_budget=99)
    fields = {"prompt": prompt, "max_tokens": 50}
    message = tuple(engine.tokenizer.encode("Now", False))
    sent = server.http.post(
        "/v1/completions", json={**fields, "thinking_token_budget": 9, "reasoning_budget_message": "Now", "n": 2}
    )
    assert sent.status_code == 200, sent.text
    asked = [request.params.thinking for request in engine.submitted.values()]
    assert asked == [ThinkingBudget(9, ThinkingTokens((OPEN,), (CLOSE,), begun=begun), message)] * 2
    server.http.post("/v1/completions", json=fields)
    assert budget_in(engine) is None, "the server's budget is for chats"
    error = fault(server.http.post("/v1/completions", json={**fields, "thinking_budget": 51}))
    assert (error["param"], "output limit (50)" in error["message"]) == ("thinking_budget", True)
    server = thinking(CHAT_TEMPLATE)
    error = fault(server.http.post("/v1/completions", json={**fields, "reasoning_budget": 5}))
    assert (error["param"], "does not think" in error["message"]) == ("reasoning_budget", True)


def test_forced_forms_and_budgets_go_together(thinking, engine):
    server = thinking(says='ab</think>{"a": 1}')
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    sent = server.chat(response_format=schema, thinking_budget=20)
    assert json.loads(sent.json()["choices"][0]["message"]["content"]) == {"a": 1}
    assert budget_in(engine).limit == 20
