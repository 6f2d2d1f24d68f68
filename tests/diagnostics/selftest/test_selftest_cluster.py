"""`tandem selftest --cluster` in its short form over machines of their own, and the plan with the profile that it writes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from hosts import left_over
from netns import Machines

pytestmark = pytest.mark.slow


def test_a_cluster_is_proved_and_the_plan_reads_its_profile(make_machines: Callable[[int], Machines], tmp_path: Path) -> None:
    machines = make_machines(4)
    for name in machines.names:
        directory = tmp_path / name
        variables = {"TANDEM_CACHE": str(directory / "cache"), "TANDEM_STATE_DIR": str(directory / "state")}
        machines.set_variables(name, {"OPENBLAS_NUM_THREADS": "1", **variables})
    file = tmp_path / "hosts.json"
    file.write_text(
        json.dumps([{"ssh": "localhost" if name == "h0" else name, "ips": [machines[name].address]} for name in machines.names])
    )
    proof = tmp_path / "proof"
    words = ["tandem", "selftest", "--cluster", str(file), "--publish", str(proof), "--quick"]
    done = machines.run("h0", words, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not left_over(machines)

    checks = {one["name"]: one for one in json.loads((proof / "selftest.json").read_text())["checks"]}
    assert {name: one["verdict"] for name, one in checks.items()} == {
        **dict.fromkeys(("model", "doctor", "links", "hosts", "deaths"), "ok"),
        "fast-fences": "does not apply",
    }
    speeds = checks["hosts"]["figures"]
    for layout in ("one machine", "stages", "tensor parallelism"):
        for shape in ("1 x 64", "4 x 64", "1 x 256", "4 x 256"):
            for unit in ("tokens/s", "prompt tokens/s"):
                for column in ("", ", plan", ", plan with profile"):
                    assert speeds[f"{layout}, {shape}: {unit}{column}"] > 0
    assert all(checks["deaths"]["figures"][f"death {number}: pause of the answer, s"] > 0 for number in (1, 2, 3))

    for text in ((proof / "selftest.md").read_text(), (proof / "selftest.json").read_text()):
        assert not re.search(r"\bh[0-3]\b|localhost|root|10\.213\.|/tmp|sshd", text)
    assert "fast fences are Metal's" in (proof / "selftest.md").read_text()

    model = tmp_path / "h0" / "state" / "firstlight" / "tiny"
    words = ["tandem", "plan", str(model), "--hostfile", str(file), "--profile", str(proof / "profile.json")]
    said = machines.run("h0", words).stdout
    assert "profile.json gives the speed of localhost, h1, h2, h3." in " ".join(said.split())
    assert "Measured links over ring: localhost - h1," in " ".join(said.split())
