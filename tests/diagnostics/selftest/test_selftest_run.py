"""Deadlines, deaths, and going on behind an interruption: the journal, and runs with a stand-in for checks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.diagnostics.selftest.check import Check, CheckResult
from tandem.diagnostics.selftest.run import RunJournal, run_checks
from tandem.diagnostics.tasks import Task

PLANTED = Path(__file__).parent / "planted"


def check(name: str, deadline_s: float = 60) -> Check:
    return Check(name=name, title=name, proves="", entry=name, deadline_s=deadline_s)


def outcome(name: str) -> CheckResult:
    return CheckResult(name=name, verdict="ok", seconds=1.0)


def journal(directory: Path, question: str = "q", **options: object) -> RunJournal:
    return RunJournal(directory / "run.json", {"about": question}, **{"boot": "one", **options})  # type: ignore[arg-type]


def directed(
    directory: Path, kept: RunJournal, names: list[Check], monkeypatch: pytest.MonkeyPatch, seconds: float = 600
) -> tuple[list[CheckResult], list[str]]:
    monkeypatch.setenv("PYTHONPATH", str(PLANTED))
    begun: list[str] = []
    found = run_checks(
        names,
        kept,
        Task(entry="", result="", directory=str(directory), model=""),
        seconds=seconds,
        listener=lambda one, outcome: begun.append(one.name) if outcome is None else None,
        module="stand_in",
    )
    return found, begun


@pytest.mark.slow
def test_a_check_that_hangs_or_dies_has_an_outcome_and_the_next_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = [check("hang", 6), check("abort"), check("fine")]
    found, _ = directed(tmp_path, journal(tmp_path), checks, monkeypatch)
    assert [one.verdict for one in found] == ["no answer", "no answer", "ok"]
    assert found[0].detail == "it did not come back within 6 s: still waiting"
    assert found[1].detail == "its process crashed (SIGABRT): libc++abi: terminating"
    assert found[2].figures == {"seen": "fine"}


def test_a_run_goes_on_behind_what_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = [check("a"), check("b"), check("c")]
    first, begun = directed(tmp_path, journal(tmp_path), checks[:2], monkeypatch)
    second, again = directed(tmp_path, journal(tmp_path), checks, monkeypatch)
    assert begun == ["a", "b"]
    assert again == ["c"]
    assert [one.name for one in second] == ["a", "b", "c"]


def test_no_check_begins_when_the_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, begun = directed(tmp_path, journal(tmp_path), [check("a")], monkeypatch, seconds=0)
    assert found == begun == []


def test_what_was_cut_off_is_tried_once_more_and_then_given_up(tmp_path: Path) -> None:
    journal(tmp_path).begin("a")
    second = journal(tmp_path)
    assert second.lost("a") is None
    assert second.begin("a") == 2
    third = journal(tmp_path).lost("a")
    assert third is not None
    assert (third.verdict, third.attempts) == ("no answer", 2)
    assert "killed in the middle of it, twice" in third.detail


def test_what_may_have_taken_the_machine_down_is_not_tried_again(tmp_path: Path) -> None:
    journal(tmp_path).begin("a")
    lost = journal(tmp_path, boot="two").lost("a")
    assert lost is not None
    assert "restarted" in lost.detail


def test_another_question_or_a_wish_begins_anew(tmp_path: Path) -> None:
    journal(tmp_path).end(outcome("a"))
    assert journal(tmp_path).outcomes
    assert not journal(tmp_path, fresh=True).outcomes
    journal(tmp_path).end(outcome("a"))
    assert not journal(tmp_path, "another").outcomes


def test_a_finished_run_is_made_again_and_others_findings_stay(tmp_path: Path) -> None:
    first = journal(tmp_path)
    first.end(outcome("a"))
    first.end(outcome("b"))
    second = journal(tmp_path)
    second.reopen(["a", "c"])  # c is left
    assert set(second.outcomes) == {"a", "b"}
    second.reopen(["a"])
    assert set(journal(tmp_path).outcomes) == {"b"}


def test_a_journal_that_cannot_be_read_begins_anew(tmp_path: Path) -> None:
    first = journal(tmp_path)
    first.end(outcome("a"))
    (tmp_path / "run.json").write_bytes((tmp_path / "run.json").read_bytes()[:-4])
    again = journal(tmp_path)
    assert not again.outcomes
    again.end(outcome("b"))
    assert set(journal(tmp_path).outcomes) == {"b"}
