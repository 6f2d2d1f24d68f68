"""Tandem on a machine that it takes for a Mac (fake_mac/README.md): what asks the system goes macOS's way."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from macs import TOOLS, answers, mac_environment
from netns import share_kernels
from pids import gone
from served import wait_until
from tandem.testing import tiny_model

BODY = {"model": "default", "prompt": [7, 8, 9], "max_tokens": 60, "temperature": 0, "ignore_eos": True}


HIDE = ("unshare", "--mount", "--propagation", "private", "sh", "-c", 'mount -t tmpfs none /proc && exec "$@"', "sh")
"""Runs a command that sees no /proc, in the process that was started."""


def may_hide() -> bool:
    """Whether /proc can be hidden here: macOS has none."""
    return sys.platform == "linux" and os.geteuid() == 0 and subprocess.run([*HIDE, "true"], capture_output=True).returncode == 0


class Mac:
    """The command there, with a long TMPDIR, a home with a space, 256 open files and no /proc, as macOS has them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.model = str(tiny_model(directory / "tiny"))
        self.said = directory / "said"
        home, temporary = directory / "a home", directory / "T" / ("zyxvpxvq6csfxvn_n" + "0" * 13) / "T"
        for one in (home, temporary):
            one.mkdir(parents=True)
        share_kernels(temporary)
        whole = mac_environment(self.said, HOME=str(home), TMPDIR=str(temporary))
        names = ("PATH", "PYTHONPATH", "FAKE_MAC", "HOME", "TMPDIR", "OPENBLAS_NUM_THREADS")
        self.environment = {name: whole[name] for name in names}  # as with `env -i`
        self.environment["PATH"] = f"{TOOLS}:/usr/bin:/bin"
        self.hide = HIDE if may_hide() else ()

    def start(self, *words: str, **options: object) -> subprocess.Popen[str]:
        code = (
            "import resource, runpy, sys; hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]; "
            "resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard)); sys.argv[0] = 'tandem'; "
            "runpy.run_module('tandem', run_name='__main__')"
        )
        return subprocess.Popen(
            [*self.hide, sys.executable, "-P", "-c", code, *words],
            env=self.environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            **options,
        )  # type: ignore[call-overload]

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*words)
        out, errors = process.communicate(timeout=240)
        return subprocess.CompletedProcess(words, process.returncode, out, errors)

    def caffeinated(self) -> set[int]:
        """Processes that sleep is held off for."""
        log = self.said / "caffeinate.log"
        lines = log.read_text().splitlines(keepends=True) if log.exists() else []
        return {int(line.split()[-1]) for line in lines if line.endswith("\n")}


@pytest.fixture(scope="module")
def mac(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mac]:
    one = Mac(tmp_path_factory.mktemp("mac"))
    yield one
    one("down", "--now")


@pytest.mark.slow
def test_a_server_in_the_background_its_faults_and_its_end(mac: Mac) -> None:
    up = mac("up", mac.model, "--port", "0", "-pp", "2", "--fast-sync", "on", "--wired", "1GB")
    assert up.returncode == 0, up.stderr
    assert mac("logs").stdout.count("MLX's fast fences are on (--fast-sync)") == 2
    [server] = json.loads(mac("status", "--json", "--interval", "0").stdout)
    ranks = [rank["pid"] for rank in server["replicas"][0]["ranks"]]
    assert all(rank["wired_bytes"] == 0 for rank in server["replicas"][0]["ranks"])  # it computes on the CPU
    wait_until(lambda: {*ranks, server["replicas"][0]["pid"]} <= mac.caffeinated(), "sleep is held off for all")
    assert all(psutil.Process(pid).rlimit(psutil.RLIMIT_NOFILE)[0] > 256 for pid in ranks)
    url = f"{server['address']}/v1/completions"
    calm = httpx.post(url, json=BODY, timeout=240).json()["choices"][0]["text"]
    for number in (signal.SIGKILL, signal.SIGSTOP):
        victim = json.loads(mac("status", "--json", "--interval", "0").stdout)[0]["replicas"][0]["ranks"][1]["pid"]
        os.kill(victim, number)
        assert httpx.post(url, json=BODY, timeout=240).json()["choices"][0]["text"] == calm
        assert gone(victim)
    assert mac("down").returncode == 0
    holders = [int(line.split()[0]) for line in (mac.said / "caffeinate.log").read_text().splitlines()]
    wait_until(lambda: all(map(gone, holders)), "something holds sleep off, though nothing runs")


@pytest.mark.slow
def test_a_port_that_another_server_has_at_loopback_alone(mac: Mac) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = mac("serve", mac.model, "--host", "0.0.0.0", "--port", str(port), "--device", "cpu")
    assert done.returncode == 2
    assert f"--port {port}: cannot listen there (Address already in use)" in done.stderr


@pytest.mark.slow
def test_the_doctor_and_the_plan(mac: Mac) -> None:
    done = mac("doctor", "--model", mac.model, "--json")
    verdicts = {one["check"]: one["verdict"] for one in json.loads(done.stdout)["findings"]}
    assert done.returncode == 0
    looked_at = ("versions", "model", "memory", "subnets", "fences", "power")
    assert {name: verdicts[name] for name in looked_at} == dict.fromkeys(looked_at, "ok")
    assert verdicts["firewall"] == "skip", "macOS has its tool at a path of its own, where Linux has none"
    answers(mac.said, {"pmset-batt": "Now drawing from 'Battery Power'\n"})
    mac.environment["MLX_METAL_FAST_SYNCH"] = "1"
    try:
        found = json.loads(mac("doctor", "--json").stdout)["findings"]
        assert {one["check"] for one in found if one["verdict"] == "warn"} == {"fences", "power"}
    finally:
        del mac.environment["MLX_METAL_FAST_SYNCH"]
        (mac.said / "pmset-batt").unlink()
    plan = mac("plan", mac.model, "--json")
    assert plan.returncode == 0, plan.stderr
    assert json.loads(plan.stdout)["chosen"]


@pytest.mark.slow
def test_agents_and_who_looks_for_them(mac: Mac) -> None:
    pytest.importorskip("zeroconf")
    with mac.start("agent", "--no-announce", "--host", "127.0.0.1", "--port", "0") as agent:
        try:
            assert agent.stdout is not None
            assert select.select([agent.stdout], [], [], 240)[0], "the agent says nothing"
            assert agent.stdout.readline()
        finally:
            agent.send_signal(signal.SIGTERM)
            agent.communicate(timeout=240)
    found = mac("hosts", "find", "--timeout", "0.5")
    assert found.returncode == 0
    if "no agent answered" in found.stdout:
        assert "Privacy & Security, Local Network" in found.stdout


@pytest.mark.slow
def test_a_device_that_is_not_there_is_named(mac: Mac) -> None:
    if os.path.exists("/dev/nvidia0"):
        pytest.skip("this machine has a GPU")
    done = mac("generate", mac.model, "--prompt", "a", "--device", "gpu")
    assert done.returncode == 2
    assert "--device gpu: MLX has no GPU on this machine" in done.stderr
