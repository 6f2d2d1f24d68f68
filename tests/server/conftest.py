"""An engine that answers from a script, and a live server over it."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import socket
import struct
import tempfile
import threading
import time
from collections import deque
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import httpx
import msgspec
import openai
import pytest
import uvicorn.server
import zmq
from tokenizers import Tokenizer

from tandem.checkpoints.files import ModelFiles
from tandem.config.settings import ModelSettings, ProcessSettings, ServerSettings, Settings
from tandem.protocol.adapters import AdapterChanged, AdapterSpec, ChangeAdapter
from tandem.protocol.cached_prefixes import CacheReport, QueryCache
from tandem.protocol.control import (
    Abort,
    ApiMessage,
    Detach,
    EngineStatus,
    HandedOver,
    HandOver,
    MetricsText,
    NeedPicture,
    Output,
    PictureContent,
    QuarantineNotice,
    QueryMetrics,
    QueryStatus,
    RankInfo,
    Refused,
    Submit,
)
from tandem.protocol.logprobs import PromptLogprobs, TokenLogprob
from tandem.protocol.request import EngineRequest
from tandem.server.api_process import make_server
from tandem.server.app import create_app
from tandem.server.engines.replicas import Replicas
from tandem.server.engines.router import Router
from tandem.server.listener import listen
from tandem.testing import CHAT_TEMPLATE, write_tokenizer
from tandem.text.tokenizer import load_tokenizer

EOS = 2
MODEL = ModelSettings(model="org/tiny", served_name=("tiny",))
RANK = RankInfo(rank=0, stage=0, layers=(0, 4), pid=1, host="here", weight_bytes=10, peak_bytes=20, step_s=0.01)

# uvicorn looks around, and waits for connections to close, ten times as often as it does in service.
uvicorn.server.asyncio = SimpleNamespace(**{**vars(asyncio), "sleep": lambda seconds: asyncio.sleep(seconds / 10)})


def wait_until(condition, seconds=240.0):
    """Poll until `condition()` is true; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.005)


