"""Completion in the shells themselves, where they are installed; the scripts are made from the parser."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from system_packages import require
from tandem.cli.main import build_parser, main
from tandem.cli.shell_completions import script

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
    (["serve", "--pipeline-p"], {"--pipeline-parallel-size"}),
    (["serve", "-pp", "2", "--devi"], {"--device"}),
    (["pul"], {"pull"}),
    (["rank", "--join", "host:1", "--log-l"], {"--log-level"}),
    (["plan", "demo", "--hosts", "a=8GB", "b=8GB", "--goa"], {"--goal"}),
    (["doctor", "--ray", "--hostf"], {"--hostfile"}),
    (["doctor", "--hostfile", "MARK"], {"MARKED"}),
    (["serve", "--tls-cert=MARK"], {"MARKED"}),
]
BASH = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _tandem; printf '%s\\n' "${COMPREPLY[@]}"
"""
ZSH = """
zmodload zsh/zpty
zpty shell zsh -f -i
zpty -w shell "PROMPT=; source $1"
zpty -w -n shell "$2"$'\\t'
while zpty -r shell line; do print -rn -- "$line"; done
"""
ZSH_COMPLETES = """
autoload -Uz compinit; compinit -u -D
source %s
comppostfuncs=(exit)
compadd() {
  if [[ "${@[1,(i)(-|--)]}" != *-(O|A|D)\\ * ]]; then
    local -a hits
    builtin compadd -A hits "$@"
    print -rl -- "offered ${(@)^hits}"
  fi
  builtin compadd "$@"
}
"""


def completed(shell: str, words: list[str], directory: Path) -> set[str]:
    """What a shell offers for the last of `words`."""
    require(shell)
    (directory / "MARKED").touch()
    file = directory / "script"
    file.write_text(script(shell, build_parser()))
    if shell == "fish":
        line = " ".join(["tandem", *words])
        command = [shell, "-N", "-c", 'source $argv[1]; complete -C "$argv[2]"', str(file), line]
    elif shell == "zsh":
        (directory / "completes").write_text(ZSH_COMPLETES % shlex.quote(str(file)))
        command = [shell, "-f", "-c", ZSH, shell, str(directory / "completes"), " ".join(["tandem", *words])]
    else:  # in readline's words
        words = [part for word in words for part in (re.split("(=)", word) if "=" in word else [word])]
        words = words[:-1] if words[-2:] == ["=", ""] else words
        command = [shell, "-c", BASH, shell, str(file), "tandem", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, cwd=directory)
    assert done.stderr == ""
    if shell == "zsh":
        assert "not found" not in done.stdout and "error" not in done.stdout, done.stdout
        lines = re.findall(r"offered (\S+)", done.stdout)
    else:
        lines = [line for line in done.stdout.splitlines() if line]
    offered = {line.partition("\t")[0].rpartition("=")[2] for line in lines}
    return {one for one in offered if one.startswith(words[-1].rpartition("=")[2])}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize(("words", "offered"), CASES)
def test_words_are_offered(shell: str, words: list[str], offered: set[str], tmp_path: Path) -> None:
    assert completed(shell, words, tmp_path) == offered


def test_every_command_and_option_is_there_and_nothing_that_is_hidden() -> None:
    for shell in ("bash", "zsh", "fish"):
        text = script(shell, build_parser())
        for word in ("serve", "get", "pair", "distributed_launcher", "config", "hostfile", "pp", "wired", "help-all"):
            assert word in text, (shell, word)
        assert "no-enable-metrics" not in text and "probe" not in text
    text = script("bash", build_parser())
    assert all(
        f"_shtab_tandem_{place}_option_strings=" in text
        for place in ("serve", "pull", "model_get", "hosts_pair", "service_status")
    )
    assert "mapfile" not in text and "declare -A" not in text and "local -n" not in text  # macOS has bash 3.2


def test_zsh_has_its_completion_started_where_nobody_has(tmp_path: Path) -> None:
    require("zsh")
    (tmp_path / "script").write_text(script("zsh", build_parser()))
    done = subprocess.run(
        ["zsh", "-f", "-c", "source $1; print $_comps[tandem]", "zsh", str(tmp_path / "script")],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "ZDOTDIR": str(tmp_path)},
    )
    assert (done.stdout, done.stderr) == ("_shtab_tandem\n", "")


def test_the_command_prints_them_and_refuses_other_shells(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completions", "fish"]) == 0
    assert "complete -c tandem " in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["completions", "tcsh"])
    assert ended.value.code == 2
