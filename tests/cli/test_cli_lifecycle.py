"""`tandem up`, `status`, `logs` and `down` as a user runs them."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest
from msgspec import structs

import tandem as tandem_package
from served import Call, api_of, wait_until
from statuses import STATUS
from tandem.cli.address import api_key, local_url, server_url
from tandem.cli.lifecycle import _roll
from tandem.cli.main import build_parser, main
from tandem.cli.serve import _completed
from tandem.cli.startup import farewell
from tandem.cli.status import Replica, look_at, look_at_port
from tandem.cli.status import _count as count_tokens
from tandem.config.settings import ModelSettings, ServerSettings, Settings
from tandem.errors import UsageError
from tandem.protocol.control import RankInfo
from tandem.protocol.events import Event
from tandem.protocol.supervisor_messages import ListReplicas, ReplicaInfo, ReplicaList
from tandem.supervision.record import Background, Record, digest
from tandem.system.origin import build
from tandem.testing import tiny_model

SOURCE = Path(tandem_package.__file__).parents[1]


class Tandem:
    """The command, with state and sockets of its own."""

    def __init__(self, directory: Path) -> None:
        self.model = str(tiny_model(directory / "tiny"))
        self.state = directory / "state"
        self.environment = {**os.environ, "TANDEM_STATE_DIR": str(self.state), "TANDEM_API_KEY": "sesame"}

    def __call__(self, *words: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "tandem", *words],
            capture_output=True,
            text=True,
            timeout=timeout,
            env=self.environment,
            check=False,
        )

    def status(self, *words: str) -> list[dict]:
        return json.loads(self("status", "--json", *words).stdout)


@pytest.fixture(scope="module")
def tandem(tmp_path_factory) -> Iterator[Tandem]:
    command = Tandem(tmp_path_factory.mktemp("lifecycle"))
    yield command
    for name in ("default", "other"):
        command("down", "--now", "--name", name)


@pytest.fixture
def server(tandem) -> Iterator[dict]:
    done = tandem("up", tandem.model, "--port", "0", "-pp", "2")
    try:
        assert done.returncode == 0, done.stderr
        assert "default is ready: http://127.0.0.1:" in done.stdout
        yield tandem.status("--interval", "0")[0]
    finally:
        tandem("down", "--now")


def family(pid: int) -> list[psutil.Process]:
    return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]


@pytest.mark.slow
def test_a_servers_life(tandem, server):
    assert (server["name"], server["state"]) == ("default", "ready")
    [replica] = server["replicas"]
    assert [(rank["rank"], rank["stage"]) for rank in replica["ranks"]] == [(0, 0), (1, 1)]
    assert all(rank["host"] and rank["peak_bytes"] > 0 and psutil.pid_exists(rank["pid"]) for rank in replica["ranks"])
    url = server["address"]
    assert httpx.get(f"{url}/v1/models", timeout=240).status_code == 401  # the key came along, not as an argument
    assert all("sesame" not in " ".join(one.cmdline()) for one in family(server["pid"]))

    second = tandem("up", tandem.model, "--port", "0")
    assert second.returncode == 2
    assert f"default runs already (process {server['pid']}, port {url.rsplit(':')[-1]}" in second.stderr

    done = threading.Event()

    def ask() -> None:
        while not done.is_set():
            answer = httpx.post(
                f"{url}/v1/completions",
                timeout=240,
                headers={"Authorization": "Bearer sesame"},
                json={"model": "default", "prompt": "a", "max_tokens": 200, "temperature": 0, "ignore_eos": True},
            )
            assert answer.status_code == 200, answer.text

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        # A busy engine may not answer one of the two looks in time.
        assert any(tandem.status("--interval", "2")[0]["replicas"][0]["tokens_per_s"] for _ in range(5))
    finally:
        done.set()
        thread.join()
    table = tandem("status").stdout
    assert "server: ready" in table and "1 of 2" in table and "2 of 2" in table

    assert "engine ready" in tandem("logs").stdout
    assert len(tandem("logs", "-n", "3").stdout.splitlines()) == 3
    follower = subprocess.Popen(
        [sys.executable, "-m", "tandem", "logs", "-f", "-n", "0"], text=True, stdout=subprocess.PIPE, env=tandem.environment
    )
    processes = family(server["pid"])
    ended = tandem("down")
    assert (ended.returncode, "default has ended" in ended.stdout) == (0, True)
    assert follower.communicate(timeout=240)[0] is not None  # it ends with the server
    assert not psutil.wait_procs(processes, timeout=240)[1]
    assert tandem("status").returncode == 1
    assert "no server named default runs" in tandem("down").stdout


@pytest.mark.slow
def test_a_server_that_is_killed_frees_its_name_and_leaves_nothing(tandem, server):
    processes = family(server["pid"])
    os.kill(server["pid"], signal.SIGKILL)
    assert not psutil.wait_procs(processes, timeout=240)[1]
    assert tandem.status("--name", "default")[0]["state"] == "down"
    done = tandem("up", tandem.model, "--port", "0", "--no-wait")
    assert done.returncode == 0, done.stderr
    other = tandem("up", tandem.model, "--port", "0", "--name", "other")
    assert other.returncode == 0, other.stderr
    deadline = time.monotonic() + 240
    while [one["state"] for one in tandem.status("--interval", "0")] != ["ready", "ready"]:
        assert time.monotonic() < deadline
    assert {one["name"] for one in tandem.status("--interval", "0")} == {"default", "other"}
    assert "; other runs: `tandem down other` ends it" in tandem("down", "nobody").stdout
    assert tandem("down", "other").returncode == 0
    assert [one["name"] for one in tandem.status("--interval", "0")] == ["default"]


@pytest.mark.slow
def test_what_does_not_come_up_says_why(tandem):
    done = tandem("up", str(tandem.state / "nothing"), "--port", "0")
    assert done.returncode == 2
    assert "no such directory or file" in done.stderr
    assert "did not come up" in done.stderr
    assert "Traceback" not in done.stderr
    done = tandem("up", "~nobody-here/model", "--port", "0")
    assert done.returncode == 2
    assert "whom the system does not know: write it out" in done.stderr


def test_one_name_has_one_owner(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_STATE_DIR", str(tmp_path))
    place = Background("a")
    assert not place.runs()
    fd = place.lock()
    assert place.runs()
    with pytest.raises(UsageError, match="a runs already"):
        Background("a").lock()
    assert not Background("b").runs()
    os.close(fd)
    assert not place.runs()


@pytest.fixture
def prod(tmp_path, monkeypatch):
    """A server in the background that is named prod, as far as commands see."""
    for name in ("TANDEM_API_KEY", "OPENAI_API_KEY", "TANDEM_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TANDEM_STATE_DIR", str(tmp_path))
    place = Background("prod")
    lock = place.lock()
    (tmp_path / "keys").write_text("sk-one\nsk-two\n")
    place.write(Record(os.getpid(), "0.0.0.0", 4711, "m", time.time(), 1.0, api_key_file=str(tmp_path / "keys")))
    place.log.write_text("a line\n")
    yield place
    os.close(lock)


def test_a_server_is_named_by_its_name_alone_and_remedies_name_it(prod, capsys):
    with pytest.raises(UsageError, match=r"prod runs already \(.*\); `tandem down prod` ends it"):
        prod.lock()
    assert main(["down"]) == 0
    assert capsys.readouterr().out == "no server named default runs; prod runs: `tandem down prod` ends it\n"
    assert main(["logs", "prod"]) == 0
    assert capsys.readouterr().out == "a line\n"
    assert main(["status", "prod", "--json"]) == 1
    assert [one["name"] for one in json.loads(capsys.readouterr().out)] == ["prod"]
    assert main(["down", "prod", "--name", "dev"]) == 2
    assert "prod and --name dev name two servers" in capsys.readouterr().err


def test_commands_have_the_key_of_a_server_that_was_started_here(prod, monkeypatch):
    for words in ((), ("--port", "4711"), ("--name", "prod"), ("--url", "http://localhost:4711/v1")):
        arguments = build_parser().parse_args(["top", *words])
        assert api_key(arguments, server_url(arguments)) == "sk-one"
    assert api_key(arguments, "http://127.0.0.1:4712") == "" == api_key(arguments, "http://elsewhere:4711")
    monkeypatch.setenv("TANDEM_API_KEY", "mine")
    assert api_key(arguments, server_url(arguments)) == "mine"


def test_tokens_are_counted_over_time_in_which_an_engine_says_something_new() -> None:
    class Probe:
        """An engine that says every half second how far it is, at 100 tokens a second."""

        began = time.monotonic()

        def ask(self, _: float) -> SimpleNamespace:
            since = time.monotonic() - self.began
            return SimpleNamespace(age_s=since % 0.5, generated_tokens=round((since - since % 0.5) * 100))

    probe: Any = Probe()
    one = Replica(ReplicaInfo(0, "", "running", 1, 0), probe.ask(0), time.monotonic())
    count_tokens([one], {0: probe}, 0.1)
    assert one.tokens_per_s == pytest.approx(100, rel=0.05)


def test_what_to_do_with_a_server_that_has_keys():
    for server, key in (
        (ServerSettings(), False),
        (ServerSettings(api_key=("k",)), True),
        (ServerSettings(api_key_file="keys"), True),
    ):
        assert ('-H "Authorization: Bearer $TANDEM_API_KEY"' in farewell("http://x", server, stop="")) == key
    everywhere = farewell(local_url("https", "0.0.0.0", 8000), ServerSettings(host="0.0.0.0", port=8000), stop="")
    assert f"https://127.0.0.1:8000/ui (on other machines https://{socket.gethostname()}:8000/ui)\n" in everywhere


@pytest.mark.slow
def test_up_again_with_the_same_settings_changes_nothing_and_restart_keeps_them(tandem, server):
    again = tandem("up", tandem.model, "--port", "0", "-pp", "2")
    assert (again.returncode, again.stderr) == (0, "")
    assert f"default runs already with these settings: {server['address']}" in again.stdout
    assert tandem.status("--interval", "0")[0]["pid"] == server["pid"]
    other = tandem("up", tandem.model, "--port", "0")
    assert other.returncode == 2
    assert "default runs already (process " in other.stderr
    assert "sesame" not in "".join(file.read_text() for file in (tandem.state / "servers" / "default").iterdir())
    missing = subprocess.run(
        [sys.executable, "-m", "tandem", "restart"],
        capture_output=True,
        text=True,
        check=False,
        env={name: value for name, value in tandem.environment.items() if name != "TANDEM_API_KEY"},
        timeout=240,
    )
    assert missing.returncode == 2
    assert "set TANDEM_API_KEY again" in missing.stderr
    done = tandem("restart")
    assert done.returncode == 0, done.stderr
    assert "default is ready" in done.stdout
    seen = tandem.status("--interval", "0")[0]
    assert seen["pid"] != server["pid"]
    assert httpx.get(f"{seen['address']}/v1/models", timeout=240).status_code == 401
    key = {"x-api-key": "sesame"}
    assert httpx.get(f"{seen['address']}/v1/models", headers=key, timeout=240).status_code == 200


def git(*words: str) -> str:
    identity = ("-c", "user.name=Ann", "-c", "user.email=ann@example.org")
    return subprocess.run(["git", *identity, *words], capture_output=True, text=True, check=True).stdout


class Checkout:
    """A checkout, here with Tandem's code or without, and the repository that it follows."""

    def __init__(self, directory: Path, *, code: bool = False) -> None:
        self.origin, self.path = directory / "origin", directory / "checkout"
        (self.path / "scripts").mkdir(parents=True)
        (self.path / "scripts" / "setup").write_text("#!/bin/sh\necho set up\n")
        (self.path / "scripts" / "setup").chmod(0o755)
        (self.path / ".gitignore").write_text("__pycache__\n")
        if code:
            shutil.copytree(SOURCE / "tandem", self.path / "src" / "tandem")  # with what is compiled: a clone has nothing
        git("init", "-q", "-b", "main", str(self.path))
        self.publish("first", self.path)
        git("clone", "-q", str(self.path), str(self.origin))
        self("remote", "add", "origin", str(self.origin))
        self("fetch", "-q")
        self("branch", "-q", "-u", "origin/main")

    def __call__(self, *words: str) -> str:
        return git("-C", str(self.path), *words).strip()

    def publish(self, subject: str, where: Path | None = None) -> None:
        """Make a commit in the repository."""
        with ((where or self.origin) / "NEWS").open("a") as file:
            file.write(f"{subject}\n")
        git("-C", str(where or self.origin), "add", "-A")
        git("-C", str(where or self.origin), "commit", "-q", "-m", subject)


