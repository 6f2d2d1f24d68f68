"""What a report shows, and what it does not tell."""

from __future__ import annotations

import msgspec
import pytest

from tandem.diagnostics.selftest.check import CheckResult
from tandem.diagnostics.selftest.report import Report, make_report, page, redacted
from tandem.diagnostics.tasks import Figures

LINUX: Figures = {"system": "Linux 6.1", "gpu": False, "device": "CPU", "cores": 2}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("fails on mac-of-ann.local: timeout", "fails on <a>.local: timeout"),
        ("ann has it, joanna has not", "<b> has it, joanna has not"),
        ("10.0.0.17 and fe80::1c2f:33ff:fe01:2%en0 and 3c:06:30:11:22:33", "<address> and <address> and <address>"),
        ("127.0.0.1:8000 took 13:45:12 for 5 tok/s", "127.0.0.1:8000 took 13:45:12 for 5 tok/s"),
        ("no /Users/ann/models/a/config.json there, nor ~/x/y", "no <path> there, nor <path>"),
        ("/Users/Änn O. Lee/models/a is gone, /Volumes/x/y too", "<path> is gone, <path> too"),
        ("ask /v1/completions, /health", "ask /v1/completions, /health"),
        ("serial 564D1A2B-0011-2233-4455-66778899AABB", "serial <id>"),
        ("Tandem 0.1.0, mlx 0.32.4", "Tandem 0.1.0, mlx 0.32.4"),
    ],
)
def test_names_addresses_and_paths_are_taken_out(text: str, expected: str) -> None:
    assert redacted(text, ["mac-of-ann", "/Users/Änn O. Lee", "ann", "/"]) == expected


def test_more_names_than_letters_stay_apart() -> None:
    names = [f"mac{number}" for number in range(30)]
    placeholders = redacted(" ".join(names), names).split()
    assert len(set(placeholders)) == 30
    assert (placeholders[25:28], placeholders[0]) == (["<z>", "<aa>", "<ab>"], "<a>")
    assert redacted(" ".join(names), [*names, "aa", "ab"]).split() == placeholders


def report(*checks: CheckResult, wanted: int | None = None, facts: Figures = LINUX) -> Report:
    return make_report(
        checks,
        wanted=len(checks) if wanted is None else wanted,
        date="2030-01-02",
        facts=facts,
        model="demo",
        hosts=0,
        names=["secret"],
    )


def outcome(verdict: str, **fields: object) -> CheckResult:
    return CheckResult(**{"name": "fence", "verdict": verdict, "seconds": 1.5, **fields})  # type: ignore[arg-type]


def test_the_exit_code_tells() -> None:
    assert report(outcome("ok"), outcome("does not apply")).code == 0
    assert report(outcome("ok"), outcome("failed"), wanted=5).code == 1
    assert report(outcome("no answer")).code == 1
    assert report(outcome("ok"), wanted=2).code == 3


def test_the_page_has_every_check_and_nothing_secret() -> None:
    found = report(
        outcome("failed", detail="5 | 6 on secret", figures={"us": 1.25, "fine": True}, attempts=2),
        CheckResult(name="machine", verdict="ok", seconds=1.0, figures=LINUX),
        wanted=4,
    )
    text = page(found)
    row = "| crossings between CPU and GPU | **failed** (attempt 2) | 1.5 | 5 \\| 6 on <a>; us: 1.25; fine: yes |"
    assert row in text
    assert "1 ok, 1 failed, 2 left" in text
    assert "secret" not in text
    assert msgspec.json.decode(msgspec.json.encode(found), type=Report) == found


def test_figures_of_several_machines_stand_in_tables_by_row_and_column() -> None:
    figures: Figures = {
        "backend": "ring on secret",
        "stages, 1 x 64: tokens/s": 5.0,
        "stages, 1 x 64: tokens/s, plan": 6.5,
        "stages, 4 x 64: tokens/s": 9.0,
        "stages, 4 x 64: tokens/s, plan": 12.0,
        "tensor parallelism: left out": "3 heads",
    }
    found = msgspec.structs.replace(report(CheckResult(name="hosts", verdict="ok", seconds=1.0, figures=figures)), hosts=2)
    assert page(found).endswith(
        "| stages and tensor parallelism over several machines | ok | 1 |  |"
        "\n\n## Stages and tensor parallelism over several machines\n\n"
        "backend: ring on <a>.\n\n"
        "| | tokens/s | tokens/s, plan |\n|---|---|---|\n| stages, 1 x 64 | 5 | 6.5 |\n| stages, 4 x 64 | 9 | 12 |\n\n"
        "| | left out |\n|---|---|\n| tensor parallelism | 3 heads |\n"
    )


@pytest.mark.parametrize(
    ("system", "gpu", "platform"),
    [
        ("Linux 6.1", False, "Linux, CPU"),
        ("Linux 6.1", True, "Linux, CUDA"),
        ("Darwin 26.3 25D60", True, "macOS, Metal"),
        ("Darwin 26.3 25D60", False, "macOS, CPU"),
    ],
)
def test_the_platform_of_a_report(system: str, gpu: bool, platform: str) -> None:
    assert report(facts={"system": system, "gpu": gpu}).platform == platform
