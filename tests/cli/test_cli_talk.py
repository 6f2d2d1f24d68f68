"""`tandem chat` and `generate` as a person has them: on a terminal, against a running server and by themselves."""

from __future__ import annotations

import io
import json
import os
import pty
import sys
import termios
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from rich.console import Console

from cli.terminal import Terminal
from served import served
from tandem.cli.main import build_parser, main
from tandem.cli.options.sampling import asked_of
from tandem.cli.talk import talk as command
from tandem.cli.talk.backends import LocalModel, RemoteModel, Speed
from tandem.cli.talk.conversation import Conversation, Quit
from tandem.cli.talk.line_editor import Interrupts, make_prompt, unquoted
from tandem.cli.talk.talk import unechoed
from tandem.errors import RequestError, UsageError
from tandem.protocol.request import SamplingDefaults
from tandem.supervision.record import Background, Record
from tandem.system.http_client import ServerClient
from tandem.testing import tiny_model

KEYS = ("--ignore-eos", "--max-tokens", "50000")


class Echo:
    name, where, can_chat, can_see = "echo", "loaded here", True, True


@pytest.fixture
def talk():
    def other(name):
        raise UsageError(f"no {name}")

    return Conversation(Echo(), {}, other)


def test_what_is_typed_while_an_answer_comes_does_not_show_and_an_error_of_the_answer_is_not_lost(monkeypatch):
    master, end = pty.openpty()

    def shows():
        return bool(termios.tcgetattr(end)[3] & termios.ECHO)

    def answer():
        with unechoed():
            assert not shows()
            raise BrokenPipeError

    with os.fdopen(end) as stdin, os.fdopen(master):
        monkeypatch.setattr(sys, "stdin", stdin)
        with pytest.raises(BrokenPipeError):
            answer()
        assert shows()
    with unechoed():  # no terminal
        pass


def test_a_conversation_is_saved_and_loaded(talk, tmp_path):
    talk.command("/set system Be short.")  # as in Ollama
    talk.ask("hello")
    talk.said.append({"role": "assistant", "content": "hi"})
    assert talk.command(f"/save {tmp_path / 'one.json'}") == f"2 messages are in {tmp_path / 'one.json'}"
    said = talk.messages
    assert talk.command("/clear") == "forgotten"
    assert talk.messages == [{"role": "system", "content": "Be short."}]
    talk.command(f"/load {tmp_path / 'one.json'}")
    assert talk.messages == said


def test_sampling_parameters_are_set_and_checked(talk):
    assert talk.command("/set temperature 0.5") == "temperature is 0.5"
    talk.command("/set parameter top_k 7")  # as in Ollama
    assert talk.params == {"temperature": 0.5, "top_k": 7}
    assert "top_k 7" in talk.command("/set")
    talk.command("/set top_k default")
    assert talk.params == {"temperature": 0.5}
    efforts = {"nothink": "none", "think": "medium", "think high": "high", "think default": None}
    for words, effort in efforts.items():
        talk.command(f"/set {words}")
        assert talk.params.pop("reasoning_effort") == effort
    assert asked_of(build_parser().parse_args(["run", "demo", "--think=false"])) == {"reasoning_effort": "none"}


class Loaded:
    """A loaded model that answers with its prompt."""

    default_sampling, has_chat_template, tokenizer = SamplingDefaults(), True, property(lambda self: self)
    stream = staticmethod(lambda prompt, params: [str(prompt)])
    render_chat = staticmethod(lambda messages, variables: [sorted(variables.items())])
    encode = staticmethod(lambda *_: [])
    template_reads, template_words = {"enable_thinking", "thinking", "reasoning_effort"}, {"none", "low"}


