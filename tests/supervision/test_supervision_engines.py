"""What each replica is told, and the control socket."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import threading
import time
from pathlib import Path

import msgspec
import pytest
import zmq

from served import wait_until
from statuses import STATUS
from tandem.config.loading import build
from tandem.errors import UsageError
from tandem.launchers.host_addresses import ranks_of
from tandem.protocol.events import History
from tandem.protocol.supervisor_messages import AddReplica, Done, DrainReplica, ListReplicas, ReplicaList
from tandem.supervision.control_socket import ControlServer, ask
from tandem.supervision.engines import EngineSet
from tandem.supervision.replica_process import gpus_of, replica_settings


def settings(**values):
    return build({"model": "m", "engine_socket": "/run/engine-8000.sock", **values})


def test_one_replica_keeps_its_settings():
    given = settings(pipeline_parallel_size=2)
    assert replica_settings(given, 0) == given
    joined = replica_settings(given, 1)
    assert joined.process.engine_socket == "/run/engine-8000-1.sock"
    assert dataclasses.replace(joined, process=given.process) == given


@pytest.mark.parametrize("count", [1, 2])
def test_engines_are_not_told_api_keys(count):
    given = settings(api_key=("secret",), api_key_file="/keys", data_parallel_size=count)
    server = replica_settings(given, 0).server
    assert server.api_key == () and server.api_key_file is None


def test_several_share_cores_and_memory(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    given = settings(data_parallel_size=2, parallel=(2, 1), memory_fraction=0.8, max_memory="2MB")
    assert ranks_of(given.parallel) == 3
    parts = [replica_settings(given, index) for index in (0, 1)]
    assert [part.process.engine_socket for part in parts] == ["/run/engine-8000-0.sock", "/run/engine-8000-1.sock"]
    for part in parts:
        assert part.parallel.threads_per_rank == 2
        assert part.parallel.data_parallel_size == 1
        assert part.scheduler.memory_fraction == pytest.approx(0.4) and part.scheduler.max_memory == str(2**20)
    assert replica_settings(settings(data_parallel_size=40), 0).parallel.threads_per_rank == 1
    assert replica_settings(settings(data_parallel_size=2, threads_per_rank=5), 1).parallel.threads_per_rank == 5


def test_gpus_are_shared_out_when_there_are_enough(monkeypatch):
    given = settings(data_parallel_size=2, tensor_parallel_size=2, memory_fraction=0.8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7,8")
    assert [gpus_of(given, index) for index in range(3)] == ["4,5", "6,7", "4,5"]
    assert replica_settings(given, 1).scheduler.memory_fraction == 0.8
    assert gpus_of(settings(), 0) is None


def test_gpus_need_not_be_listed(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("glob.glob", lambda pattern: ["/dev/nvidia0", "/dev/nvidia1"])
    given = settings(data_parallel_size=2, memory_fraction=0.8)
    assert [gpus_of(given, index) for index in range(3)] == ["0", "1", "0"]
    assert replica_settings(given, 0).scheduler.memory_fraction == 0.8
    assert [gpus_of(settings(), index) for index in range(2)] == [None, "1"]  # added to a server that began with one


def test_more_ranks_than_gpus_take_turns_and_divide_their_memory(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    given = settings(data_parallel_size=2, tensor_parallel_size=2, memory_fraction=0.8)
    assert [gpus_of(given, index) for index in range(2)] == ["4,5", "6,4"]
    assert replica_settings(given, 0).scheduler.memory_fraction == pytest.approx(0.4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    assert gpus_of(given, 0) is None
    assert replica_settings(given, 0).scheduler.memory_fraction == pytest.approx(0.4)


@pytest.fixture
def control(tmp_path):
    path = tmp_path / "serve-1.sock"

    def handle(request):
        if isinstance(request, DrainReplica):
            raise UsageError(f"no {request.replica}")
        return Done(3) if isinstance(request, AddReplica) else ReplicaList([])

    server = ControlServer(path, handle)
    over = threading.Event()

    def run():
        while not over.is_set():
            server.serve(0.05)

    thread = threading.Thread(target=run)
    thread.start()
    yield path
    over.set()
    thread.join()
    server.close()
    assert not path.exists()


def test_control_socket(control):
    assert control.stat().st_mode & 0o777 == 0o600
    assert ask(control, ListReplicas()) == ReplicaList([])
    assert ask(control, AddReplica()) == Done(3)
    with pytest.raises(UsageError, match="no 7"):
        ask(control, DrainReplica(7))
    with zmq.Context() as context, context.socket(zmq.REQ) as client:
        client.connect(f"ipc://{control}")
        client.send(b"\xc1 nonsense")
        assert client.poll(240_000)
        assert b"cannot be read" in client.recv()
    with pytest.raises(UsageError, match="listens on"):
        ControlServer(control, lambda request: ReplicaList([]))


def test_a_control_socket_whose_file_was_removed_is_reached_again(control, monkeypatch):
    monkeypatch.setattr("tandem.transport.socket_file.LOOK_S", 0.1)
    control.unlink()
    wait_until(control.exists)
    assert ask(control, AddReplica()) == Done(3)


def test_nobody_there(tmp_path):
    path = tmp_path / "serve-1.sock"
    path.touch()
    with pytest.raises(UsageError, match="no server listens"):
        ask(path, ListReplicas())
    ControlServer(path, lambda request: ReplicaList([])).close()


class FakeChild:
    """A process that ends when it is told to."""

    started: list[FakeChild]

    def __init__(self, module, payload, *, env, name, arguments, pass_fds):
        self.name, self.arguments, self.code, self.pid = name, arguments, None, 1
        self.words = os.dup(pass_fds[0]) if pass_fds else None
        self.started.append(self)

    stopped = False

    def poll(self):
        return self.code

    def kill(self):
        self.code = -9

    def describe_exit(self):
        return f"exited with code {self.code}"

    def terminate(self):
        self.code = 0

    def wait(self, timeout_s):
        return self.code is not None


class FakeProbe:
    """Asks an engine that never answers."""

    def __init__(self, endpoint, context):
        pass

    def ask(self):
        return None

    def tell(self, neighbours):
        pass

    def close(self):
        pass


@pytest.fixture
def children(monkeypatch):
    FakeChild.started = []
    monkeypatch.setattr("tandem.supervision.engines.StatusProbe", FakeProbe)
    monkeypatch.setattr("tandem.supervision.children.ChildProcess", FakeChild)
    monkeypatch.setattr("tandem.supervision.children.BACKOFF_S", 0.0)
    monkeypatch.setattr("tandem.supervision.replica_process.REST_S", 600.0)
    return FakeChild.started


def started(*, announced=False, history=None, **values):
    engines = EngineSet(settings(**values), history=history)
    engines.start()
    engines.announced = announced
    return engines


def test_a_single_engine_that_gives_up_ends_the_server(children):
    for code, expected in ((2, 2), (3, 3)):
        engines = started()
        assert engines.look() is None
        children[-1].code = code
        assert engines.look() == expected


@pytest.mark.parametrize("code", [-9, 1, 4, 0])  # 0: by a SIGTERM that was not ours
def test_a_single_engine_that_is_killed_is_started_again_within_bounds(children, code):
    engines = started()
    for deaths in range(1, 6):
        children[-1].code = code
        assert engines.look() is None
        assert [info.state for info in engines.infos()] == ["restarting"]
        assert engines.look() is None
        assert engines.infos()[0].restarts == deaths
        assert children[-1].arguments[0] == "engine" and len(children[-1].arguments) == 2
    children[-1].code = code
    assert engines.look() == 3


def test_the_history_says_why_an_engine_was_replaced_and_given_up(children):
    history = History()
    engines = EngineSet(settings(max_restarts=1), history=history)
    engines.start()
    children[-1].code = -9
    assert engines.look() is None
    assert engines.look() is None
    children[-1].code = -9
    assert engines.look() == 3
    lost, failed = history.after()
    assert (lost.kind, lost.level, lost.replica) == ("replica_lost", "error", 0) and "exited with code -9" in lost.text
    assert failed.kind == "replica_failed" and lost.remedy


def test_an_engine_that_serves_between_its_deaths_is_never_given_up(children, monkeypatch):
    monkeypatch.setattr("tandem.supervision.children.SERVES_S", 0.0)
    engines = started()
    for deaths in range(1, 20):
        engines._replicas[0].serves()
        children[-1].code = -9
        assert engines.look() is None
        assert engines.look() is None
        assert engines.infos()[0].restarts == deaths


def test_an_engine_that_stands_still_is_killed_and_replaced(children, monkeypatch):
    monkeypatch.setattr("tandem.supervision.children.STOPPED_S", 0.05)
    engines = started()
    children[0].stopped = True
    assert engines.look() is None
    assert children[0].code is None, "a short stop is forgiven"
    time.sleep(0.1)
    assert engines.look() is None
    assert children[0].code == -9
    assert engines.look() is None
    assert engines.look() is None
    assert len(children) == 2


def test_an_engine_whose_main_loop_stands_still_is_replaced(children, monkeypatch):
    answers = [
        msgspec.structs.replace(STATUS, age_s=age, state=state)
        for age, state in ((0.0, "ready"), (19.0, "recovering"), (99.0, "starting"), (21.0, "ready"))
    ]

    class Probe(FakeProbe):
        def ask(self):
            return answers.pop(0)

    monkeypatch.setattr("tandem.supervision.engines.StatusProbe", Probe)
    monkeypatch.setattr("tandem.supervision.engines.ASK_S", 0.0)
    engines = started(announced=True)
    for _ in range(3):
        assert engines.look() is None
        assert children[0].code is None
        time.sleep(0.001)
    assert engines.look() is None
    assert children[0].code == -9


def test_one_of_several_is_started_again_within_bounds(children):
    engines = started(data_parallel_size=2, announced=True)
    assert [child.arguments[::2] for child in children] == [("engine", "0"), ("engine", "1")]
    for deaths in range(1, 6):
        children[-1].code = -9
        assert engines.look() is None
        assert [info.state for info in engines.infos()] == ["running", "restarting"]
        assert engines.look() is None
        assert engines.infos()[1].restarts == deaths
        assert children[-1].arguments[::2] == ("engine", "1")
    children[-1].code = -9
    assert engines.look() is None
    assert [info.state for info in engines.infos()] == ["running", "failed"]
    assert list(engines.statuses()) == [0], "nobody waits for it"
    count = len(children)
    assert engines.look() is None
    assert len(children) == count, "it rests"
    engines._replicas[1].restart_at = 0.0
    assert engines.look() is None
    assert len(children) == count + 1, "and is tried again"
    children[-1].code = -9
    assert engines.look() is None
    assert "given up for now" in engines.infos()[1].detail
    with pytest.raises(UsageError, match="last one"):
        engines.drain(0)
    for _ in range(6):
        children[0].code = -9
        code = engines.look()
        engines.look()
        children[0] = children[-1]
    assert code == 3, "none is left"


def test_a_mistake_in_the_settings_ends_all_at_the_start(children):
    engines = started(data_parallel_size=2)
    children[1].code = 2
    assert engines.look() == 2


def test_numbers_are_never_given_twice_and_the_last_stays(children):
    engines = started()
    for index, word in ((0, "last one"), (5, "no replica 5")):
        with pytest.raises(UsageError, match=word):
            engines.drain(index)
    assert engines.add() == 1
    assert engines.drain(1) == 1
    assert engines.look() is None
    assert [info.replica for info in engines.infos()] == [0]
    assert engines.add() == 2
    engines.drain(0)
    with pytest.raises(UsageError, match="already"):
        engines.drain(0)
    assert engines.look() is None
    assert Path(engines.infos()[0].endpoint).name == "engine-8000-2.sock"


def test_each_replica_has_its_role_and_one_that_is_added_the_role_that_it_is_given(children):
    engines = EngineSet(settings(data_parallel_size=2, roles=("prefill", "both"), kv_disk="kv"))
    engines.start()
    engines.add("decode")
    engines.add()
    assert [one.role for one in engines.infos()] == ["prefill", "both", "decode", "both"]
    without = EngineSet(settings())
    without.start()
    with pytest.raises(UsageError, match="--role decode: .*--kv-disk DIR"):
        without.add("decode")
    assert [one.role for one in without.infos()] == ["both"]


class Answers(FakeProbe):
    """Asks an engine that is ready."""

    def ask(self):
        return STATUS


@pytest.mark.parametrize("count", [1, 2])
def test_what_an_engine_finds_amiss_once_it_has_served_is_waited_for(children, monkeypatch, count):
    """Its model's files are away: that was no mistake in the settings."""
    monkeypatch.setattr("tandem.supervision.engines.StatusProbe", Answers)
    engines = started(data_parallel_size=count)
    assert engines.look() is None
    assert [status.state for status in engines.statuses().values()] == ["ready"] * count
    engines.announced = True
    for deaths in range(1, 6):
        os.write(children[-1].words, b"config.json cannot be read")
        children[-1].code = 2
        assert engines.look() is None
        info = engines.infos()[-1]
        assert (info.state, info.restarts) == ("restarting", deaths - 1)
        assert "config.json cannot be read" in info.detail
        assert engines.look() is None
        assert engines.infos()[-1].detail == ""
    children[-1].code = 2
    assert engines.look() == (3 if count == 1 else None)
    engines.close()


