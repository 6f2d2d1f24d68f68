from __future__ import annotations

import resource
import subprocess
import sys
import time

import msgspec
import psutil
import pytest

from tandem.descriptors import raise_limit
from tandem.protocol.payloads import HostPayload
from tandem.transport.security import ClusterKeys


def _child(soft: int, hard: int, code: str) -> list[int]:
    """Numbers that `code` prints in a process with these limits."""
    done = subprocess.run(
        [sys.executable, "-c", f"import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))\n{code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    return [int(word) for word in done.stdout.split()]


SHOW = "from tandem.descriptors import raise_limit\nprint(raise_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE))"


def test_a_low_limit_is_raised_as_far_as_the_hard_one_lets_it() -> None:
    hard = min(2000, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    assert _child(256, hard, SHOW) == [hard, hard, hard]


def test_a_limit_that_is_higher_already_stays() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert raise_limit(16) == soft
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (soft, hard)


def test_a_system_that_forbids_it_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    monkeypatch.setattr(resource, "setrlimit", forbidden)
    assert raise_limit() == 256


def test_the_tandem_command_raises_it_before_anything_else() -> None:
    code = "from tandem.cli.main import main\nmain(['version'])\nprint(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    done = subprocess.run(
        [sys.executable, "-c", f"import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (256, 2000))\n{code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split()[-1] == "2000"


ENTRY = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 2000))
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


@pytest.mark.skipif(not hasattr(psutil.Process, "rlimit"), reason="another process's limits show on Linux alone")
@pytest.mark.parametrize("module", ["tandem.launchers rank-host", "tandem.diagnostics.doctor.probe"])
def test_what_ssh_starts_raises_it_too(module: str) -> None:
    """It begins with what that machine gives, and its ranks inherit what it has."""
    payload = msgspec.json.encode(HostPayload(keys=ClusterKeys.generate(), endpoints=["127.0.0.1:9"], join_timeout=600))
    command = [sys.executable, "-c", ENTRY, *module.split()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as one:
        try:
            assert one.stdin is not None
            if module.endswith("rank-host"):
                one.stdin.write(payload + b"\n")
                one.stdin.flush()
            deadline = time.monotonic() + 240
            while psutil.Process(one.pid).rlimit(psutil.RLIMIT_NOFILE) != (2000, 2000):
                assert one.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
        finally:
            one.kill()
