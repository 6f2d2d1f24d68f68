"""The command line from outside: exit codes, one-line errors, help."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from zeroconf import ServiceInfo

from tandem.cli.hosts import command
from tandem.cli.main import build_parser, main
from tandem.cli.processes import prepared
from tandem.cli.serve import Supervisor
from tandem.config.options import options
from tandem.config.settings import Settings
from tandem.launchers.agent import discovery
from tandem.protocol.events import History
from tandem.version import __version__


def tandem(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
    return subprocess.run([sys.executable, "-m", "tandem", *arguments], env=inherited | variables, input="",
                          capture_output=True, text=True, timeout=240, check=False)  # fmt: skip


def refusal(*arguments: str, **variables: str) -> str:
    """The one line with which a command ends that cannot work."""
    done = tandem(*arguments, **variables)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("tandem")
    return line


def test_version():
    assert tandem("--version").stdout == f"tandem {__version__}\n"
    assert tandem("version").stdout.startswith(f"tandem {__version__}\n")


@pytest.mark.parametrize("words", [("version",), ("serve", "--help"), ("firstlight", "--list")])
def test_a_reader_who_leaves_early_hears_no_complaint(words):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run([sys.executable, "-m", "tandem", *words], stdout=writer, stderr=subprocess.PIPE,
                              text=True, timeout=240, check=False)
    finally:
        os.close(writer)
    assert done.stderr == ""
    assert done.returncode in (0, 141), "argparse takes no notice"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("words", [("version",), ("serve", "--help"), ("serve", "--help-all")])
def test_a_full_disk_below_the_output_is_told_without_a_traceback(words, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "tandem", *words], stdout=full, stderr=subprocess.PIPE, text=True,
                              timeout=240, check=False)
    assert (done.returncode, done.stderr) == (2, "tandem: standard output cannot be written: No space left on device\n")


def test_closed_streams_lead_nowhere():
    shell = '"$0" -m tandem --version <&- >&- && "$0" -m tandem serve --no-such <&- >&- 2>&-'
    done = subprocess.run(["sh", "-c", shell, sys.executable], capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


def test_a_server_that_is_ready_stays_when_nobody_reads_what_it_prints(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    history = History()
    one = SimpleNamespace(_engines=SimpleNamespace(), _history=history, _settings=Settings())
    with os.fdopen(writer, "w") as gone, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", gone)
        Supervisor._announce(one, [SimpleNamespace(model="m", ranks=[0], stages=1)])
    assert one._engines.announced and [event.kind for event in history.after(0)] == ["server_ready"]


def test_what_a_neighbour_announces_commands_no_terminal(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("TANDEM_STATE_DIR", str(tmp_path))
    evil = "M9\x1b[2J\x1b]0;owned\x07\x9b"
    info = ServiceInfo(discovery.SERVICE, f"h1.{discovery.SERVICE}", port=1, properties={"chip": evil.encode()},
                       addresses=[bytes(4)])
    for found in (discovery._found(info), discovery.Found(evil, ("1.2.3.4",), 1)):
        monkeypatch.setattr(command, "find", lambda seconds, found=found: [found])
        assert main(["hosts", "find"]) == 0
        said = capsys.readouterr().out
        assert "M9[2J]0;owned" in said and not {"\x1b", "\x07", "\x9b"} & set(said)


def test_the_home_of_somebody_who_is_not_there(capsys):
    for words in (["firstlight", "--output", "~nobody-here/x.md"], ["doctor", "--hostfile", "~nobody-here/hosts.json"]):
        assert main(words) == 2
        assert "whom the system does not know: write it out" in capsys.readouterr().err


def test_without_a_command():
    done = tandem()
    assert done.returncode == 2
    assert "serve" in done.stdout + done.stderr


def test_help_of_serve_lists_every_setting():
    done = tandem("serve", "--help-all", COLUMNS="200")
    assert done.returncode == 0
    assert [option.flag for option in options() if option.name != "model" and option.flag not in done.stdout] == []
    assert "MODEL" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("frob",), "frob"),
        (("serve",), "no model is given"),
        (("serve", "demo", "--prot", "1"), "--prot"),
        (("serve", "demo", "--por", "1"), "--por"),
        (("serve", "demo", "--port", "x"), "--port: 'x' is not a whole number"),
        (("serve", "demo", "--port", "70000"), "--port: 70000 is out of range: must be 0 to 65535"),
        (("serve", "demo", "--layer-split", "20,16"), "--layer-split: 20,16 is for 2 stage(s)"),
        (("generate", "demo", "--prompt", "a", "--top-p", "3"), "--top-p 3.0: must be above 0 and at most 1"),
        (("generate", "demo", "--prompt", "a", "--min-p", "nan"), "--min-p nan: must be at least 0 and at most 1"),
        (("serve", "demo", "--dtype", "int8"), "--dtype: 'int8' is not one of auto, float32"),
        (("serve", "demo", "--config", "/nowhere.toml"), "cannot read /nowhere.toml"),
        (("serve", "demo", "--api-key", ""), "--api-key: a key must not be empty"),
        (("serve", "demo", "--api-key-file", "/nowhere"), "--api-key-file: cannot read /nowhere"),
        (("generate", "--local", "--prompt", "x"), "no model is given"),
        (("generate", "/nowhere", "--prompt", "x"), "/nowhere: no such directory"),
        (("model", "path", "/nowhere"), "/nowhere: no such directory"),
    ],
)
def test_wrong_usage_is_one_line(arguments, said):
    assert said in refusal(*arguments)


def test_wrong_variables_are_one_line():
    assert "TANDEM_PORT: 'x'" in refusal("serve", "demo", TANDEM_PORT="x")
    assert "TANDEM_API_KEY is set but empty" in refusal("serve", "demo", TANDEM_API_KEY="")
    assert "'rings' is unknown" in refusal("serve", "demo", TANDEM_PROFILE="rings")


def test_a_model_that_is_not_there(tmp_path):
    done = tandem("serve", str(tmp_path), "--port", "0", TANDEM_RUNTIME_DIR=str(tmp_path / "run"))
    assert done.returncode == 2
    assert "config.json" in done.stderr
    assert "Traceback" not in done.stderr


def test_secrets_do_not_show(tmp_path):
    done = tandem("serve", str(tmp_path), "--port", "0", "--log-level", "DEBUG", TANDEM_API_KEY="geheim",
                  TANDEM_RUNTIME_DIR=str(tmp_path / "run"))  # fmt: skip
    assert "geheim" not in done.stdout + done.stderr


def test_list_of_no_models(tmp_path):
    done = tandem("model", "list", TANDEM_CACHE=str(tmp_path), HF_HOME=str(tmp_path))
    assert done.returncode == 0
    assert done.stdout == "no model is on this machine; `tandem model get demo` fetches a small one\n"


def test_a_runtime_directory_that_cannot_be_made(tmp_path):
    assert "/proc/nowhere" in refusal("serve", str(tmp_path), "--port", "0", TANDEM_RUNTIME_DIR="/proc/nowhere")
    long = refusal("serve", str(tmp_path), "--port", "0", TANDEM_RUNTIME_DIR=str(tmp_path / ("r" * 60)))
    assert "longer than the 81 bytes" in long


def test_the_model_with_and_without_its_flag():
    assert "/nowhere: no such directory" in refusal("generate", "--model", "/nowhere", "--prompt", "x")
    assert "--model b differ" in refusal("serve", "a", "--model", "b")


def test_answers_get_less_time_to_finish_on_a_terminal(monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for words, seconds in (((), 5.0), (("--drain-timeout", "20"), 20.0)):
        settings = prepared(build_parser().parse_args(["serve", "demo", *words]), quiet=True)
        assert (settings.process.drain_timeout, settings.process.log_level) == (seconds, "WARNING")


def test_a_switch_does_not_swallow_the_model():
    assert "70000" in refusal("serve", "--metrics", "demo", "--port", "70000")
