"""The system's tools are found though PATH does not lead to them, and nothing fails where they are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.system import tools


@pytest.fixture
def sbin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the system's programs are, and no PATH that leads there."""
    monkeypatch.setattr(tools, "SYSTEM_PATHS", f":{tmp_path}")
    monkeypatch.setenv("PATH", "/nowhere")
    return tmp_path


def program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_a_shell_without_sbin_on_its_path_is_enough(sbin: Path) -> None:
    there = program(sbin / "sysctl", '#!/bin/sh\nprintf "%s\\n" "$*"\n')
    assert tools.find_tool("sysctl") == str(there)
    assert tools.sysctl("hw.memsize") == "-n hw.memsize"
    assert tools.output_of(["sysctl", "hw.memsize"]) == "hw.memsize\n"


@pytest.mark.parametrize("text", [None, "no program"])
def test_what_is_not_there_or_does_not_start_says_nothing(sbin: Path, text: str | None) -> None:
    if text:
        program(sbin / "sysctl", text)
    assert tools.sysctl("hw.memsize") == ""
    assert tools.output_of(["sysctl"]) is None


def test_an_empty_environment_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PATH")
    assert tools.find_tool("sh")