@pytest.mark.slow
def test_an_update_that_restarts_by_rolling_replaces_all_but_the_supervisor_and_cuts_no_stream(tandem, tmp_path, monkeypatch):
    checkout = Checkout(tmp_path, code=True)
    monkeypatch.setitem(tandem.environment, "PYTHONPATH", str(checkout.path / "src"))
    done = tandem("up", tandem.model, "--port", "0", "-dp", "2")
    try:
        assert done.returncode == 0, done.stderr
        [before] = tandem.status("--interval", "0")
        with (checkout.origin / "src" / "tandem" / "version.py").open("a") as file:
            file.write("# newer\n")
        checkout.publish("Newer code")
        supervisor, url = psutil.Process(before["pid"]), before["address"]
        bodies = [{"prompt": [3, 5, prompt], "max_tokens": 500, "temperature": 0, "stream": True} for prompt in range(4)]
        keys = {"Authorization": "Bearer sesame"}
        expected = [Call(url, body, keys).join().result["text"] for body in bodies]
        api, over, calls = api_of(supervisor).pid, threading.Event(), [Call(url, body, keys) for body in bodies]

        def ask() -> None:
            while not over.is_set():
                calls.extend(call.join() for call in [Call(url, body, keys) for body in bodies])

        thread = threading.Thread(target=ask)
        thread.start()
        try:
            done = tandem("update", "--restart")
        finally:
            over.set()
            thread.join()
        assert done.returncode == 0, done.stderr
        assert f"replica 1 runs Tandem {before['build']}, installed is 0." in done.stdout and "set up" in done.stdout
        assert "all processes but the supervisor were replaced" in done.stdout
        for number, call in enumerate(calls):
            assert call.join().result.get("done") and call.result["text"] == expected[number % 4], call.result
        [after] = tandem.status("--interval", "0")
        assert (after["pid"], after["state"], [one["replica"] for one in after["replicas"]]) == (before["pid"], "ready", [2, 3])
        [note] = after["notes"]
        assert note.startswith(f"supervisor of Tandem {before['build']}, replicas of ")
        wait_until(lambda: not psutil.pid_exists(api), "the old api ends")
        assert api_of(supervisor).pid != api
        assert "runs already with these settings" in tandem("up", tandem.model, "--port", "0", "-dp", "2").stdout
    finally:
        tandem("down", "--now")


