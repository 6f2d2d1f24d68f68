"""Children get their payload unseen and never outlive their parent; process groups name ports and devices."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from pids import gone
from system_packages import missing
from tandem.env import child_environment
from tandem.errors import LayoutError
from tandem.launchers.local import LocalLauncher
from tandem.launchers.process_groups import free_ports, make_process_group, visible_gpus
from tandem.processes.child import ChildProcess
from tandem.processes.interpreter import code_command

CHILD = """
import sys, time
from tandem.processes.child import receive_payload, watch_lifeline
payload = receive_payload()
watch_lifeline()
open(sys.argv[1], "wb").write(payload)
time.sleep(60)
"""


@pytest.fixture
def module(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "a_child.py").write_text(CHILD)
    return child_environment({"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"})


def wait_for(path: Path) -> bytes:
    deadline = time.monotonic() + 240
    while not path.exists() or not path.read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return path.read_bytes()


def test_the_payload_arrives_and_does_not_show_in_the_arguments(tmp_path: Path, module: dict[str, str]) -> None:
    child = ChildProcess("a_child", b"secret", env=module, name="child", arguments=[str(tmp_path / "got")])
    try:
        assert wait_for(tmp_path / "got") == b"secret"
        assert "secret" not in " ".join(psutil.Process(child.pid).cmdline())
        assert child.poll() is None and child.describe_exit() == "is running"
    finally:
        child.kill()
    assert child.wait(240) and child.describe_exit() == "was killed (SIGKILL)"


def test_a_stopped_child_can_be_killed(tmp_path: Path, module: dict[str, str]) -> None:
    child = ChildProcess("a_child", b"x", env=module, name="child", arguments=[str(tmp_path / "got")])
    wait_for(tmp_path / "got")
    os.kill(child.pid, signal.SIGSTOP)
    # Of two pending signals the kernel takes the lower first: wait until it has stopped, or SIGTERM ends it.
    while psutil.Process(child.pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    child.terminate()
    assert not child.wait(0.3)
    child.kill()
    assert child.wait(240)


def test_a_child_goes_with_its_parent(tmp_path: Path, module: dict[str, str]) -> None:
    parent = f"""