def test_a_model_that_is_loaded_here_thinks_as_is_set():
    model, said = LocalModel(Loaded(), "loaded", {"max_tokens": 4}), [{"role": "user", "content": "hi"}]
    for effort, thinks in (("none", False), ("low", True)):
        rendered = [[("enable_thinking", thinks), ("reasoning_effort", effort), ("thinking", thinks)]]
        assert [piece.text for piece in model.answer(said, {"reasoning_effort": effort}, Speed())] == [str(rendered)]
    assert [piece.text for piece in model.answer(said, {"reasoning_effort": None}, Speed())] == [str(said)]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/hlep", "there is no command /hlep; did you mean /help?"),
        ("/set temprature 1", "there is no parameter temprature; did you mean temperature?"),
        ("/set temperature 9", "temperature 9: must be at least 0 and at most 2"),
        ("/set top_k x", "top_k x: is not a number"),
        ("/set think loud", "think loud: must be one of default, true, false"),
        ("/save", "/save needs a file"),
        ("/load /nowhere/at/all", "/nowhere/at/all cannot be read"),
        ("/image /etc/hostname", "does not end like that of a picture"),
        ("/save ~nobody-here/x", "~nobody-here/x cannot be written: No such file or directory"),
        ("/load a\0b", "cannot be read: No such file or directory"),
        ("/model other", "no other"),
    ],
)
def test_what_a_command_cannot_do_is_said(talk, line, said):
    with pytest.raises(UsageError, match=said.replace("?", r"\?")):
        talk.command(line)


def test_pictures_go_with_the_next_message_alone(talk, tmp_path):
    (tmp_path / "a.png").write_bytes(b"\x89PNG")
    talk.command(f"/image {tmp_path / 'a.png'}")
    talk.ask("what is it?")
    talk.ask("and?")
    first, second = talk.said
    assert [part["type"] for part in first["content"]] == ["text", "image_url"]
    assert first["content"][1]["image_url"]["url"] == "data:image/png;base64,iVBORw=="
    assert second["content"] == "and?"


def test_several_lines_and_the_end(talk, monkeypatch):
    assert unquoted('"""a\nb"""') == "a\nb"
    monkeypatch.setattr(sys, "stdin", io.StringIO('/set seed 1\n"""a\nb"""\nc\n\nd\n/bye\n'))  # piped: the rest is one message
    prompt = make_prompt(Interrupts())
    assert [prompt(), prompt(), prompt()] == ["/set seed 1", "a\nb", "c\n\nd\n/bye"]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"h\xc3\xa9 \xff\n"), "ascii", "surrogateescape"))
    assert make_prompt(Interrupts())() == "hé \ufffd", "a pipe may hold any bytes, in any locale"
    with pytest.raises(Quit):
        talk.command("/bye")
    assert "/image FILE" in talk.command("/?")


@pytest.mark.parametrize(("known", "sees"), [({}, True), ({"input_modalities": ["text"]}, False)])
def test_a_model_that_is_not_loaded_yet_may_see(monkeypatch, known, sees):
    answers = {
        "/model/info": {"default_sampling_params": {}},
        "/v1/models/a": {"id": "a", **({"architecture": known} if known else {})},
    }
    monkeypatch.setattr(RemoteModel, "names", lambda self: ["a"])
    monkeypatch.setattr(RemoteModel, "_info", lambda self, path: answers[path])
    assert RemoteModel(ServerClient("http://127.0.0.1:9"), "a", {}).can_see is sees


def test_a_picture_for_a_model_that_is_loaded_here_is_refused_by_its_reason(talk):
    talk.model.can_see = False
    with pytest.raises(UsageError, match=r"^echo is loaded here, and pictures go to servers alone; .*`tandem serve`"):
        talk.command("/image a.png")


def test_a_refused_message_is_taken_back_and_its_pictures_are_said_to_be_gone(talk, tmp_path):
    def answer(*_):
        raise RequestError("picture 1 is an SVG")
        yield

    talk.model.answer, shown = answer, Console(file=io.StringIO(), width=160)
    (tmp_path / "a.png").write_bytes(b"\x89PNG")
    for picture, words in (False, ""), (True, "The message and its pictures are not kept: add them again with /image FILE.\n"):
        if picture:
            talk.command(f"/image {tmp_path / 'a.png'}")
        with pytest.raises(RequestError):
            command._answer(talk, "what is it?", shown, Interrupts())
        assert shown.file.getvalue() == words and talk.said == talk.images == []


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    model = tiny_model(tmp_path_factory.mktemp("talk") / "tiny", config={"max_position_embeddings": 100_000})
    with served(str(model), "--kv-tokens", "200000") as address:
        yield address


