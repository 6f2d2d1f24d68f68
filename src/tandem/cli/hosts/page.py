"""The page of `tandem agent --page`: it finds, pairs and checks machines, fetches models, and starts and ends a server.

HTTP on this machine alone. What the page does are the commands of `tandem`, each in a process of its own. While a server runs
in the background all other requests are passed on to it, so that the page outlives that server.
"""

from __future__ import annotations

import atexit
import hmac
import http.client
import json
import secrets
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import msgspec

from tandem.checkpoints.stored import remove_partial, stored
from tandem.cli.hosts.command import gather_facts
from tandem.cli.lifecycle import last_lines
from tandem.crash_guard import start_thread
from tandem.diagnostics.doctor.facts import gather
from tandem.diagnostics.doctor.probe_messages import GatherFacts
from tandem.env import child_environment
from tandem.errors import TandemError, UsageError
from tandem.json_types import JsonObject
from tandem.launchers.agent.link import PREFIX
from tandem.launchers.agent.trust import Trust
from tandem.planner.hosts import host_spec
from tandem.printable import printable
from tandem.processes.interpreter import module_command
from tandem.server.status.page import PATHS, file_response
from tandem.supervision.record import DEFAULT_NAME, Background
from tandem.system.files import file_errors

COMMAND_S = 300.0
MOST_BODY = 64 * 2**20
_HERE = "127.0.0.1"
_HOP = {"connection", "keep-alive", "transfer-encoding", "te", "upgrade", "date", "server", "host", "origin", "x-page-key"}
"""Headers that are not passed on, or written anew."""
_changing = threading.Lock()
"""Held while downloads are begun or ended."""
_ROOT, _JSON = "/v1/agent", {"content-type": "application/json"}
_Text = Annotated[str, msgspec.Meta(max_length=1000, pattern=r"^[^\0]*$")]


class _Asked(msgspec.Struct):
    """Body of a request: each action reads what it needs."""

    model: _Text = ""
    """Name of a model; for a search words, without which all of this disk and the catalogue are found."""
    hosts: list[_Text] = []
    """Hosts for `tandem hosts write`, or machines for `tandem plan --hosts`; in the layout's order for a start."""
    flags: list[_Text] = []
    """Flags of the plan, for `tandem up`."""
    context: int = 8192
    streams: int = 1
    agent: _Text = ""
    code: _Text = ""
    seconds: float = 3.0
    """Time for which agents are listened for; 0 asks those alone that are paired."""


def start_page(name: str, port: int) -> str:
    """Serve the page in a thread; return its address, with the key. Raises UsageError when the port is taken."""
    with file_errors(f"--page {port}", "name another port", param="page"):
        server = _PageServer((_HERE, port), _Handler)
    server.name, server.key, server.fetches = name, secrets.token_urlsafe(16), {}
    start_thread(server.serve_forever, name="page", on_failure=lambda _: None)
    return f"http://{_HERE}:{server.server_address[1]}/ui#key={server.key}"