def test_an_update_is_looked_at_first_and_one_that_cannot_be_changes_nothing(tmp_path, monkeypatch, capfd):
    checkout = Checkout(tmp_path)
    monkeypatch.setenv("TANDEM_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("TANDEM_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("tandem.cli.hosts.update.CHECKOUT", checkout.path)

    def update() -> str:
        head = checkout("rev-parse", "HEAD")
        assert main(["update"]) == 2
        assert checkout("rev-parse", "HEAD") == head
        return capfd.readouterr().err

    checkout.publish("theirs \x1b[31mred")
    assert main(["update", "--check"]) == 0 and re.search(
        r"origin/main has more: 1\n  \w+ theirs \[31mred", capfd.readouterr().out
    )
    monkeypatch.setenv("TANDEM_RUNTIME_DIR", "/dev/null")
    assert main(["update", "--check"]) == 2 and "File exists" in capfd.readouterr().err, "the servers cannot be asked"
    monkeypatch.setenv("TANDEM_RUNTIME_DIR", str(tmp_path))
    (checkout.path / "NEWS").write_text("mine\n")
    assert "has local changes (NEWS): commit them, or `git stash`" in update()
    checkout("commit", "-q", "-a", "-m", "mine")
    assert "git merge in" in (said := update()) and "`git rebase`" in said
    checkout("reset", "-q", "--hard", "HEAD^")
    checkout("remote", "set-url", "origin", str(tmp_path / "gone"))
    assert "gone' does not appear to be a git repository" in (said := update()) and said.endswith("Nothing was changed\n")
    checkout("remote", "set-url", "origin", str(checkout.origin))
    checkout("checkout", "-q", "--detach")
    assert "HEAD does not point to a branch; `git switch main`" in update()
    checkout("switch", "-q", "main")
    (checkout.origin / "mine").touch()
    checkout.publish("A file that is here too")
    (checkout.path / "mine").touch()
    assert "would be overwritten by merge: mine Please move" in update()
    (checkout.path / "mine").unlink()
    (checkout.origin / "scripts" / "setup").write_text("#!/bin/sh\nexit 1\n")
    checkout.publish("set-up that fails")
    before = checkout("describe", "--always")
    for _ in range(2):  # it is not taken for up to date
        assert main(["update"]) == 2 and f"update again, or `git reset --keep {before}` goes back" in capfd.readouterr().err
    (checkout.origin / "scripts" / "setup").unlink()
    checkout.publish("no set-up")
    assert main(["update"]) == 2 and "has the new code without its environment" in capfd.readouterr().err
    monkeypatch.setattr("tandem.cli.hosts.update.CHECKOUT", tmp_path)
    assert "this Tandem is no checkout: `" in update()
    monkeypatch.setattr("tandem.cli.hosts.update.CHECKOUT", checkout.path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["update"]) == 2 and "git cannot be run" in capfd.readouterr().err


def test_a_server_is_ready_when_it_has_said_so_not_when_its_engines_are(monkeypatch):
    """Its api may hear of them later, and refuses requests until then."""
    place = SimpleNamespace(
        name="x",
        runs=lambda: True,
        record=lambda: SimpleNamespace(host="127.0.0.1", pid=1, model="m", started_at=0.0, scheme="http", port=1),
    )
    probe = SimpleNamespace(
        ask=lambda seconds: SimpleNamespace(state="ready", detail="", degraded="", model="m"), close=lambda: None
    )
    monkeypatch.setattr("tandem.cli.status.StatusProbe", lambda endpoint: probe)
    engine = ReplicaInfo(0, "ipc://x", "running", 2, 0)
    for announced, state in ((False, "starting"), (True, "ready")):
        monkeypatch.setattr("tandem.cli.status.ask", lambda *_, said=announced: ReplicaList([engine], announced=said))
        assert look_at(place, 0.0).state == state


def test_tokens_a_second_are_counted_between_the_times_that_two_statuses_tell_of(monkeypatch):
    """An engine publishes its status now and then: what it says may be older than the answer."""

    def status(tokens, age):
        return SimpleNamespace(state="ready", detail="", degraded="", model="m", generated_tokens=tokens, age_s=age)

    now = [100.0]
    monkeypatch.setattr(
        "tandem.cli.status.time",
        SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds)),
    )
    engine = ReplicaInfo(0, "ipc://x", "running", 2, 0)
    monkeypatch.setattr("tandem.cli.status.ask", lambda *_: ReplicaList([engine]))
    for answers, rate in (
        ([status(10, 0.4), status(110, 0.0)], 100 / 1.4),
        ([status(10, 0.0), status(110, 0.5)], 200.0),
        ([status(10, 0.0), status(10, 1.0)], 0.0),
        ([status(10, 0.0), None], None),
    ):
        probe = SimpleNamespace(ask=lambda seconds, left=answers: left.pop(0), close=lambda: None)
        monkeypatch.setattr("tandem.cli.status.StatusProbe", lambda endpoint, probe=probe: probe)
        [replica] = look_at_port(1, 1.0).replicas
        assert replica.tokens_per_s == (rate if rate is None else pytest.approx(rate))