@pytest.mark.slow
def test_a_picture_for_a_model_that_reads_text_alone_is_refused_in_a_line(url, tmp_path):
    (tmp_path / "a.png").write_bytes(b"\x89PNG")
    talk = Conversation(RemoteModel(ServerClient(url), None, {}), {}, lambda name: None)
    with pytest.raises(UsageError, match=r"^tiny sees no pictures; .*--url URL"):
        talk.command(f"/image {tmp_path / 'a.png'}")
    assert talk.images == []
    assert main(["chat", "--url", url, "--image", str(tmp_path / "a.png"), "what is it?"]) == 2


@pytest.mark.slow
def test_a_chat_on_a_terminal(url, tmp_path):
    state = {"TANDEM_STATE_DIR": str(tmp_path)}
    with Terminal("chat", "--url", url, *KEYS, **state) as terminal:
        terminal.wait_for(">>>")
        assert "tiny (http://" in terminal.text and "/help lists commands" in terminal.text
        terminal.type("/hepl\r")
        terminal.wait_for("did you mean /help?")
        terminal.type("first question\r")
        eventually(url, 1)
        terminal.type("\x03")
        terminal.wait_for("(stopped)")
        eventually(url, 0)
        terminal.type(f"/save {tmp_path / 'saved'}\r")
        terminal.wait_for("2 messages are in")
        terminal.type("/set max_tokens 5\r")
        terminal.wait_for("max_tokens is 5")
        terminal.type('"""second\rquestion"""\r')
        terminal.wait_for("5 tokens, ")
        assert "tokens/s, cut at the limit" in terminal.text
        terminal.type("\x03")
        terminal.wait_for("Ctrl-C once more ends")
        terminal.type("\x03")
        assert terminal.ends() == 0
    saved = json.loads((tmp_path / "saved").read_text())["messages"]
    assert [one["role"] for one in saved] == ["user", "assistant"]
    assert "first question" in (tmp_path / "chat_history").read_text()
    with Terminal("chat", "--url", url, **state) as terminal:
        terminal.wait_for(">>>")
        terminal.type("\x1b[A")  # the last thing said in the run before
        terminal.wait_for("question")
        terminal.type("\x03\x03")
        terminal.type("\x04")
        assert terminal.ends() == 0


INTERRUPTED = """
import argparse, asyncio, contextlib, os, signal, sys
from prompt_toolkit.input.vt100 import raw_mode
from rich.console import Console
from tandem.cli.talk import talk as command
from tandem.cli.talk.conversation import Conversation

class Piece:
    text, reasoning = "word ", False

class Talker:
    name, where, can_chat, can_see = "echo", "loaded here", True, False

    def answer(self, messages, params, speed):
        yield from [Piece()] * 3

@contextlib.contextmanager
def opened(arguments, defaults):
    yield Talker(), None

def strike(*words, **named):
    if said:
        said.clear()
        os.kill(os.getpid(), signal.SIGINT)
    return inner(*words, **named)

def ask(self, text):
    said.append(text)
    asked(self, text)

said, asked = [], Conversation.ask
Conversation.ask = ask
owner, name = {"loop": (asyncio.events, "new_event_loop"), "take": (raw_mode, "__enter__"),
               "give": (raw_mode, "__exit__"), "print": (Console, "print"), "draw": (command.AnswerView, "add"),
               "ask": (command, "_answer")}[sys.argv[1]]
inner = getattr(owner, name)
setattr(owner, name, strike)
if sys.argv[1] == "ask":
    said.append("")
command._opened, command.asked_of = opened, lambda arguments: {}
sys.exit(command.run_chat(argparse.Namespace(system=None, prompt=None, image=[])))
"""


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("loop", "Ctrl-C once more ends"),
        ("take", "Ctrl-C once more ends"),
        ("print", "Ctrl-C once more ends"),
        ("give", "Ctrl-C once more ends"),
        ("draw", "(stopped)"),
        ("ask", "(stopped)"),
    ],
)
def test_ctrl_c_counts_wherever_it_strikes(where, words, tmp_path):
    """Python raises KeyboardInterrupt anywhere: in asyncio's set-up, or while a line is printed."""
    with Terminal(where, program=("-c", INTERRUPTED), TANDEM_STATE_DIR=str(tmp_path)) as terminal:
        terminal.wait_for(">>>")
        terminal.type("a question\r")
        if where == "give":
            terminal.wait_for("tokens")
            terminal.type("next\r")
        terminal.wait_for(words)
        terminal.type("/exit\r")
        assert terminal.ends() == 0
    assert "Traceback" not in terminal.text and "Exception" not in terminal.text