class _PageServer(ThreadingHTTPServer):
    daemon_threads = True
    name = key = ""
    fetches: dict[str, _Fetch]
    """Downloads since the start, by the model's name."""

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing: a browser that leaves is no error, and the terminal shows codes."""


class _Fetch:
    """A `tandem pull` in a process of its own, and what it printed last."""

    def __init__(self, model: str) -> None:
        command, pipe, both = module_command("tandem", "pull", "--json", model), subprocess.PIPE, subprocess.STDOUT
        self.process = subprocess.Popen(command, stdout=pipe, stderr=both, text=True, errors="replace", env=child_environment())
        atexit.register(self.process.kill)
        self.model, self.said, self.progress = model, "", {"completed": 0, "total": 0}
        start_thread(self._follow, name="fetch", on_failure=lambda _: self.process.kill())

    def _follow(self) -> None:
        for line in self.process.stdout or ():
            if line.startswith("{"):
                self.progress |= json.loads(line)
            else:
                self.said = line.strip().removeprefix("tandem: ") or self.said

    def told(self) -> JsonObject:
        """Return the state for the page."""
        return {**self.progress, "model": self.model, "exit_code": self.process.poll(), "said": printable(self.said)}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60.0
    server: _PageServer

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: paths and keys are nobody's business."""

    def do_GET(self) -> None:
        """Answer a request of the page."""
        port, length = self.server.server_address[1], self.headers.get("Content-Length", "0")
        if "Transfer-Encoding" in self.headers or not length.isdecimal() or len(length) > 9 or int(length) > MOST_BODY:
            return self._error(413, f"A body may have {MOST_BODY} bytes, as Content-Length says.", "too_large")
        body, path = self.rfile.read(int(length)), self.path.partition("?")[0]
        names = {f"{_HERE}:{port}", f"localhost:{port}"}
        origin = self.headers.get("Origin")
        if self.headers.get("Host") not in names or (origin and origin.removeprefix("http://") not in names):
            return self._error(403, f"Open the page as http://{_HERE}:{port}/ui.", "forbidden")
        if path in PATHS or path == "/":
            found = file_response("index.html" if path in ("/", "/ui") else path.removeprefix("/ui/"))
            return self._send(found.status_code, bytes(found.body), dict(found.headers))
        if path == _ROOT or path.startswith(f"{_ROOT}/"):
            return self._act(path.removeprefix(_ROOT).strip("/"), body)
        return self._pass_on(body)

    do_POST = do_DELETE = do_PUT = do_GET

    def _act(self, action: str, body: bytes) -> None:
        if not hmac.compare_digest(self.headers.get("X-Page-Key", "").encode(), self.server.key.encode()):
            return self._error(403, "Open the address that `tandem agent --page` has printed, with its key.", "page_key")
        if action not in _ACTIONS:
            return self._error(404, f"There is no {action!r}.", "unknown_url")
        try:
            answer = _ACTIONS[action](self.server, msgspec.json.decode(body or b"{}", type=_Asked))
        except (TandemError, OSError, ValueError, RecursionError, msgspec.MsgspecError) as error:
            return self._error(400, printable(getattr(error, "message", str(error))), "refused")
        return self._send(200, json.dumps(answer).encode())

    def _pass_on(self, body: bytes) -> None:
        """Pass a request on to the server in the background, and its answer back as it comes."""
        place = Background(DEFAULT_NAME)
        if not place.runs() or (record := place.record()) is None:
            return self._error(503, "No model runs: start one in the view Start, or with `tandem up`.", "no_server")
        with closing(http.client.HTTPConnection(_HERE, record.port)) as connection:
            headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP}
            try:
                connection.request(self.command, self.path, body, headers)
                answer = connection.getresponse()
            except (OSError, ValueError, http.client.HTTPException):
                return self._error(503, "The server starts, or ends: wait a moment.", "no_server")
            self.send_response_only(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in _HOP:
                    self.send_header(name, value)
            self.send_header("Connection", "close")
            self.end_headers()
            while data := answer.read1(2**16):
                self.wfile.write(data)

    def _error(self, status: int, message: str, code: str) -> None:
        """Answer with an error, and close: what is unread of the body must not be taken for another request."""
        body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}
        self._send(status, json.dumps(body).encode(), {**_JSON, "connection": "close"})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str] = _JSON) -> None:
        self.send_response_only(status)
        for name, value in {**headers, "content-length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


def _tandem(*words: str, text: str = "", passed: Sequence[int] = (0,)) -> str:
    """Return what a command prints. Raises UsageError with the command's own words if it fails."""
    command, environment = module_command("tandem", *words), child_environment()
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=COMMAND_S, env=environment)
    except subprocess.TimeoutExpired:
        raise UsageError(f"tandem {words[0]} has not ended after {COMMAND_S:.0f} s; try it in a terminal") from None
    if done.returncode not in passed or (done.returncode and not done.stdout):
        raise UsageError((done.stderr or done.stdout).strip().removeprefix("tandem: "))
    return done.stdout


def _word(text: str, what: str) -> str:
    """Return a word that a command cannot take for an option. Raises UsageError."""
    if not text or text.startswith("-"):
        raise UsageError(f"{what}: {text!r} is none; name one")
    return text


def _state(server: _PageServer, asked: _Asked) -> JsonObject:
    """Return what is on this machine: models, and the server in the background or how it ended."""
    place = Background(DEFAULT_NAME)
    runs, record = place.runs(), place.record()
    ended = [] if runs or not place.log.exists() else last_lines(place, 12)
    models = sorted((one for one in stored() if one.kind != "benchmarks" and one.complete), key=lambda one: -one.modified)
    return {
        "runs": runs,
        "model": record.model if record is not None and runs else None,
        "models": [{"name": one.name, "bytes": one.nbytes} for one in models],
        "fetches": [fetch.told() for fetch in list(server.fetches.values())],
        "ended": [printable(line.rstrip()) for line in ended],
    }


