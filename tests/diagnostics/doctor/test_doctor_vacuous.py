"""No check passes without a fact behind it, held for every check that there is."""

from __future__ import annotations

import dataclasses
import json

import pytest
from msgspec import structs

from mac_evidence import bad, mac, pair, with_b
from tandem.cli.main import main
from tandem.diagnostics.doctor.evidence import DoctorCheck, Evidence, Host
from tandem.diagnostics.doctor.examine import CHECKS, findings
from tandem.launchers.ray.nodes import RayNode

STRUCTURES = {"versions", "hostname", "ports", "fences", "model", "memory", "ssh", "ray"}
"""Checks of what a probe tells of itself, or of what is not a command's output."""


def verdicts(evidence: Evidence) -> dict[str, set[str]]:
    return {check.name: {line.verdict for line in check.findings(evidence)} for check in CHECKS}


def nobody() -> Evidence:
    """A hosts file of two Macs that are off, looked at from a third."""
    evidence = pair(
        facts={"this machine": mac(3)},
        links={},
        clocks={},
        collected={},
        planned="no plan",
        unreachable={"a": ("cannot be reached", "ping a"), "b": ("cannot be reached", "ping b")},
    )
    evidence.here = "this machine"
    evidence.hosts.append(Host("this machine", ranks=0))
    return evidence


def test_every_check_passes_on_healthy_macs_and_on_none_where_nobody_answered():
    healthy = {name for name, given in verdicts(pair()).items() if "ok" in given}
    assert healthy == {check.name for check in CHECKS} - {"ray"}
    seen = verdicts(nobody())
    assert {name for name, given in seen.items() if "ok" in given} == {"ports"}  # the HTTP port is this machine's
    told = [line for line in findings(nobody()) if line.verdict == "skip" and line.where]
    assert {"rdma", "macos", "thunderbolt", "reachable", "versions", "model"} <= {line.check for line in told}
    for line in told:
        assert (line.where, line.detail) == ("a, b", "no machine of the hosts file answered")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_a_check_whose_facts_are_missing_does_not_pass(check: DoctorCheck):
    if check.name == "ray":
        assert {line.verdict for line in check.findings(pair(ray=[]))} == {"skip"}
        node = RayNode("1", "a", "a", {"mlx": 1.0}, {"mlx": 1.0})
        assert {line.verdict for line in check.findings(pair(ray=[node]))} == {"ok"}
        return
    evidence = pair(links={}, clocks={}, collected={}, planned=None)
    evidence.facts = {name: structs.replace(facts, outputs={}, model=None) for name, facts in evidence.facts.items()}
    passes = "ok" in {line.verdict for line in check.findings(evidence)}
    assert passes == (check.name in STRUCTURES - {"model", "memory", "ray"})


def test_every_fact_that_evidence_can_hold_is_missing_above():
    """A new kind of evidence must be added to the two tests before."""
    kept = {"hosts", "here", "backend", "model", "variables", "weights_from_head", "own_port", "ray", "unreachable", "facts"}
    assert {field.name for field in dataclasses.fields(Evidence)} - kept == {"links", "clocks", "collected", "planned"}


def test_those_that_did_not_answer_are_named_beside_what_passes():
    evidence = pair(links={}, clocks={}, collected={}, planned="no plan")
    del evidence.facts["b"]
    evidence.unreachable["b"] = "cannot be reached", "ping b"
    lines = {line.check: line for line in findings(evidence)}
    for name in ("rdma", "versions", "model", "fences", "power", "macos"):
        assert (lines[name].verdict, lines[name].detail.endswith("; not looked at: b")) == ("ok", True), lines[name]
    assert (lines["reachable"].verdict, lines["reachable"].where) == ("skip", "a, b")


@pytest.mark.parametrize("chip", ["Apple M1 Max", "Apple M2 Ultra", "Apple M3 Max", "Apple M4", "Apple M5"])
def test_a_mac_without_thunderbolt_5_is_told_so_and_never_sent_to_recovery(chip):
    evidence = with_b(pair(), chip=chip)
    for state in ("enabled", "disabled"):
        outputs = {**evidence.facts["b"].outputs, "rdma_ctl": f"RDMA is {state}\n", "os_version": "15.6\n"}
        [found] = [one for one in bad(with_b(evidence, outputs=outputs)) if one.check == "rdma"]
        assert (found.where, found.detail) == ("b", f"{chip} has no Thunderbolt 5, and RDMA needs it")
        assert "--backend ring" in found.remedy
        assert not any(word in found.remedy for word in ("Options", "rdma_ctl", "System Settings", "softwareupdate"))


@pytest.mark.parametrize("chip", ["Apple M4 Pro", "Apple M3 Ultra", "Apple M5 Max", "Apple M9 Ultra"])
def test_chips_with_thunderbolt_5_and_unknown_ones_are_asked_for_rdma(chip):
    assert bad(with_b(pair(), chip=chip)) == []


def test_the_report_of_a_file_whose_machines_are_off_names_them(tmp_path, capsys):
    file = tmp_path / "hosts.json"
    file.write_text(
        json.dumps(
            [
                {
                    "ssh": f"nobody-{name}.invalid",
                    "ips": [f"192.0.2.{number}"],
                    "rdma": [None if number == other else "rdma_en5" for other in (1, 2)],
                }
                for number, name in ((1, "a"), (2, "b"))
            ]
        )
    )
    words = ["doctor", "--hostfile", str(file), "--backend", "jaccl", "--port", "0"]
    assert main(words) == 1
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "no machine of the hosts file" in said
    assert main([*words, "--json"]) == 1
    lines = {line["check"]: line for line in json.loads(capsys.readouterr().out)["findings"]}
    assert lines["rdma"]["verdict"] == "skip"
    assert lines["rdma"]["where"] == "nobody-a.invalid, nobody-b.invalid"