import time
from tandem.processes.child import ChildProcess
from tandem.processes.interpreter import code_command
child = ChildProcess("a_child", b"x", env={module!r}, name="child", arguments=[{str(tmp_path / "got")!r}])
print(child.pid, flush=True)
time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True, env=module)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    wait_for(tmp_path / "got")
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 240
    while not gone(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_ring_process_groups_use_ports_of_their_own_and_clean_up() -> None:
    process_group = make_process_group("ring", 3, 0)
    variables = [process_group.variables(i) for i in range(3)]
    path = Path(variables[0]["MLX_HOSTFILE"])
    hosts = json.loads(path.read_text())
    assert len({host for [host] in hosts}) == 3 and [v["MLX_RANK"] for v in variables] == ["0", "1", "2"]
    process_group.remove()
    assert not path.exists()


def test_nccl_ranks_take_the_gpus_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    assert visible_gpus() == ["4", "5", "6"]
    process_group = make_process_group("nccl", 2, 1)
    assert [process_group.variables(i)["CUDA_VISIBLE_DEVICES"] for i in range(2)] == ["5", "6"]
    with pytest.raises(LayoutError, match="needs 4 GPUs"):
        make_process_group("nccl", 3, 1)


@pytest.mark.parametrize(
    ("named", "gpus"),
    [
        ("", []),
        (" ", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("1, 0", ["1", "0"]),
        ("2,-1,3", ["2"]),
        ("GPU-8932f937,MIG-5c89852c", ["GPU-8932f937", "MIG-5c89852c"]),
    ],
)
def test_gpus_end_where_the_variable_names_none_as_in_cuda(monkeypatch: pytest.MonkeyPatch, named: str, gpus: list[str]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert visible_gpus() == gpus


def test_ranks_with_gpus_of_their_own_are_joined_by_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    def backend(asked: str, gpus: str, cuda: bool) -> str:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
        process_group = LocalLauncher(1, cuda=cuda).process_group(asked, [1, 2])
        process_group.remove()
        return process_group.backend

    assert backend("auto", "0,1,2", cuda=True) == "nccl"
    assert backend("auto", "0,1", cuda=True) == backend("auto", "0,1,2", cuda=False) == "ring"
    assert backend("ring", "0,1,2", cuda=True) == "ring"
    with pytest.raises(LayoutError, match="2 ranks that MLX joins .* need a GPU each, there are 1"):
        backend("ring", "3", cuda=True)
    assert backend("ring", "3", cuda=False) == "ring"


def test_more_ranks_than_gpus_take_them_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_rank.py").write_text("import os\nopen(os.environ['TOLD'], 'w').write(os.environ['CUDA_VISIBLE_DEVICES'])\n")

    def gpu(rank: int, ranks: int) -> bytes:
        told = tmp_path / f"told{rank}"
        child = LocalLauncher(1, "a_rank").start(rank, ranks, b"", {"PYTHONPATH": str(tmp_path), "TOLD": str(told)})
        try:
            return wait_for(told)
        finally:
            child.kill()
            child.wait(240)

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    assert [gpu(rank, 3) for rank in range(3)] == [b"4", b"5", b"4"]


def test_ranks_have_gpus_of_their_own_where_there_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    for gpus, count, own in (("0,1", 2, True), ("0,1", 3, False), ("0,1", 1, False), ("", 2, False)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
        assert [place.own_gpu for place in LocalLauncher(1).recruit(count, 0.0)] == [own] * count
    assert visible_gpus() == []


def test_a_child_outlives_the_thread_that_started_it(tmp_path: Path, module: dict[str, str]) -> None:
    children: list[ChildProcess] = []

    def start() -> None:
        children.append(ChildProcess("a_child", b"x", env=module, name="child", arguments=[str(tmp_path / "got")]))
        wait_for(tmp_path / "got")

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert not children[0].wait(0.5)
    children[0].kill()
    assert children[0].wait(240)


def test_backends_that_need_a_host_file_say_so() -> None:
    with pytest.raises(LayoutError, match="--backend jaccl"):
        make_process_group("jaccl", 2, 0)


def test_ports_for_later_are_none_that_outgoing_connections_get() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as outgoing:
        first = min(32768, outgoing.getsockname()[1])
        assert all(20000 <= port < first for port in free_ports(50))
        [mine] = free_ports(1, wanted=[server.getsockname()[1]])  # taken
        assert mine < first
    with pytest.raises(OSError, match="assign"):
        free_ports(1, "192.0.2.77")


def test_free_ports_can_be_bound() -> None:
    ports = free_ports(5)
    assert len(set(ports)) == 5
    for port in ports:
        with socket.socket() as one:
            one.bind(("127.0.0.1", port))


LOCKED = """
import ctypes, subprocess, sys
from tandem.processes.child import guarded_lifeline
with guarded_lifeline("darwin"):
    pass
with guarded_lifeline("darwin"):
    print("locked", flush=True)
    ctypes.PyDLL(None).sleep(300)  # with the interpreter lock, as MLX's ring start-up
"""


@pytest.mark.skipif(bool(missing("ps")), reason=missing("ps"))
def test_a_child_that_keeps_the_interpreter_lock_goes_with_its_parent_without_the_kernels_help() -> None:
    with subprocess.Popen(code_command(LOCKED), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        try:
            assert child.stdin is not None
            assert child.stdout is not None
            assert child.stdout.readline() == b"locked\n"
            assert len(psutil.Process(child.pid).children()) == 1, "the first guard has gone"
            child.stdin.close()
            assert child.wait(240) == -signal.SIGKILL
        finally:
            child.kill()


@pytest.mark.parametrize("sent", [b"", b"half of it"])
def test_a_parent_that_goes_before_the_payload_is_whole_costs_no_traceback(sent: bytes) -> None:
    code = "from tandem.processes.child import receive_payload; receive_payload(); print('went on')"
    ended = subprocess.run(code_command(code), input=sent, capture_output=True, timeout=240, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, b"", b"")


def test_an_ended_child_is_told_nothing(tmp_path: Path, module: dict[str, str]) -> None:
    child = ChildProcess("a_child", b"", env=module, name="child", arguments=[str(tmp_path / "got")])
    child.kill()
    assert child.wait(240)
    child.tell(b"more")