@pytest.mark.parametrize("code", [2, 3])
def test_a_rolling_restart_goes_back_when_a_successor_does_not_start(children, monkeypatch, code):
    monkeypatch.setattr("tandem.supervision.engines.StatusProbe", Answers)
    history = History()
    engines = started(data_parallel_size=2, history=history, roles=("prefill", "decode"), kv_disk="/kv")
    engines.look()
    engines.announced = True
    old, new = engines.settings, settings(data_parallel_size=2, kv_tokens=4096, kv_disk="/kv")
    engines.roll(new)
    assert not engines.roll_on() and [info.state for info in engines.infos()] == ["draining", "running"]
    engines.look()
    assert [(info.replica, info.role) for info in engines.infos()] == [(1, "decode"), (2, "prefill")]
    assert engines._replicas[2].settings.scheduler.kv_tokens == 4096 and engines._replicas[2].place == 0
    assert not engines.roll_on(), "it has not been ready"
    engines.look()
    assert not engines.roll_on() and [info.state for info in engines.infos()] == ["draining", "running"]
    engines.look()
    children[-1].code = code
    for _ in range(2):
        assert engines.look() is None
    assert engines.went_back and engines.roll_on() and history.after()[-1].kind in ("rolling_failed", "replica_lost")
    assert "rolling_failed" in [event.kind for event in history.after()]
    assert engines.settings is old and engines._replicas[3].settings.scheduler.kv_tokens is None
    assert [(info.replica, info.role, info.state) for info in engines.infos()] == [
        (2, "prefill", "running"),
        (3, "decode", "running"),
    ]
    engines.close()


