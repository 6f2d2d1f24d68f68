"""Three machines, each pair on a cable of its own, that meet at addresses on a network that all share."""

from __future__ import annotations

import json
from itertools import combinations

import pytest

from netns import Machines
from tandem.testing import tiny_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def machines(make_machines) -> Machines:
    return make_machines(3)


def test_stages_and_the_doctor_go_by_the_address_of_each_machine(machines, tmp_path):
    model, hosts = tiny_model(tmp_path / "m"), tmp_path / "hosts.json"
    ends: dict[str, str] = {}
    for number, (one, other) in enumerate(combinations(machines.names, 2)):
        machines.link(one, other, (f"10.77.{number}.1/30", f"10.77.{number}.2/30"), f"en{number + 2}")
        ends.setdefault(one, f"10.77.{number}.1")
        ends.setdefault(other, f"10.77.{number}.2")
    entries = [{"ssh": "127.0.0.1" if name == "h0" else name, "ips": [ends[name]]} for name in machines.names]
    words = [
        "python",
        "-m",
        "tandem",
        "generate",
        str(model),
        "--local",
        "--hostfile",
        str(hosts),
        "-pp",
        "3",
        "--device",
        "cpu",
        "--prompt",
        "a b",
        "--max-tokens",
        "3",
        "--temperature",
        "0",
        "--start-timeout",
        "100",
    ]
    for entry, name in zip(entries, machines.names, strict=True):
        entry["address"] = machines[name].address
    hosts.write_text(json.dumps(entries))
    done = machines.run("h0", words, check=False)
    assert done.returncode == 0, done.stderr
    alone = machines.run("h0", [*words[:6], *words[words.index("--device") :]])
    assert done.stdout == alone.stdout
    looked = machines.run(
        "h0", ["python", "-m", "tandem", "doctor", "--hostfile", str(hosts), "--json", "--port", "0"], check=False
    )
    lines = {line["check"]: line for line in json.loads(looked.stdout)["findings"]}
    assert (lines["reachable"]["verdict"], lines["reachable"]["detail"]) == (
        "ok",
        "each machine connects to each other (6 tries)",
    )