@pytest.mark.slow
def test_generate_by_a_server_and_what_it_says_of_its_prompt(url, tmp_path):
    with Terminal("generate", "--url", url, "--max-tokens", "4", TANDEM_STATE_DIR=str(tmp_path)) as terminal:
        terminal.wait_for("reading the prompt from standard input; Ctrl-D ends it")
        terminal.type("hello\r\x04")
        assert terminal.ends() == 0
        assert "tokens" in terminal.text.splitlines()[-1]


@pytest.mark.slow
def test_a_prompt_behind_the_model_is_answered_once(url, capsys, monkeypatch):
    asked, ask = [], Conversation.ask
    monkeypatch.setattr(Conversation, "ask", lambda talk, text: (asked.append(text), ask(talk, text)))
    for words in (["hello"], ["--think=false", "hello"], ["good", "day", "--seed", "1", "to", "you"]):
        for piped in ("", "a: 1\n"):
            monkeypatch.setattr(sys, "stdin", io.StringIO(piped))
            assert main(["run", "tiny", "--url", url, "--max-tokens", "4", *words]) == 0
            assert capsys.readouterr().out.strip()
    first = ["hello", "a: 1\n\nhello"]
    assert asked == [*first, *first, "good day to you", "a: 1\n\ngood day to you"]
    assert main(["chat", "tiny", "--url", url, ""]) == 2
    assert "the prompt is empty" in capsys.readouterr().err


EVIL = "a\x1b]0;owned\x07b\x9b2J"
"""Sets the title of a terminal, and clears it."""