@pytest.mark.parametrize(("code", "waits"), [(-9, False), (2, True)], ids=["crashed", "found something amiss"])
def test_who_has_crashed_once_is_started_again_at_once(children, monkeypatch, code, waits):
    monkeypatch.setattr("tandem.supervision.children.BACKOFF_S", 100.0)
    engines = started()
    engines._replicas[0].serves()
    children[-1].code = code
    assert engines.look() is None
    assert (engines._replicas[0].restart_at > time.monotonic()) == waits


def test_an_added_replica_that_cannot_start_is_not_kept(children, monkeypatch):
    monkeypatch.setattr("tandem.supervision.engines.StatusProbe", Answers)
    engines = started()
    assert engines.look() is None
    engines.announced = True
    engines.add()
    children[-1].code = 2
    assert engines.look() is None
    assert [info.replica for info in engines.infos()] == [0]
    engines.close()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors")
@pytest.mark.parametrize(
    "error",
    [
        BlockingIOError(11, "Resource temporarily unavailable"),
        MemoryError(),
        OSError(12, "Cannot allocate memory"),
        OSError(24, "Too many open files"),
        RuntimeError("can't start new thread"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_process_that_cannot_be_had_is_tried_again_and_leaves_nothing_open(monkeypatch, error):
    real, left = subprocess.Popen, [error] * 3

    def popen(*arguments, **options):
        if left:
            raise left.pop()
        return real(["true"], stdin=subprocess.PIPE, pass_fds=options["pass_fds"])

    monkeypatch.setattr("tandem.processes.child.subprocess.Popen", popen)
    monkeypatch.setattr("tandem.supervision.children.BACKOFF_S", 0.0)
    engines = EngineSet(settings())
    before = len(os.listdir("/proc/self/fd"))
    engines.start()
    for _ in range(2):
        assert [info.state for info in engines.infos()] == ["restarting"]
        assert "cannot be started" in engines.infos()[0].detail
        assert len(os.listdir("/proc/self/fd")) <= before
        assert engines.look() is None
    assert engines.look() is None
    assert [(info.state, info.restarts) for info in engines.infos()] == [("running", 0)], "it has not died"
    [child] = engines.children
    assert child.wait(240)
    engines.close()


def test_no_descriptor_for_a_pipe_or_a_probe_ends_nothing(children, monkeypatch):
    engines = EngineSet(settings())
    monkeypatch.setattr("tandem.supervision.replica_process.os.pipe", lambda: (_ for _ in ()).throw(OSError(24, "Too many")))
    engines.start()
    assert engines.look() is None and not children
    monkeypatch.undo()
    monkeypatch.setattr("tandem.supervision.children.ChildProcess", FakeChild)
    engines._replicas[0].restart_at = 0.0
    assert engines.look() is None and len(children) == 1

    def no_socket(context, kind):
        raise zmq.ZMQError(24)

    monkeypatch.setattr("tandem.supervision.engines.zmq.Context.socket", no_socket)
    assert engines.look() is None
    assert engines.statuses() == {0: None}
    monkeypatch.undo()
    engines.close()
