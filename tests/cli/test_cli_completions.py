"""Completion in the shells themselves, where they are installed; the scripts are made from the parser."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from system_packages import require
from tandem.cli.completions import describe, script
from tandem.cli.main import build_parser, main

CASES = [
    (["ser"], {"serve", "service"}),
    (["serve", "--devi"], {"--device"}),
    (["serve", "--device", ""], {"auto", "cpu", "gpu"}),
    (["serve", "--device", "c"], {"cpu"}),
    (["serve", "model", "--launcher", "m"], {"manual"}),
    (["serve", "--device=c"], {"cpu"}),
    (["serve", "--device="], {"auto", "cpu", "gpu"}),
    (["service", "install", "--launcher=man"], {"manual"}),
    (["model", "g"], {"get"}),
    (["service", "install", "--wir"], {"--wired"}),
    (["completions", ""], {"bash", "zsh", "fish"}),
    (["rank", "--log-level", "D"], {"DEBUG"}),
]
BASH = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _tandem; printf '%s\\n' "${COMPREPLY[@]}"
"""
ZSH = """
compdef() { }
_files() { }
_describe() { for one in "${(@P)2}"; do printf '%s\\n' "${one%%:*}"; done }
compadd() { shift; printf '%s\\n' "$@" }
compset() { }
source "$1"; shift
words=("$@"); CURRENT=$#; _tandem
"""


def completed(shell: str, words: list[str], directory: Path) -> set[str]:
    """What a shell offers for the last of `words`."""
    require(shell)
    file = directory / "script"
    file.write_text(script(shell, build_parser()))
    if shell == "fish":
        line = " ".join(["tandem", *words])
        command = [shell, "-N", "-c", 'source $argv[1]; complete -C "$argv[2]"', str(file), line]
    else:
        if shell == "bash":  # readline's words
            words = [part for word in words for part in (re.split("(=)", word) if "=" in word else [word])]
            words = words[:-1] if words[-2:] == ["=", ""] else words
        command = [shell, "-c", BASH if shell == "bash" else ZSH, shell, str(file), "tandem", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    offered = {line.partition("\t")[0].rpartition("=")[2] for line in done.stdout.splitlines() if line}
    return {one for one in offered if one.startswith(words[-1].rpartition("=")[2])}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize(("words", "offered"), CASES)
def test_words_are_offered(shell: str, words: list[str], offered: set[str], tmp_path: Path) -> None:
    assert completed(shell, words, tmp_path) == offered


def test_every_command_and_option_is_there_and_nothing_that_is_hidden() -> None:
    commands = {one.place: one for one in describe(build_parser())}
    assert {"", "serve", "model get", "hosts pair", "service status"} <= set(commands)
    named = {name for word in commands["serve"].options for name in word.names}
    assert {"--config", "--hostfile", "-pp", "--wired", "--help"} <= named
    assert not any(name.startswith("--no-") for name in named)
    text = script("bash", build_parser())
    assert all(one.place in text for one in commands.values())
    assert "mapfile" not in text and "declare -A" not in text and "local -n" not in text  # macOS has bash 3.2


def test_zsh_has_its_completion_started_where_nobody_has(tmp_path: Path) -> None:
    require("zsh")
    (tmp_path / "script").write_text(script("zsh", build_parser()))
    done = subprocess.run(["zsh", "-f", "-c", "source $1; print $_comps[tandem]", "zsh", str(tmp_path / "script")],
                          capture_output=True, text=True, check=True, env={**os.environ, "ZDOTDIR": str(tmp_path)})
    assert (done.stdout, done.stderr) == ("_tandem\n", "")


def test_the_command_prints_them_and_refuses_other_shells(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completions", "fish"]) == 0
    assert capsys.readouterr().out.startswith("function __tandem_at")
    with pytest.raises(SystemExit) as ended:
        main(["completions", "tcsh"])
    assert ended.value.code == 2