def test_weights_that_are_not_all_wired_are_said_in_a_line(monkeypatch, capsys):
    words = "30.0 of 40.0 GiB of weights are wired, more would leave this Mac too little"
    ranks = [
        RankInfo(
            rank=number, stage=0, layers=(0, 4), pid=1, host="a-mac", weight_bytes=9, peak_bytes=2, step_s=0.1, wiring=trouble
        )
        for number, trouble in enumerate(["", words])
    ]
    monkeypatch.setattr("tandem.cli.status.ask", lambda *_: ReplicaList([ReplicaInfo(0, "ipc://x", "running", 2, 0)]))
    probe = SimpleNamespace(ask=lambda seconds: structs.replace(STATUS, ranks=ranks), close=lambda: None)
    monkeypatch.setattr("tandem.cli.status.StatusProbe", lambda endpoint: probe)
    main(["status", "--port", "1"])
    said = capsys.readouterr().out
    assert f"part 2 (a-mac): {words}" in said
    assert "part 1 (a-mac):" not in said


def test_a_server_in_the_foreground_is_found_at_the_default_port(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("TANDEM_RUNTIME_DIR", str(tmp_path))  # another's server at that port is none of this test's
    monkeypatch.setattr("tandem.cli.status.known_names", lambda: [])
    assert main(["status"]) == 1
    assert "no server runs in the background, nor at port 8000; `tandem up demo` starts one" in capsys.readouterr().out
    monkeypatch.setattr("tandem.cli.status.ask", lambda *_: ReplicaList([ReplicaInfo(0, "ipc://x", "running", 2, 0)]))
    probe = SimpleNamespace(ask=lambda seconds: STATUS, close=lambda: None)
    monkeypatch.setattr("tandem.cli.status.StatusProbe", lambda endpoint: probe)
    main(["status", "--interval", "0"])
    assert "port 8000" in capsys.readouterr().out


def test_code_that_differs_between_supervisor_replicas_and_machines_is_said(monkeypatch, capsys):
    rank = RankInfo(
        rank=1, stage=0, layers=(0, 4), pid=1, host="mac-b", weight_bytes=9, peak_bytes=2, step_s=0.1, build="0.1.0+b"
    )
    replicas, here = [ReplicaInfo(0, "ipc://x", "running", 2, 0)], build()
    for supervisor, engine, ranks, said in (
        (here, here, [structs.replace(rank, build=here)], []),
        ("0.1.0+a", here, [], [f"supervisor of Tandem 0.1.0+a, replicas of {here}: `tandem restart` replaces it too"]),
        ("0.1.0+a", "0.1.0+a", [], [f"replica 0 runs Tandem 0.1.0+a, installed is {here}: `tandem restart --rolling` takes it"]),
        (here, here, [rank], [f"part 2 (mac-b): runs Tandem 0.1.0+b, its engine {here}: `tandem hosts sync --hostfile FILE`"]),
    ):
        monkeypatch.setattr("tandem.cli.status.ask", lambda *_, of=supervisor: ReplicaList(replicas, build=of))
        status = structs.replace(STATUS, ranks=ranks, build=engine)
        probe = SimpleNamespace(ask=lambda seconds, of=status: of, close=lambda: None)
        monkeypatch.setattr("tandem.cli.status.StatusProbe", lambda endpoint, of=probe: of)
        main(["status", "--port", "1"])
        lines = [line for line in capsys.readouterr().out.splitlines() if " Tandem " in line]
        assert [line[: len(words)] for line, words in zip(lines, said, strict=True)] == said


def test_sockets_of_engines_that_were_killed_with_their_supervisor_are_removed(monkeypatch):
    with tempfile.TemporaryDirectory(dir="/tmp") as runtime, socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setenv("TANDEM_RUNTIME_DIR", runtime)
        port = listener.getsockname()[1]
        for number in (port, f"{port}-0", f"{port}-12", f"{port}0-1"):
            Path(runtime, f"engine-{number}.sock").touch()
        _completed(Settings(model=ModelSettings(model="tiny")), listener)
        assert {path.name for path in Path(runtime).iterdir()} == {f"engine-{port}.sock", f"engine-{port}0-1.sock"}


def test_a_followed_log_keeps_characters_whole(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TANDEM_STATE_DIR", str(tmp_path))
    place = Background("default")
    os.close(place.lock())
    place.log.write_bytes(b"")
    parts = [b"W\xc3", b"\xb6rt\n", b"\xe2\x82"]

    def server_writes(_: float) -> None:
        if parts:
            with place.log.open("ab") as log:
                log.write(parts.pop(0))

    monkeypatch.setattr("tandem.cli.lifecycle.time.sleep", server_writes)
    monkeypatch.setattr(Background, "runs", lambda _: bool(parts))
    assert main(["logs", "--follow"]) == 0
    assert capsys.readouterr().out == "Wört\n\ufffd"


def test_ctrl_c_leaves_a_rolling_restart_to_the_server(monkeypatch, capsys):
    settings, written = Settings(model=ModelSettings(model="tiny")), []
    place = SimpleNamespace(
        name="x", runs=lambda: True, record=lambda: Record(1, "127.0.0.1", 1, "m", 0.0, 0.0), write=written.append
    )

    def ask(_, request):
        if isinstance(request, ListReplicas) and request.events_after:
            raise KeyboardInterrupt
        return ReplicaList([], events=[Event(7, 0.0, "server_ready", "it is ready")])

    monkeypatch.setattr("tandem.cli.lifecycle.ask", ask)
    assert _roll(place, settings, SimpleNamespace(sync=False, no_wait=False)) == 130
    assert "x goes on restarting; `tandem status` shows how far it is" in capsys.readouterr().err
    assert [record.settings for record in written] == [digest(settings)], "`tandem up` compares with what will run"
