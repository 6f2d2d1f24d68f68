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
from tandem.config.settings import Settings
from tandem.launchers.agent import discovery
from tandem.protocol.events import History
from tandem.version import __version__


def tandem(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
    return subprocess.run([sys.executable, "-m", "tandem", *arguments], env=inherited | variables, input="",
                          capture_output=True, text=True, timeout=240, check=False)  # fmt: skip


@pytest.fixture
def refusal(monkeypatch, capfd):
    """The one line with which a command ends that cannot work."""
    for name in [name for name in os.environ if name.startswith("TANDEM_")]:
        monkeypatch.delenv(name)

    def refused(*arguments, **variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        try:
            code = main(arguments)
        except SystemExit as ended:
            code = ended.code
        for name in variables:
            monkeypatch.delenv(name)
        told = capfd.readouterr()
        (line,) = told.err.splitlines()
        assert (code, told.out) == (2, "") and line.startswith("tandem")
        return line

    return refused


def test_version():
    assert tandem("--version").stdout == f"tandem {__version__}\n"
    assert tandem("version").stdout.startswith(f"tandem {__version__}\n")


@pytest.mark.parametrize("words", [("version",), ("serve", "--help"), ("firstlight", "--list")])
def test_a_reader_who_leaves_early_hears_no_complaint(words):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tandem", *words], stdout=writer, stderr=subprocess.PIPE, text=True, timeout=240, check=False
        )
    finally:
        os.close(writer)
    assert done.stderr == ""
    assert done.returncode in (0, 141), "argparse takes no notice"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("words", [("version",), ("serve", "--help"), ("serve", "--help-all")])
def test_a_full_disk_below_the_output_is_told_without_a_traceback(words, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "tandem", *words], stdout=full, stderr=subprocess.PIPE, text=True, timeout=240, check=False
        )
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
    info = ServiceInfo(
        discovery.SERVICE, f"h1.{discovery.SERVICE}", port=1, properties={"chip": evil.encode()}, addresses=[bytes(4)]
    )
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
        (("generate", "--model", "/nowhere", "--prompt", "x"), "/nowhere: no such directory"),
        (("serve", "a", "--model", "b"), "--model b differ"),
        (("serve", "--metrics", "demo", "--port", "70000"), "70000"),
    ],
)
def test_wrong_usage_is_one_line(refusal, arguments, said):
    assert said in refusal(*arguments)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("TANDEM_PORT", "x", "TANDEM_PORT: 'x'"),
        ("TANDEM_API_KEY", "", "TANDEM_API_KEY is set but empty"),
        ("TANDEM_PROFILE", "rings", "'rings' is unknown"),
    ],
)
def test_wrong_variables_are_one_line(refusal, name, value, said):
    assert said in refusal("serve", "demo", **{name: value})


def test_a_model_that_is_not_there_is_told_without_secrets(tmp_path):
    done = tandem("serve", str(tmp_path), "--port", "0", "--log-level", "DEBUG", TANDEM_API_KEY="geheim",
                  TANDEM_RUNTIME_DIR=str(tmp_path / "run"))  # fmt: skip
    assert done.returncode == 2
    assert "config.json" in done.stderr and "Traceback" not in done.stderr
    assert "geheim" not in done.stdout + done.stderr


def test_list_of_no_models(tmp_path):
    done = tandem("model", "list", TANDEM_CACHE=str(tmp_path), HF_HOME=str(tmp_path))
    assert done.returncode == 0
    assert done.stdout == "no model is on this machine; `tandem model get demo` fetches a small one\n"


def test_a_runtime_directory_that_cannot_be_made(refusal, tmp_path):
    assert "/proc/nowhere" in refusal("serve", str(tmp_path), "--port", "0", TANDEM_RUNTIME_DIR="/proc/nowhere")
    long = refusal("serve", str(tmp_path), "--port", "0", TANDEM_RUNTIME_DIR=str(tmp_path / ("r" * 60)))
    assert "longer than the 81 bytes" in long


def test_answers_get_less_time_to_finish_on_a_terminal(monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for words, seconds in (((), 5.0), (("--drain-timeout", "20"), 20.0)):
        settings = prepared(build_parser().parse_args(["serve", "demo", *words]), quiet=True)
        assert (settings.process.drain_timeout, settings.process.log_level) == (seconds, "WARNING")