def events(response):
    """Data of the server-sent events, decoded; `[DONE]` stays a string."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def vector_of(tokens):
    """What the fake engine answers to a request for a hidden state."""
    return struct.pack("<8f", *(sum(tokens) % (5 + i) + 1 for i in range(8)))


def prompt_logprobs_of(tokens, k):
    """What it says of a prompt: each token has minus its id / 128, is the third, and the others are ids from 5 on."""
    n = len(tokens) - 1
    return PromptLogprobs(
        k,
        struct.pack(f"<{n}f", *(-token / 128 for token in tokens[1:])),
        struct.pack(f"<{n}i", *[3] * n),
        struct.pack(f"<{n * k}f", *[-0.25 * i for _ in range(n) for i in range(k)]),
        struct.pack(f"<{n * k}i", *[5 + i for _ in range(n) for i in range(k)]),
    )


class Sequence:
    """Outputs still to be sent for one request."""

    def __init__(self, identity: bytes, request: EngineRequest, engine: FakeEngine) -> None:
        self.identity, self.request, self.due = identity, request, time.monotonic()
        if request.pooling is not None:
            labels = len(request.label_token_ids)
            vector = engine.labels_of(request.prompt, labels) if labels else vector_of(request.prompt)
            self.outputs = deque([Output(request.request_id, finish_reason="stop", vector=vector)])
            return
        params, limit = request.params, request.params.max_tokens
        reply = list(itertools.islice(itertools.cycle(engine.reply), limit)) if params.ignore_eos else engine.reply
        tokens = reply[:limit] if len(reply) >= limit else [*reply, EOS]
        ended = len(reply) < limit
        if not limit:
            tokens, ended = [], False
        size = engine.tokens_per_output
        self.outputs = deque(
            Output(
                request_id=request.request_id,
                tokens=tokens[start : start + size],
                logprobs=[self.logprob(token) for token in tokens[start : start + size]],
                finish_reason=("stop" if ended else "length") if start + size >= len(tokens) else None,
                stop_token=ended and start + size >= len(tokens),
            )
            for start in range(0, max(len(tokens), 1), size)
        )
        if engine.timing is not None:
            self.outputs[0] = msgspec.structs.replace(self.outputs[0], timing=engine.timing)
        if engine.interrupted is not None:
            self.outputs[1] = msgspec.structs.replace(self.outputs[1], timing=engine.interrupted)
        if any(engine.cached):
            cached, disk = engine.cached
            self.outputs[0] = msgspec.structs.replace(self.outputs[0], cached_tokens=cached, disk_tokens=disk)
        if params.prompt_logprobs is not None:
            first = self.outputs.popleft()
            found = prompt_logprobs_of(request.prompt, params.prompt_logprobs)
            self.outputs.appendleft(msgspec.structs.replace(first, prompt_logprobs=found))

    def logprob(self, token: int) -> TokenLogprob:
        """Deterministic values; the chosen token is the most likely, the next id has no probability at all."""
        count = self.request.params.logprobs or 0
        top = [(token, -0.25), ((token + 1) % 512, float("-inf"))]
        return TokenLogprob(token, -0.25, top[:count])


class FakeEngine:
    """A ROUTER loop in a thread that speaks protocol/control.py. Its attributes are the script."""

    def __init__(self, model_dir: Path) -> None:
        self.tokenizer = load_tokenizer(ModelFiles(model_dir, "tiny"))
        self.path = tempfile.mktemp(prefix="tandem-", suffix=".sock", dir="/tmp")
        self.endpoint = f"ipc://{self.path}"
        self._source = str(model_dir)
        self._thread: threading.Thread | None = None
        self._live: dict[str, Sequence] = {}
        self._script()

    def _script(self) -> None:
        """What it does unless a test says otherwise."""
        self.reply = self.tokenizer.encode("Hello, wörld 漢🙂!")
        self.tokens_per_output = 1
        self.cached = 0, 0
        self.timing = self.interrupted = None
        """Tokens of each prompt that it has, and those of them that are on disk."""
        self.encodes = True
        """Pictures are encoded: their inputs are asked for."""
        self.delay = 0.0
        self.outputs: int | None = None
        """How many more tokens it sends; None for all."""
        self.hold = self.silent = self.garbage = self.rests = False
        self.refusal: tuple[int, str, str | None, float | None] | None = None
        self.status = EngineStatus(
            query_id=0, state="ready", detail="", model="tiny", source=self._source, max_context=256, vocab_size=512,
            queued=0, running=0, kv_tokens_used=0, kv_tokens_total=4096, restarts=0, stages=1, micro_batches=1, ranks=[RANK],
            hidden_size=8, pooling="last", no_pictures="it takes text alone",
        )  # fmt: skip
        self.submitted: dict[str, EngineRequest] = {}
        self.aborted: set[str] = set()
        self.answered: set[str] = set()
        """Those of them whose clients had all that they wanted."""
        self.detached = 0

    def reset(self) -> None:
        """Answer what is asked, and forget the script and the requests of a test."""
        self._script()
        if self._thread is None:
            self.start()
        wait_until(lambda: not self._live)
        self._script()

    def start(self) -> None:
        self._stop = threading.Event()
        self._bound = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._bound.wait(240)

    def stop(self) -> None:
        """Go away without a word, as a killed process does."""
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None

    def set_status(self, **changes) -> None:
        self.status = msgspec.structs.replace(self.status, **changes)

    def labels_of(self, prompt: list[int], count: int) -> bytes:
        """What it answers for labels: of the first the less the longer the prompt, of the others always the same."""
        return struct.pack(f"<{count}f", -len(prompt) / 128, *[-1.0] * (count - 1))

    @property
    def last(self) -> EngineRequest:
        """What it was asked last."""
        return list(self.submitted.values())[-1]

    def prompt(self) -> str:
        """The text of that one's prompt, with special tokens."""
        return self.tokenizer.decode(self.last.prompt, skip_special_tokens=False)

    def text(self) -> str:
        return self.tokenizer.decode(self.reply)

    def _run(self) -> None:
        self._live.clear()
        decode = msgspec.msgpack.Decoder(ApiMessage).decode
        with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
            router.linger, router.sndhwm, router.rcvhwm = 0, 0, 0
            router.bind(self.endpoint)
            self._router = router
            self._bound.set()
            while not self._stop.is_set():
                while router.poll(1 if self._live else 5):
                    identity, frame = router.recv_multipart()
                    if not self.silent:
                        self._handle(identity, decode(frame))
                if not self.hold and not self.silent:
                    self._advance()

    def _send(self, identity: bytes, message) -> None:
        self._router.send_multipart([identity, msgspec.msgpack.encode(message)])

    def _handle(self, identity: bytes, message) -> None:
        if self.garbage:
            self._router.send_multipart([identity, b"\xc1 not a message"])
        if isinstance(message, QueryStatus):
            self._send(identity, msgspec.structs.replace(self.status, query_id=message.query_id))
        elif isinstance(message, QueryMetrics):
            self._send(identity, MetricsText(message.query_id, b"tandem_engine_up 1\n"))
        elif isinstance(message, QueryCache):
            self._send(identity, CacheReport(message.query_id, serves="any length", dropped_tokens=len(message.drop)))
        elif isinstance(message, Submit):
            self.submitted[message.request.request_id] = message.request
            if self.refusal is not None:
                status, text, code, retry = self.refusal
                self._send(identity, Refused(message.request.request_id, status, text, code, None, retry))
            else:
                for picture in message.request.pictures if self.encodes else ():
                    self._send(identity, NeedPicture(message.request.request_id, picture.key))
                self._live[message.request.request_id] = Sequence(identity, message.request, self)
                if message.request.quarantine_record is not None and message.request.quarantine_record.suspect:
                    resting = self.rests and message.request.quarantine_record.rests
                    self._send(identity, QuarantineNotice(message.request.request_id, resting=resting))
        elif isinstance(message, PictureContent):
            whole = {message.key: {"inputs": message.inputs}}
            for name, request in self.submitted.items():
                pictures = tuple(msgspec.structs.replace(one, **whole.get(one.key, {})) for one in request.pictures)
                self.submitted[name] = msgspec.structs.replace(request, pictures=pictures)
        elif isinstance(message, Abort):
            self.aborted.add(message.request_id)
            if message.answered:
                self.answered.add(message.request_id)
            self._live.pop(message.request_id, None)
        elif isinstance(message, ChangeAdapter):
            others = [one for one in self.status.adapters if one.name != message.name]
            self.set_status(adapters=others + [AdapterSpec(1, message.name, message.path)] * bool(message.path))
            self._send(identity, AdapterChanged(message.query_id))
        elif isinstance(message, HandOver):
            for request_id in [one for one, live in self._live.items() if live.identity == identity]:
                del self._live[request_id]
                self._send(identity, HandedOver(request_id, 768))
        elif isinstance(message, Detach):
            self.detached += 1

    def _advance(self) -> None:
        now = time.monotonic()
        for request_id, sequence in list(self._live.items()):
            if self.encodes and any(not picture.inputs for picture in self.submitted[request_id].pictures):
                continue
            while sequence.outputs and sequence.due <= now:
                if self.outputs == 0:
                    return
                if self.outputs is not None:
                    self.outputs -= 1
                self._send(sequence.identity, sequence.outputs.popleft())
                sequence.due += self.delay
            if not sequence.outputs:
                del self._live[request_id]


