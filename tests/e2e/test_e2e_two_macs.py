"""docs/two-machines.md: a new user's way from two Macs and a cable to an answer, command by command as it stands there.

The Macs are network namespaces on Linux that take themselves for Macs (fake_mac/README.md), both called `Mac`, as macOS
calls them; each has a hardware id of its own, a network that both share, and a cable to the other.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from macs import FAKE_MAC, TOOLS, answers, recorded
from netns import Machines
from tandem.testing import tiny_model

PAGE = Path(__file__).parents[2] / "docs" / "two-machines.md"
INSTALL = ["make setup", "source .venv/bin/activate"]
"""What scripts/release tries, and scripts/setup of every checkout: it needs a package index."""
MOST = 8
WAIT_S = 240.0

pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="only in a checkout")


def commands(heading: str) -> list[str]:
    """The commands of the blocks below a heading, up to the next one."""
    section = PAGE.read_text().split(f"#### {heading}\n")[1].split("\n#### ")[0]
    blocks = re.findall(r"^```bash\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def test_it_takes_eight_commands_at_most() -> None:
    for heading in ("On the first Mac", "On the second Mac"):
        found = commands(heading)
        assert found[:2] == INSTALL and 2 < len(found) <= MOST


class Mac:
    """One of the two: runs lines of the page in a shell there."""

    def __init__(self, machines: Machines, name: str, uuid: str, directory: Path) -> None:
        self.machines, self.name = machines, name
        said = directory / name
        answers(
            said,
            {
                "ioreg": re.sub(r'("IOPlatformUUID" = )"[^"]+"', rf'\1"{uuid}"', recorded("ioreg")),
                "ifconfig": "lo0: flags=8049<UP,LOOPBACK,RUNNING,MULTICAST> mtu 16384\n"
                "\tinet 127.0.0.1 netmask 0xff000000\n"
                "en0: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500\n"
                f"\tinet {machines[name].address} netmask 0xffffff00\n\tstatus: active\n",
            },
        )
        before = machines.variables[name]
        machines.set_variables(
            name,
            {
                "PATH": f"{TOOLS}:{before['PATH']}",
                "FAKE_MAC": str(said),
                "PYTHONPATH": f"{FAKE_MAC / 'site'}:{before['PYTHONPATH']}",
                "TMPDIR": str(machines[name].home / "tmp"),
                "OPENBLAS_NUM_THREADS": "1",
            },
        )
        machines.run(name, "hostname Mac")

    def start(self, line: str, log: Path) -> subprocess.Popen[str]:
        with log.open("w") as file:
            return self.machines.start(
                self.name, ["sh", "-c", f"exec {line}"], stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
            )


def said(log: Path, words: str, alive: Callable[[], bool]) -> re.Match[str]:
    deadline = time.monotonic() + WAIT_S
    while (found := re.search(words, log.read_text())) is None:
        assert alive() and time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
    return found


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="not installed: curl")
def test_the_commands_of_the_page_lead_to_an_answer(make_machines: Callable[[int], Machines], tmp_path: Path) -> None:
    pytest.importorskip("zeroconf")
    machines = make_machines(2)
    machines.link("h0", "h1", ("10.254.9.1/30", "10.254.9.2/30"), device="bridge0")
    first = Mac(machines, "h0", "00000000-0000-0000-0000-00000000000A", tmp_path)
    second = Mac(machines, "h1", "00000000-0000-0000-0000-00000000000B", tmp_path)
    (machines["h0"].home / ".ssh" / "id_ed25519").unlink()
    model = tiny_model(tmp_path / "tiny")

    cable, agent = commands("On the second Mac")[2:]
    machines.run("h1", cable)
    log = tmp_path / "agent.log"
    waiting = second.start(agent, log)
    code = said(log, r"code (\d{3} \d{3}): ", lambda: waiting.poll() is None)[1]

    cable, pair, write, doctor, serve, ask = [
        line.replace("mac-b", "Mac").replace("MODEL", str(model)) for line in commands("On the first Mac")[2:]
    ]
    machines.run("h0", cable)
    assert "paired with Mac" in machines.run("h0", pair, stdin=f"{code}\n").stdout
    machines.run("h0", write, timeout=WAIT_S)
    hosts = json.loads((machines["h0"].home / "hosts.json").read_text())["hosts"]
    assert hosts == [{"ssh": "localhost", "ips": ["10.254.0.1"]}, {"ssh": "agent:Mac", "ips": ["10.254.0.2"]}]
    machines.run("h0", doctor, timeout=WAIT_S)
    log = tmp_path / "serve.log"
    server = first.start(serve, log)
    said(log, "Tandem is ready", lambda: server.poll() is None)
    done = machines.run("h0", ask, timeout=WAIT_S)
    assert json.loads(done.stdout)["usage"]["completion_tokens"] > 0
    status = json.loads(machines.run("h0", "tandem status --port 8000 --json --interval 0", timeout=WAIT_S).stdout)
    ranks = status[0]["replicas"][0]["ranks"]
    assert [rank["host"] for rank in ranks] == ["Mac", "Mac"] and [rank["stage"] for rank in ranks] == [0, 1]
    for name in ("h0", "h1"):  # a node agent and its rank, on each Mac
        said(tmp_path / name / "caffeinate.log", r"\n.*\n", lambda: True)
