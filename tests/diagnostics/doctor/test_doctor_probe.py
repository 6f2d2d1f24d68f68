"""A test group that says much is still measured."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from tandem.diagnostics.doctor import examine, facts, probe_messages
from tandem.diagnostics.doctor.evidence import Host
from tandem.diagnostics.doctor.model_files import look_at
from tandem.diagnostics.doctor.probe_messages import MARK
from tandem.diagnostics.doctor.probe_session import ProbeLink, ProbeLost, local_probe, process_group
from tandem.diagnostics.tasks import LATE, RankTimes, TimingTask, run_ranks
from tandem.launchers.hostfile import read_hostfile
from tandem.testing import tiny_model

CHATTY = """
import json
import sys
from pathlib import Path

result = json.loads(sys.stdin.buffer.readline())["result"]
for _ in range(20000):
    sys.stderr.write("NCCL INFO: " + "x" * 90 + chr(10))
print("NCCL version 2")
if {works}:
    Path(result).write_text('{{"type": "RankTimes", "mlx": "1.0"}}')
else:
    sys.exit("the link is down")
"""


@pytest.mark.parametrize(("works", "expected"), [(True, "1.0"), (False, "the link is down")])
def test_complaints_beyond_a_pipe_hold_up_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, works: bool, expected: str
) -> None:
    (tmp_path / "chatty.py").write_text(CHATTY.format(works=works))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    [found] = run_ranks([TimingTask()], [{}], 60, "chatty")
    assert (found.mlx if works else found.error) == expected


HALF = """
import json
import sys
import time
from pathlib import Path

task = json.loads(sys.stdin.buffer.readline())
if task["rank"] == 1:
    time.sleep({seconds})
Path(task["result"]).write_text(json.dumps({{"type": "RankTimes", "error": {error}}}))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "timeout_s", "expected"), [("'a wrong sum'", 60, ["a wrong sum", LATE]), ("None", 3, [None, LATE])]
)
def test_ranks_end_when_one_fails_or_the_time_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str, timeout_s: float, expected: list[str | None]
) -> None:
    (tmp_path / "half.py").write_text(HALF.format(seconds=600, error=error))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found: list[RankTimes] = run_ranks([TimingTask(rank=0), TimingTask(rank=1)], [{}, {}], timeout_s, "half")
    assert [one.error for one in found] == expected


def test_a_copy_of_a_model_that_lacks_a_file_is_said_to(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "m", shards=2)
    assert look_at(str(model)).problem is None
    (model / "model-00002-of-00002.safetensors").unlink()
    found = look_at(str(model))
    assert found.path == str(model)
    assert "model-00002-of-00002.safetensors: is missing" in str(found.problem)


SLOW = f"""
import sys
import time

for number, line in enumerate(sys.stdin.buffer):
    time.sleep(2 * (not number))
    sys.stdout.buffer.write({MARK!r} + b'{{"type": "Time", "now": %d}}' % number + bytes([10]))
    sys.stdout.buffer.flush()
"""


def test_a_late_reply_does_not_answer_the_next_request() -> None:
    link = ProbeLink("slow", [sys.executable, "-c", SLOW])
    try:
        with pytest.raises(ProbeLost, match="no answer within 0.2 s"):
            link.ask(probe_messages.TellTime(), probe_messages.Time, 0.2)
        assert link.ask(probe_messages.TellTime(), probe_messages.Time, 60).now == 1
        with pytest.raises(ProbeLost, match="another version of Tandem answers there") as lost:
            link.ask(probe_messages.Reserve(1), probe_messages.ReservedPorts, 60)
        assert lost.value.remedy
    finally:
        link.close()


# Answers requests as a probe does, but exits when it is asked for the one that is named.
DYING = """
import os
import sys
from tandem.diagnostics.doctor import probe, probe_messages

answer = probe.Probe.answer

def answer_or_exit(self, request):
    if type(request).__name__ == {request!r} and getattr(request, "seconds", 0) >= {seconds}:
        os._exit(3)
    return answer(self, request)

probe.Probe.answer = answer_or_exit
sys.exit(probe.main())
"""


@pytest.mark.parametrize(("request_name", "seconds"), [("TellTime", 0), ("Listen", 0), ("Transfer", 0), ("Transfer", 0.1)])
def test_a_probe_lost_after_gathering_leaves_the_evidence_of_the_others(
    monkeypatch: pytest.MonkeyPatch, request_name: str, seconds: float
) -> None:
    dying = [sys.executable, "-c", DYING.format(request=request_name, seconds=seconds)]
    monkeypatch.setattr(examine, "probe_command", lambda host, python=None: dying if host == "b" else local_probe())
    monkeypatch.setattr(examine, "_identity", lambda facts: (str(time.monotonic()), []))  # all are this machine
    hosts = [Host("localhost", "127.0.0.1"), Host("b", "127.0.0.1"), Host("c", "127.0.0.1")]
    evidence = examine.examine(examine.Question(hosts=hosts, port=0, seconds=0.1))
    assert evidence.facts.keys() == {"localhost", "b", "c"}
    assert evidence.unreachable == {"b": ("ended with code 3", "ssh b hostname")}
    assert evidence.links.keys() == {("localhost", "c"), ("c", "localhost")}
    assert all(link.bandwidth for link in evidence.links.values())
    assert "c" in evidence.clocks
    assert not evidence.collected
    told = [(line.check, line.where) for line in examine.findings(evidence) if line.verdict == "fail" and line.where == "b"]
    assert told == [("ssh", "b")]


def test_a_sum_goes_over_ips_and_meets_at_address_as_when_serving(tmp_path: Path) -> None:
    file = tmp_path / "hosts.json"
    cables = [["10.0.1.1", "10.0.3.1"], ["10.0.1.2"]]
    entries = [{"ssh": f"m{i}", "ips": ips, "address": f"192.168.0.{i}"} for i, ips in enumerate(cables)]
    file.write_text(
        json.dumps([{**entry, "rdma": ["en2" if i != j else None for j in range(2)]} for i, entry in enumerate(entries)])
    )
    hosts = examine.hostfile_hosts(read_hostfile(str(file)))
    assert [len(host.ring_addresses) for host in hosts] == [2, 1]
    ports = [[7001, 7002], [7003]]
    ring = process_group("ring", hosts, ports).files(1)["MLX_HOSTFILE"]
    assert json.loads(ring) == [["10.0.1.1:7001", "10.0.3.1:7002"], ["10.0.1.2:7003"]]
    assert process_group("jaccl", hosts, ports).variables(1)["MLX_JACCL_COORDINATOR"] == "192.168.0.0:7001"
    [alone] = process_group("ring", [Host("a", "192.168.0.9")], [[7001]]).files(0).values()
    assert json.loads(alone) == [["192.168.0.9:7001"]]


def test_the_platform_of_mlxs_wheel_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = tmp_path / "mlx_metal-0.32.4.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Name: mlx-metal\nVersion: 0.32.4\n")
    (installed / "WHEEL").write_text("Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-macosx_15_0_arm64\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert facts.gather(probe_messages.GatherFacts()).mlx_tag == "macosx_15_0_arm64"