class LiveServer:
    """uvicorn on a free port, in a thread."""

    def __init__(self, settings: Settings, heartbeat_s: float) -> None:
        self.listener = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.address = self.listener.getsockname()
        self.app = create_app(settings, Replicas(Router(), {0: settings.process.engine_socket}, heartbeat_s=0.1))
        self.api = self.app.state.api
        self.api.heartbeat_s = heartbeat_s
        self.server = make_server(self.app, drain_timeout=2.0)
        self._thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.listener]}, daemon=True)
        self._thread.start()
        wait_until(lambda: self.server.started)
        self.clients: list[openai.OpenAI] = []
        self.http = httpx.Client(base_url=self.url, timeout=240, trust_env=False)

    def stop(self) -> None:
        for client in (self.http, *self.clients):
            client.close()
        self.server.should_exit = True
        self._thread.join(240)
        assert not self._thread.is_alive()

    def wait_ready(self) -> LiveServer:
        wait_until(lambda: self.http.get("/health/ready").status_code == 200)
        return self

    def knows(self, status: EngineStatus) -> bool:
        """Whether this is what its engine has said of itself."""
        known = self.api.client.status
        return known is not None and msgspec.structs.replace(known, query_id=0, ranks=status.ranks) == status

    def openai(self, **options) -> openai.OpenAI:
        options.setdefault("api_key", "none")
        self.clients.append(openai.OpenAI(base_url=f"{self.url}/v1", max_retries=0, timeout=240, **options))
        return self.clients[-1]

    def chat(self, **fields) -> httpx.Response:
        fields.setdefault("messages", [{"role": "user", "content": "hi"}])
        return self.http.post("/v1/chat/completions", json=fields)

    def raw(self, request: bytes) -> socket.socket:
        connection = socket.create_connection(self.address, timeout=240)
        connection.sendall(request)
        return connection


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    write_tokenizer(path)
    return path


