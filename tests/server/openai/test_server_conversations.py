"""Conversations that are kept by their ids: what the model sees when a request with an id comes back."""

from __future__ import annotations

import json

import pytest

from tandem.config.settings import ModelSettings
from tandem.server.chats import conversations
from tandem.server.chats.conversations import Conversations


def user(text):
    return {"role": "user", "content": text}


def said(text):
    return {"role": "assistant", "content": text}


def told(engine):
    """The prompt of the request that came last, as text."""
    return engine.tokenizer.decode(engine.last.prompt, skip_special_tokens=False)


@pytest.fixture
def asked(engine):
    """The prompt that messages come to, as text."""

    def render(*messages):
        return engine.tokenizer.decode(engine.tokenizer.render_chat(list(messages)), skip_special_tokens=False)

    return render


def test_a_conversation_goes_on_where_it_ended(serve, engine, asked):
    server = serve(keep_conversations=60.0)
    answer = said(engine.text())
    first = server.chat(messages=[user("one")], conversation_id="c").json()
    assert (first["conversation_id"], first["conversation_messages"]) == ("c", 0)
    assert told(engine) == asked(user("one"))
    second = server.chat(messages=[user("two")], conversation_id="c").json()
    assert second["conversation_messages"] == 2
    assert told(engine) == asked(user("one"), answer, user("two"))

    # A stream takes part, and instructions take the place of those before.
    lines = server.chat(messages=[user("three")], conversation_id="c", stream=True).text.split("\n\n")
    assert json.loads(lines[0].removeprefix("data: "))["conversation_messages"] == 4
    system = {"role": "system", "content": "Be brief."}
    server.chat(messages=[system, user("four")], conversation_id="c")
    past = [user("one"), answer, user("two"), answer, user("three"), answer]
    assert told(engine) == asked(system, *past, user("four"))

    # Whoever sends the answers too sends all of it.
    history = [user("un"), said("deux"), user("trois")]
    assert server.chat(messages=history, conversation_id="c").json()["conversation_messages"] == 0
    assert told(engine) == asked(*history)
    server.chat(messages=[user("quatre")], conversation_id="c")
    assert told(engine) == asked(*history, answer, user("quatre"))

    # An id that was made up here can be gone on from as well; another one is another conversation.
    made = server.chat(messages=[user("a")]).json()["conversation_id"]
    assert server.chat(messages=[user("b")], conversation_id=made).json()["conversation_messages"] == 2
    assert server.chat(messages=[user("b")], conversation_id="d").json()["conversation_messages"] == 0


def test_what_fails_is_not_said(serve, engine):
    server = serve(keep_conversations=60.0)
    server.chat(messages=[user("one")], conversation_id="c")
    refused = server.chat(messages=[user("word " * 400)], conversation_id="c")
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert server.chat(messages=[user("two")], conversation_id="c").json()["conversation_messages"] == 2


def test_calls_are_part_of_it(serve, engine, tmp_path):
    path = tmp_path / "template.jinja"
    path.write_text(
        "{{ tools }}{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}"
        "<{{ c.function.name }} {{ c.id }}>{% endfor %}{% endfor %}"
    )
    engine.set_status(max_context=4096)
    engine.reply = engine.tokenizer.encode('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>')
    server = serve(
        model=ModelSettings(model="org/tiny", served_name=("tiny",), chat_template=str(path)),
        keep_conversations=60.0,
        tool_parser="hermes",
    )
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    for stream in (False, True):
        name = f"c{stream}"
        text = server.chat(messages=[user("one")], conversation_id=name, tools=[tool], stream=stream).text
        call_id = text.split('"id":"call_')[1].split('"')[0]
        result = {"role": "tool", "tool_call_id": f"call_{call_id}", "content": "2"}
        answer = server.chat(messages=[result], conversation_id=name, tools=[tool])
        assert answer.status_code == 200, answer.text
        assert f"user: oneassistant: <add call_{call_id}>tool: 2" in told(engine)


def test_each_key_has_its_own(serve, engine, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("first\nsecond\n")
    keys.chmod(0o600)
    server = serve(keep_conversations=60.0, api_key_file=str(keys))

    def ask(key):
        body = {"messages": [user("hi")], "conversation_id": "c"}
        answer = server.http.post("/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"})
        return answer.json()["conversation_messages"]

    assert [ask(key) for key in ("first", "first", "second", "first")] == [0, 2, 0, 4]


def test_a_conversation_does_not_outgrow_a_body(serve, engine):
    engine.set_status(max_context=100_000)
    server = serve(keep_conversations=60.0, max_body_mb=0.01)
    assert server.chat(messages=[user("x" * 6000)], conversation_id="c").status_code == 200
    refused = server.chat(messages=[user("y" * 6000)], conversation_id="c")
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "conversation_id"
    assert "begin another 'conversation_id'" in refused.json()["error"]["message"]


def test_the_journal_takes_no_part(serve, engine, tmp_path):
    server = serve(keep_conversations=60.0, journal=str(tmp_path / "journal"))
    server.chat(messages=[user("one")], conversation_id="c")
    body = {"messages": [user("two")], "conversation_id": "c"}
    answer = server.http.post("/v1/chat/completions", json=body, headers={"Idempotency-Key": "k"})
    assert answer.json()["conversation_id"] == "c" and "conversation_messages" not in answer.json()
    assert server.chat(messages=[user("three")], conversation_id="c").json()["conversation_messages"] == 2


def test_without_the_setting_nothing_is_kept(server, engine, asked):
    for _ in range(2):
        assert "conversation_messages" not in server.chat(messages=[user("one")], conversation_id="c").json()
        assert told(engine) == asked(user("one"))


def test_time_number_and_bytes_are_bounded(monkeypatch):
    now = 0.0
    kept = Conversations(10.0, lambda: now)
    kept.put(("a", "1"), b"[1]", carried=True)
    now = 9.0
    kept.put(("a", "2"), b"[2]", carried=True)
    assert kept.get(("a", "1")) == b"[1]"
    now = 10.0
    assert (kept.get(("a", "1")), kept.get(("a", "2")), kept.get(("b", "2"))) == (None, b"[2]", None)

    monkeypatch.setattr(conversations, "MOST", 3)
    for name in ("3", "4"):
        kept.put(("a", name), b"[]", carried=name == "3")
    kept.put(("b", "1"), b"[]", carried=True)  # of the client that has most one goes whose id nobody has sent
    assert [kept.get(name) is not None for name in (("a", "2"), ("a", "3"), ("a", "4"), ("b", "1"))] == [True, True, False, True]
    monkeypatch.setattr(conversations, "MOST_BYTES", 3000)
    kept.put(("b", "2"), b"x" * 1500, carried=True)
    assert [kept.get(name) is not None for name in (("a", "2"), ("a", "3"), ("b", "1"), ("b", "2"))] == [False, True, True, True]
    kept.put(("b", "2"), b"x" * 5000, carried=True)
    assert kept.get(("b", "2")) is None and kept.get(("a", "3")) is not None