class Evil(BaseHTTPRequestHandler):
    """A server whose names, texts and errors hold control characters."""

    def do_GET(self):
        assert self.headers["Authorization"] == "Bearer secret"
        self.send_response(200 if self.path == "/v1/models" else 404)
        self.end_headers()
        self.wfile.write(json.dumps({"data": [{"id": EVIL, "state": EVIL}], "error": {"message": EVIL}}).encode())

    def do_POST(self):
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(200)
        self.end_headers()
        answer = {"id": EVIL, "state": EVIL, "choices": [{"text": EVIL, "delta": {"content": EVIL}}]}
        self.wfile.write((b"" if self.path.endswith("/unload") else b"data: ") + json.dumps(answer).encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def evil(monkeypatch):
    """Its address, and a proxy that must not be asked for it."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TANDEM_API_KEY", "secret")
    with ThreadingHTTPServer(("127.0.0.1", 0), Evil) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_no_proxy_sees_the_key_and_an_answer_in_a_file_is_whole(evil, capsys):
    assert main(["generate", "--url", evil, "--prompt", "a"]) == 0
    assert capsys.readouterr().out == f"{EVIL}\n"


@pytest.mark.parametrize(
    "words", [["generate", "--prompt", "a"], ["model", "ps"], ["model", "unload", "a"], ["chat"], ["cache", "list"]]
)
def test_what_a_server_says_commands_no_terminal(evil, words, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("/model\nhello\n"))
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    main([*words, "--url", evil])
    said = "".join(capsys.readouterr())
    assert "a]0;ownedb2J" in said
    assert not {"\x07", "\x9b"} & set(said) and "\x1b]" not in said


@pytest.fixture
def asks(tmp_path, monkeypatch, capsys):
    """`tandem generate` in this process, with a state directory of its own."""
    monkeypatch.setenv("TANDEM_STATE_DIR", str(tmp_path))

    def ask(*words):
        # Drawn tokens may be without any text.
        code = main(["generate", *words, "--prompt", "a", "--max-tokens", "2", "--temperature", "0", "--ignore-eos"])
        said = capsys.readouterr()
        return code, said.out, said.err

    return ask


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("/there",)])
def test_variables_that_tandem_up_has_read_too_do_not_hide_its_server(asks, url, monkeypatch, words):
    place = Background("default")
    lock = place.lock()
    try:
        place.write(Record(os.getpid(), "127.0.0.1", int(url.rpartition(":")[2]), "/there", time.time(), 1.0))
        monkeypatch.setenv("TANDEM_MODEL", "/there")
        monkeypatch.setenv("TANDEM_PIPELINE_PARALLEL_SIZE", "2")
        code, text, _ = asks(*words)
        assert (code, bool(text)) == (0, True)
        code, _, error = asks(*words, "--layer-split", "1,2")  # an option does: the model is to be loaded here
        assert (code, "/there: no such directory" in error) == (2, True)
        known = "mlx-community/Llama-3.2-3B-Instruct-4bit"  # which this server does not have: so it was asked
        place.write(Record(os.getpid(), "127.0.0.1", int(url.rpartition(":")[2]), known, time.time(), 1.0))
        assert f"has no model '{known}'" in asks("llama3.2")[2]
    finally:
        os.close(lock)


@pytest.mark.slow
def test_without_a_model_the_server_of_the_usual_port_is_asked(asks, url, monkeypatch):
    monkeypatch.setattr(command, "DEFAULT_URL", url)
    code, text, _ = asks()
    assert (code, bool(text)) == (0, True)
    monkeypatch.setattr(command, "DEFAULT_URL", "http://127.0.0.1:9")
    code, _, error = asks()
    assert code == 2
    assert error.startswith("tandem: no model is given, and http://127.0.0.1:9 cannot be reached: ")
    assert error.endswith("or a running server with --url\n")


@pytest.mark.slow
def test_a_layout_for_a_server_that_is_named_is_refused(asks, url):
    assert asks("--url", url, "-pp", "2") == (
        2,
        "",
        (
            f"tandem: --pipeline-parallel-size is for a model that is loaded here, and {url} is a server; leave it out, or "
            "give --local\n"
        ),
    )


@pytest.mark.slow
def test_a_server_is_asked_by_every_name_that_it_takes(url, tmp_path_factory):
    [typed] = map(str, tmp_path_factory.getbasetemp().glob("talk0/tiny"))
    names = ["tiny", "default", typed]
    assert [RemoteModel(ServerClient(url), name, {}).name for name in names] == names
    with pytest.raises(UsageError, match="has no model 'nobody'; there is: tiny"):
        RemoteModel(ServerClient(url), "nobody", {})


def eventually(url, running):
    """So many requests run."""
    deadline = time.monotonic() + 240
    while httpx.get(f"{url}/v1/status", timeout=240).json()["num_running"] != running:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("messages", ["[" * 10**5 + "]" * 10**5, "{}", '""', "null", '["hello"]', '[{"role": "user"}]'])
def test_a_file_without_a_list_of_messages_is_no_conversation(talk, tmp_path, messages):
    (tmp_path / "saved").write_text(f'{{"messages": {messages}}}')
    with pytest.raises(UsageError, match="is no saved conversation"):
        talk.command(f"/load {tmp_path / 'saved'}")
    assert talk.messages == []


@pytest.mark.parametrize(
    ("event", "said"),
    [
        ('{"error": "out of luck"}', "^out of luck$"),
        ('{"error": {"message": "out of luck"}}', "^out of luck$"),
        ('{"error": {"code": 1}}', "code"),
        ("{nope", "/v1/completions streams an event that is no JSON object"),
        ("[1]", "/v1/completions streams an event that is no JSON object"),
    ],
)
def test_an_error_or_nonsense_in_a_stream_is_a_line(monkeypatch, event, said):
    monkeypatch.setattr(ServerClient, "open", lambda *_, **__: io.BytesIO(f'data: {{"error": null}}\n\ndata: {event}\n'.encode()))
    stream = ServerClient("http://a:1").events("/v1/completions", {})
    assert next(stream) == {"error": None}
    with pytest.raises(UsageError, match=said):
        next(stream)