@contextmanager
def running_engine(model_dir, **status):
    """An engine that has this to say of itself."""
    fake = FakeEngine(model_dir)
    fake.set_status(**status)
    fake.start()
    try:
        yield fake
    finally:
        fake.stop()
        Path(fake.path).unlink(missing_ok=True)


@contextmanager
def running_server(model, engine, **server):
    """A server over this engine, which is its `engine`, with fields of ServerSettings."""
    process = ProcessSettings(engine_socket=engine.endpoint)
    settings = ServerSettings(**{"unknown_fields": "refuse"} | server)
    live = LiveServer(Settings(model=model, server=settings, process=process), 5.0)
    live.engine = engine
    try:
        yield live.wait_ready()
    finally:
        live.stop()


@pytest.fixture(scope="module")
def shared(model_dir):
    """A server with its `engine`, for tests that leave both as they were."""
    with running_engine(model_dir) as fake, running_server(MODEL, fake) as live:
        yield live


@pytest.fixture(scope="module")
def journalled(model_dir, tmp_path_factory):
    """Likewise, with a journal in its `place`."""
    place = tmp_path_factory.mktemp("journal")
    with running_engine(model_dir) as fake, running_server(MODEL, fake, journal=str(place)) as live:
        live.place = place
        yield live


@pytest.fixture(scope="module")
def module_engine(model_dir):
    with running_engine(model_dir) as fake:
        yield fake


@pytest.fixture(scope="module")
def module_server(module_engine):
    with running_server(MODEL, module_engine) as live:
        yield live


@pytest.fixture
def engine(module_engine):
    """One for all tests of a module; each finds it as new."""
    yield module_engine
    module_engine.reset()


@pytest.fixture
def serve(engine):
    """Start a server with the given fields of ServerSettings; `ready=False` does not wait for the engine."""
    running = []

    def start(*, ready=True, heartbeat_s=5.0, model=None, **server):
        settings = Settings(
            model=model or MODEL,
            server=dataclasses.replace(ServerSettings(unknown_fields="refuse"), **server),
            process=ProcessSettings(engine_socket=engine.endpoint),
        )
        live = LiveServer(settings, heartbeat_s)
        running.append(live)
        return live.wait_ready() if ready else live

    yield start
    for live in running:
        live.stop()


@pytest.fixture
def server(module_server, engine):
    """One for all tests of a module, without a request, for tests that use its engine as they like."""
    wait_until(lambda: module_server.knows(engine.status))
    yield module_server.wait_ready()
    engine.reset()
    wait_until(lambda: not module_server.api.live)


@pytest.fixture(name="wait_until")
def wait_until_fixture():
    return wait_until


@pytest.fixture
def family(serve, engine, tmp_path):
    """A server with this chat template, and what its model says."""

    def start(template, says):
        path = tmp_path / "template.jinja"
        path.write_text(template)
        engine.reply = engine.tokenizer.encode(says)
        engine.set_status(max_context=4096)
        return serve(model=ModelSettings(model="org/tiny", served_name=("tiny",), chat_template=str(path)))

    return start


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    """A server with its `engine`, whose model has "yes" and "no" as tokens and is called a reranker."""
    path = tmp_path_factory.mktemp("judge")
    write_tokenizer(path, 510)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_tokens(["yes", "no"])
    tokenizer.save(str(path / "tokenizer.json"))
    model = ModelSettings(model="org/Tiny-Reranker", served_name=("judge",))
    with running_engine(path, model="judge", max_context=512) as fake, running_server(model, fake, max_choices=4) as live:
        yield live


@pytest.fixture(scope="module")
def scripted(model_dir, tmp_path_factory):
    """A server with its `engine`, whose template says that the model may think; tests give each its answers."""
    template = tmp_path_factory.mktemp("template") / "think.jinja"
    template.write_text("{# <think> </think> #}" + CHAT_TEMPLATE)
    model = ModelSettings(model="org/tiny", served_name=("my-model",), chat_template=str(template))
    with running_engine(model_dir, max_context=16384, model="my-model") as fake, running_server(model, fake) as live:
        yield live
