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
INSTALL = ["git clone URL tandem", "cd tandem", "make setup"]
"""What scripts/release tries, and scripts/setup of every checkout: it needs a package index."""
ACTIVATE = "source .venv/bin/activate"
WAIT_S = 240.0

pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="only in a checkout")


def commands(heading: str) -> list[str]:
    """The commands of the blocks below a heading, up to the next one."""
    section = PAGE.read_text().split(f"#### {heading}\n")[1].split("\n#### ")[0]
    return commands_of(section, "bash")


def commands_of(section: str, kind: str) -> list[str]:
    blocks = re.findall(rf"^```{kind}\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    return [line.partition("  # ")[0].rstrip() for block in blocks for line in block.splitlines()]


def test_readme_leads_there_in_eight_commands_and_four() -> None:
    """The page has the same commands, which are run below, and before them the addresses of a cable."""
    section = (PAGE.parents[1] / "README.md").read_text().split("\n## Two Macs\n")[1].split("\n## ")[0]
    found = commands_of(section, "text")
    second, first = found[:4], found[4:]
    assert len(first) <= 8 and first[:4] == [*INSTALL, ACTIVATE] and second[:3] == INSTALL
    page = [line.replace(" --model MODEL", "").replace("MODEL", "demo") for line in commands("On the first Mac")]
    assert first == page
    assert second == commands("On the second Mac")


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

    for name, cable in zip(("h1", "h0"), commands("The cable's addresses"), strict=True):
        machines.run(name, cable)
    (agent,) = commands("On the second Mac")[3:]
    log = tmp_path / "agent.log"
    waiting = second.start(agent.removeprefix(".venv/bin/"), log)
    code = said(log, r"code (\d{3} \d{3}): ", lambda: waiting.poll() is None)[1]

    write, doctor, serve, ask = [
        line.replace("mac-b", "Mac").replace("MODEL", str(model)) for line in commands("On the first Mac")[4:]
    ]
    assert "paired with Mac" in machines.run("h0", write, stdin=f"{code}\n", timeout=WAIT_S).stderr
    hosts = json.loads((machines["h0"].home / "hosts.json").read_text())["hosts"]
    assert [(one["ssh"], one["ips"]) for one in hosts] == [("localhost", ["10.254.0.1"]), ("agent:Mac", ["10.254.0.2"])]
    assert [one["chip"] for one in hosts] == ["m4-max", "m4-max"] and all(one["memory"] for one in hosts)
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