def _find(server: _PageServer, asked: _Asked) -> list[JsonObject]:
    """Return this machine, the agents that answer, and paired ones that are not announced; with the words for plans and
    hosts files."""
    facts = gather(GatherFacts())
    rows = {server.name: {**_row(server.name, _HERE, facts.chip, facts.memory_bytes, paired=True), "host": _HERE}}
    with suppress(UsageError):  # no multicast here: paired machines are asked at their addresses
        found = json.loads(_tandem("hosts", "find", "--json", "--timeout", str(asked.seconds))) if asked.seconds else []
        for one in found:
            where = ", ".join(one["addresses"])
            rows.setdefault(one["name"], _row(one["name"], where, one["chip"], one["memory_bytes"], paired=one["paired"]))
    for name, peer in Trust("head").peers().items():
        if name not in rows:
            with suppress(UsageError):  # it is off
                there = gather_facts([PREFIX + name])[PREFIX + name]
                rows[name] = _row(name, peer.address, there.chip, there.memory_bytes, paired=True)
    return list(rows.values())


def _row(name: str, address: str, chip: str, memory: int, *, paired: bool) -> JsonObject:
    host, plan = PREFIX + name, host_spec(name, memory, chip)
    return {"name": name, "host": host, "address": address, "chip": chip, "memory_bytes": memory, "paired": paired, "plan": plan}


def _of_machines(asked: _Asked, command: str, *words: str) -> object:
    """Return what a command answers about the machines of a request."""
    with TemporaryDirectory(prefix="tandem-page-") as folder:
        where = _hostfile(Path(folder), asked.hosts)
        return json.loads(_tandem(command, *where, "--json", *words, passed=(0, 1)))


def _hostfile(folder: Path, hosts: Sequence[str]) -> list[str]:
    """Write a hosts file for machines of which one at least is another; return the options that name it."""
    if set(hosts) <= {_HERE}:
        return []
    file = folder / "hosts.json"
    _tandem("hosts", "write", str(file), *(_word(host, "hosts") for host in hosts))
    return ["--hostfile", str(file)]


def _plan(server: _PageServer, asked: _Asked) -> object:
    words = ["plan", _word(asked.model, "model"), "--json", "--hosts", *(_word(one, "hosts") for one in asked.hosts)]
    carried = ["--context", str(asked.context), "--streams", str(asked.streams)]
    return json.loads(_tandem(*words, *carried, passed=range(4)))


def _fetch(server: _PageServer, asked: _Asked) -> None:
    """Start to fetch a model; one that is being fetched goes on."""
    with _changing:
        running = server.fetches.get(model := _word(asked.model, "model"))
        if running is None or running.process.poll() is not None:
            server.fetches[model] = _Fetch(model)


def _cancel(server: _PageServer, asked: _Asked) -> None:
    """End a download; files that have arrived whole are kept for the next one."""
    with _changing:
        if (running := server.fetches.pop(asked.model, None)) is not None:
            running.process.terminate()
            running.process.wait()
            remove_partial(asked.model)


def _start(server: _PageServer, asked: _Asked) -> str:
    place = Background(DEFAULT_NAME)
    if place.runs():
        raise UsageError("a model runs already: stop it first")
    folder = place.log.parent
    folder.mkdir(parents=True, exist_ok=True)
    where = _hostfile(folder, asked.hosts)
    return _tandem("up", _word(asked.model, "model"), *where, *asked.flags, "--no-wait")


_ACTIONS: Mapping[str, Callable[[_PageServer, _Asked], object]] = {
    "": _state,
    "machines": _find,
    "pair": lambda _, asked: _tandem("hosts", "pair", _word(asked.agent, "agent"), text=f"{asked.code}\n"),
    "forget": lambda _, asked: _tandem("hosts", "forget", _word(asked.agent, "agent")),
    "search": lambda _, asked: _of_machines(asked, "search", "--", *asked.model.split()),
    "fetch": _fetch,
    "cancel": _cancel,
    "doctor": lambda _, asked: _of_machines(asked, "doctor"),
    "plan": _plan,
    "start": _start,
    "stop": lambda _, asked: _tandem("down"),
}
"""Actions of the page, by the last word of the path."""
