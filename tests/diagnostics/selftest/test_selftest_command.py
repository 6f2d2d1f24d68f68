"""What `tandem firstlight` refuses, before anything is checked, and what it takes for the same question."""

from __future__ import annotations

import errno
import fcntl
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tandem.cli import selftest as command
from tandem.cli.main import main
from tandem.diagnostics.selftest import run
from tandem.diagnostics.selftest.check import Check, CheckResult
from tandem.diagnostics.selftest.checks.machine import model as model_check
from tandem.diagnostics.selftest.run import MOST_ATTEMPTS, Run
from tandem.diagnostics.tasks import Task
from tandem.errors import BrokenModel


@pytest.fixture(autouse=True)
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the checks that are made, all of which end well at once."""
    names: list[str] = []

    def end_well(check: Check, attempt: int, *_: object) -> CheckResult:
        names.append(check.name)
        return CheckResult(name=check.name, verdict="ok", seconds=0.0, attempts=attempt)

    monkeypatch.setattr("tandem.diagnostics.selftest.run.make", end_well)
    monkeypatch.setattr(command, "facts", lambda: {"system": "Linux"})
    monkeypatch.setenv("TANDEM_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return names


def model_at(directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    return directory


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (".", "is a directory"),
        ("missing/page.md", "there is no directory missing"),
        ("page.json", "the place of the JSON that stands beside the page"),
        ("taken.md", "taken.json is a directory"),
        ("/proc/page.md", "cannot be written"),
    ],
)
def test_a_report_that_cannot_be_written_is_refused_at_once(
    output: str, words: str, made: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken.json").mkdir()
    assert main(["firstlight", "--only", "digests", "-o", output]) == 2
    said = capsys.readouterr().err
    assert f"--output {output}: " in said and words in said
    assert made == []


def test_a_check_that_is_no_more_is_not_waited_for(made: list[str], tmp_path: Path) -> None:
    words = ["firstlight", "--model", str(model_at(tmp_path / "m")), "--only", "digests"]
    assert main(words) == 0
    journal = tmp_path / "state" / "firstlight" / "run.json"
    kept = msgspec.json.decode(journal.read_bytes(), type=Run)
    kept.outcomes["of-old"] = CheckResult(name="of-old", verdict="failed", seconds=1.0)
    journal.write_bytes(msgspec.json.encode(kept))
    assert main(words) == 0
    report = json.loads((tmp_path / "firstlight.json").read_text())
    assert ([one["name"] for one in report["checks"]], report["wanted"]) == (["digests"], 1)


def test_a_check_in_which_somebody_presses_ctrl_c_was_not_begun(
    made: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    end_well = run.make

    def pressed(check: Check, attempt: int, *rest: Any) -> CheckResult:
        if check.name == "fence":
            raise KeyboardInterrupt
        return end_well(check, attempt, *rest)

    words = ["firstlight", "--model", str(model_at(tmp_path / "m")), "--only", "digests,fence"]
    monkeypatch.setattr("tandem.diagnostics.selftest.run.make", pressed)
    for _ in range(MOST_ATTEMPTS + 1):
        assert main(words) == 130
        assert "interrupted: the same command goes on" in capsys.readouterr().err
    monkeypatch.setattr("tandem.diagnostics.selftest.run.make", end_well)
    assert main(words) == 0
    assert made == ["digests", "fence"]
    report = json.loads((tmp_path / "firstlight.json").read_text())
    assert [(one["name"], one["verdict"], one["attempts"]) for one in report["checks"]] == [
        ("digests", "ok", 1),
        ("fence", "ok", 1),
    ]


def test_a_mac_is_awake_before_the_first_check(made: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    held: list[list[str]] = []
    monkeypatch.setattr(command, "keep_awake", lambda: held.append(list(made)))
    assert main(["firstlight", "--model", str(model_at(tmp_path / "m")), "--only", "digests"]) == 0
    assert (held, made) == ([[]], ["digests"])


def test_two_at_once_are_refused(made: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "state" / "firstlight"
    directory.mkdir(parents=True)
    with (directory / "lock").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert main(["firstlight", "--only", "digests"]) == 2
    assert f"another `tandem selftest` runs in {directory}" in capsys.readouterr().err
    assert made == []
    assert main(["firstlight", "--only", "digests"]) == 0
    assert "digests" in made


def test_a_full_disk_is_told_with_its_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tandem.diagnostics.selftest.run.RunJournal.begin", full)
    assert main(["firstlight", "--only", "digests"]) == 2
    said = capsys.readouterr().err
    assert f"{tmp_path / 'state' / 'firstlight'}: cannot be written: No space left" in said
    assert "TANDEM_STATE_DIR" in said


def test_a_directory_that_checks_cannot_be_told_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], made: list[str]
) -> None:
    monkeypatch.setenv("TANDEM_STATE_DIR", str(tmp_path / "caf\udce9"))
    assert main(["firstlight", "--only", "digests"]) == 2
    assert "caf\\udce9/firstlight': no path that checks can be told" in capsys.readouterr().err
    assert made == []


def test_findings_of_another_model_of_that_name_or_of_a_changed_hosts_file_are_not_taken_over(
    made: list[str], tmp_path: Path
) -> None:
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps([{"ssh": "localhost", "ips": ["10.0.0.1"]}]))
    models = [model_at(tmp_path / one / "same") for one in ("first", "second")]

    def made_with(*words: str) -> list[str]:
        made.clear()
        main(["firstlight", "--only", "digests,fence", *words])
        return list(made)

    assert main(["firstlight", "--model", str(models[0]), "--only", "digests"]) == 0
    assert made_with("--model", str(models[0])) == ["fence"]
    assert made_with("--model", str(models[1])) == ["digests", "fence"]
    assert main(["firstlight", "--hostfile", "hosts.json", "--model", str(models[0]), "--only", "digests"]) == 0
    assert made_with("--model", str(models[0]), "--hostfile", str(hosts)) == ["fence"]
    hosts.write_text(json.dumps([{"ssh": "localhost", "ips": ["10.0.0.2"]}]))
    assert made_with("--model", str(models[0]), "--hostfile", str(hosts)) == ["digests", "fence"]


def test_a_model_that_is_cut_off_is_not_ok(tmp_path: Path) -> None:
    directory = model_at(tmp_path / "broken")
    (directory / "model.safetensors").write_bytes(b"\x40\0\0\0\0\0\0\0{}")
    with pytest.raises(BrokenModel, match="truncated or damaged"):
        model_check(Task(entry="", result="", directory="", model=str(directory)))


def test_a_cluster_has_its_checks_alone_and_publishes_page_and_profile(made: list[str], tmp_path: Path) -> None:
    (tmp_path / "hosts.json").write_text(json.dumps([{"ssh": "localhost"}, {"ssh": "ann@mac-b"}]))
    profile = tmp_path / "state" / "firstlight" / "profile.json"
    profile.parent.mkdir(parents=True)
    profile.write_text("measured")
    words = ["selftest", "--cluster", "hosts.json", "--model", str(model_at(tmp_path / "m")), "--publish", "proof"]
    assert main([*words, "--quick"]) == 0
    assert made == ["model", "doctor", "links", "hosts", "deaths", "fast-fences"]
    assert sorted(path.name for path in (tmp_path / "proof").iterdir()) == ["profile.json", "selftest.json", "selftest.md"]
    assert (tmp_path / "proof" / "profile.json").read_text() == "measured"
    made.clear()
    assert main(words) == 0  # other prompts: the quick run's findings are not taken over
    assert "hosts" in made


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--quick"], "--quick: is about --cluster"),
        (["--cluster", "none.json"], "--cluster none.json: cannot be read"),
        (["--cluster", "one.json"], "--cluster one.json: has one machine; name two or more"),
        (["--publish", "missing/deep"], "--publish missing/deep/selftest.md: there is no directory missing/deep"),
    ],
)
def test_words_that_do_not_go_together(
    words: list[str], said: str, made: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one.json").write_text(json.dumps([{"ssh": "localhost"}, {"ssh": "localhost"}]))
    assert main(["selftest", "--only", "digests", *words]) == 2
    assert said in capsys.readouterr().err
    assert made == []
