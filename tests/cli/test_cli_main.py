"""The command line from outside: exit codes, one-line errors, help."""

from __future__ import annotations

import io
import json
import os
import shlex
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
from tandem.launchers.agent.discovery import Found
from tandem.protocol.events import History
from tandem.testing import tiny_model
from tandem.version import __version__


def tandem(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
    return subprocess.run([sys.executable, "-m", "tandem", *arguments], env=inherited | variables, input="",
                          capture_output=True, text=True, timeout=240, check=False)  # fmt: skip


@pytest.fixture
def refusal(monkeypatch, capfd, tmp_path):
    """The one line with which a command ends that cannot work."""
    for name in [name for name in os.environ if name.startswith("TANDEM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TANDEM_STATE_DIR", str(tmp_path))
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.chdir(tmp_path)

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
        Supervisor._announce(one, [SimpleNamespace(model="m", ranks=[SimpleNamespace(host="mini")], stages=1)])
    assert one._engines.announced and [event.kind for event in history.after(0)] == ["server_ready"]


def test_what_a_neighbour_announces_commands_no_terminal(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("TANDEM_STATE_DIR", str(tmp_path))
    monkeypatch.setattr(command, "refusal", lambda *_: None)
    evil = "M9\x1b[2J\x1b]0;owned\x07\x9b"
    info = ServiceInfo(
        discovery.SERVICE, f"h1.{discovery.SERVICE}", port=1, properties={"chip": evil.encode()}, addresses=[bytes(4)]
    )
    for found in (discovery._found(info), discovery.Found(evil, ("1.2.3.4",), 1)):
        monkeypatch.setattr(command, "find", lambda seconds, found=found: [found])
        assert main(["hosts", "find"]) == 0
        said = capsys.readouterr().out
        assert "M9[2J]0;owned" in said and not {"\x1b", "\x07", "\x9b"} & set(said)


def test_without_a_command():
    done = tandem()
    assert done.returncode == 2
    assert "serve" in done.stdout + done.stderr


MISTAKES = [
    ("frob", "frob"),
    ("servee", "tandem: there is no command 'servee'; did you mean serve?"),
    ("stop", "there is no command 'stop'; `tandem down` ends a server, `tandem model unload` a model"),
    ("serve m --task=embed -c 9", "--task: not needed here, leave it out; -c: use --max-context here"),
    ("parity m --quantization 4bit", "parity: unrecognized arguments: --quantization; `tandem parity"),
    ("xyzzy", "there is no command 'xyzzy'; `tandem --help` lists all"),
    ("serve", "no model is given"),
    ("serve --served-name a b", "it stands before --served-name"),
    ("serve demo --prot 1", "did you mean --port?"),
    ("serve demo --por 1", "--por"),
    ("serve demo --pipline-parallel-size 2", "did you mean --pipeline-parallel-size?"),
    ("serve demo --pipline 2", "did you mean --pipeline-parallel-size?"),
    ("serve demo --port x", "--port: 'x' is not a whole number"),
    ("serve demo --port 70000", "--port: 70000 is out of range: must be 0 to 65535"),
    ("serve demo --layer-split 20,16", "--layer-split: 20,16 is for 2 stage(s)"),
    ("serve demo --dtype int8", "--dtype: 'int8' is not one of auto, float32"),
    ("serve demo --config /nowhere.toml", "cannot read /nowhere.toml"),
    ("serve demo --api-key ''", "--api-key: a key must not be empty"),
    ("serve demo --api-key-file /nowhere", "--api-key-file: cannot read /nowhere"),
    ("serve a --model b", "--model b differ"),
    ("serve --metrics demo --port 70000", "70000"),
    ("generate demo --prompt a --top-p 3", "--top-p 3.0: must be above 0 and at most 1"),
    ("generate demo --prompt a --min-p nan", "--min-p nan: must be at least 0 and at most 1"),
    ("generate --local --prompt x", "no model is given"),
    ("generate /nowhere --prompt x", "/nowhere: no such directory"),
    ("generate --model /nowhere --prompt x", "/nowhere: no such directory"),
    ("generate /no/model --local", "the prompt is empty; give --prompt TEXT, or text on standard input"),
    ("chat --url http://127.0.0.1:9", "http://127.0.0.1:9 cannot be reached"),
    ("chat --url http://127.0.0.1:9 --local", "--local and the name of a server contradict one another"),
    ("up", "no model is given"),
    ("up m --name ../m", "--name ../m"),
    ("up m --pipeline-parallel-size 0", "--pipeline-parallel-size"),
    ("logs --name nobody", "has no log"),
    ("logs -n x", "not a number of lines"),
    ("status --interval -1", "not a number of seconds"),
    ("status --port 1", "no server listens"),
    ("status --jsn", "tandem status: unrecognized arguments: --jsn; did you mean --json?; `tandem status --help`"),
    ("restart --name never", "never was never started by this version: `tandem up MODEL` starts a server"),
    ("model lst", "tandem model: there is no action 'lst'; did you mean list?"),
    ("model path /nowhere", "/nowhere: no such directory"),
    ("model path dem", "did you mean demo?"),
    ("model prune --unused-days -1", "--unused-days: -1 is out of range: must be 0 or more"),
    ("plan TINY --context 513", "--context 513: the model was made for 512"),
    ("plan TINY --streams 0", "--streams 0"),
    ("plan TINY --hosts a=64GB:z80", "chip 'z80'"),
    ("plan TINY --hosts a=64GB --layout tp=2", "needs 2 machines, there are 1"),
    ("plan TINY --hosts a=64GB b=64GB --layout tp=x", "tp=x must be whole numbers"),
    ("plan TINY --hosts a=64GB b=64GB --link string", "--link string"),
    ("plan gpt-oss-20b --quant 5it --hosts a=64GB", "--quant 5it: is not one of native, bf16, 2bit"),
    ("plan demo --quant 4bit --hosts a=64GB", "demo is planned for as its files are; leave --quant out"),
    ("plan demo --hostfile ''", "argument --hostfile: must not be empty"),
    ("hosts pair nobody --timeout 0.5", "no agent nobody answered"),
    ("hosts forget nobody", "nobody is not paired"),
    ("hosts find --timeout 0", "--timeout 0"),
    ("hosts pair 'a b'", "is not NAME, IP or IP:PORT"),
    ("hosts write - agent:x", "no agent x answered"),
    ("hosts write -", "no hosts are named"),
    ("hosts write /nowhere/hosts.json localhost", "/nowhere/hosts.json: cannot be written: No such file or directory; name"),
    ("hosts write - 127.0.0.1 127.0.0.1", "named twice"),
    ("hosts write - 127.0.0.1 --over ethernet", "is for Macs"),
    ("hosts write - 127.0.0.1 --cable x", "--cable x"),
    ("doctor --deep --json", "--deep: goes with neither"),
    ("doctor --hostfile /nowhere", "/nowhere"),
    ("doctor --hostfile ~nobody-here/hosts.json", "whom the system does not know: write it out"),
    ("doctor --hostfile ''", "argument --hostfile: must not be empty"),
    ("doctor --ports 9-1", "--ports 9-1"),
    ("doctor --ports x", "--ports x"),
    ("doctor --backend tcp", "invalid choice"),
    ("doctor --layout pp=x", "pp=x"),
    ("doctor --streams x", "--streams"),
    ("firstlight --only nothing", "--only nothing: is no check"),
    ("firstlight --only links", "needs several machines; give --hostfile"),
    ("firstlight --only fast-fences", "give --risky"),
    ("firstlight --minutes 0", "--minutes 0.0: must be above 0"),
    ("firstlight --output nowhere/x.md", "there is no directory nowhere"),
    ("firstlight --output ~nobody-here/x.md", "whom the system does not know: write it out"),
    ("firstlight --hostfile none.json", "cannot be read"),
    ("selftest --cluster a.json --hostfile a.json", "--hostfile: not allowed with argument --cluster"),
    ("selftest --publish a -o b.md", "not allowed with argument --publish"),
    ("firstlight --hostfile ''", "argument --hostfile: must not be empty"),
    ("firstlight --model ./none", "no such directory or file"),
    ("parity", "no model is given"),
    ("parity TINY --tokens 0", "--tokens 0"),
    ("parity TINY --prefill-chunk 0", "--prefill-chunk 0"),
    ("parity TINY --prefill-chunk 300", "context of 512"),
    ("parity TINY --tolerance nan", "--tolerance nan"),
    ("parity TINY --executor inline", "--executor inline"),
    ("parity TINY --prompts nowhere", "cannot be read"),
    ("parity TINY --pipeline-parallel-size 9", "--pipeline-parallel-size"),
    ("bench frob", "frob"),
    ("bench serve --base-url localhost:8000", "--url localhost:8000: must begin with http"),
    ("bench serve --base-url http://127.0.0.1:1", "cannot be reached"),
    ("bench serve --goodput ttft", "--goodput"),
    ("bench serve --goodput ttft:nan", "--goodput ttft:nan: must be METRIC:MILLISECONDS"),
    ("bench serve --request-rate 0", "--request-rate"),
    ("bench serve --request-rate 1e308", "--request-rate 1e+308: must be above 0 and at most 1000000, or inf"),
    ("bench serve --burstiness inf", "--burstiness inf: must be above 0 and at most 1000000"),
    ("bench serve --temperature nan", "--temperature nan: must be a number from 0 on"),
    ("bench serve --random-input-len 99999999999", "--random-input-len 99999999999: must be 1 to 10000000"),
    ("bench serve --metric-percentiles 101", "--metric-percentiles"),
    ("bench serve --percentile-metrics x", "--percentile-metrics"),
    ("bench serve --num-prompts 0", "--num-prompts"),
    ("bench serve --api-key-file /no/such/file", "--api-key-file"),
    ("bench latency --input-len 99999999999", "--input-len 99999999999: must be 1 to 10000000"),
    ("bench latency --output-len 0", "--output-len"),
    ("bench comm --sizes 4X", "--sizes"),
    ("bench comm --sizes ²", "--sizes ²: must be bytes"),
    (f"bench comm --sizes {'9' * 5000}", "must be bytes from 4 to 1G"),
    ("bench comm --ranks 1", "--ranks"),
    ("bench comm --ranks 1000", "--ranks 1000: must be 2 to 64"),
    ("bench comm --timeout inf", "--timeout inf: must be above 0, and at most 86400"),
    ("bench comm --backend jaccl", "--hostfile"),
    ("bench comm --sizes 4K --write-profile new.json", "--sizes 4K: --write-profile needs two sizes"),
    ("bench comm --ranks 3 --write-profile new.json", "--ranks 3: --write-profile measures two ranks"),
    ("bench comm --write-profile /dev/null/x.json", "--write-profile /dev/null/x.json: cannot"),
    (f"bench comm --write-profile '{__file__}'", f"--write-profile {__file__}: is no profile of `tandem bench comm`"),
    ("bench comm --hostfile /no/such/file", "--hostfile /no/such/file: cannot be read"),
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(tiny_model(tmp_path_factory.mktemp("main") / "tiny"))


@pytest.mark.parametrize(("words", "said"), MISTAKES, ids=[words[:60] for words, _ in MISTAKES])
def test_wrong_usage_is_one_line(refusal, tiny, words, said):
    assert said in refusal(*shlex.split(words.replace("TINY", tiny)))


def test_input_that_is_not_utf_8_ends_in_no_traceback(refusal, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff"), encoding="utf-8"))
    assert "/nowhere: no such directory" in refusal("generate", "/nowhere")


def test_a_model_that_is_not_there_is_told_without_secrets(tmp_path):
    done = tandem("serve", str(tmp_path), "--port", "0", "--log-level", "DEBUG", TANDEM_API_KEY="geheim",
                  TANDEM_RUNTIME_DIR=str(tmp_path / "run"))  # fmt: skip
    assert done.returncode == 2
    assert "config.json" in done.stderr and "Traceback" not in done.stderr
    assert "geheim" not in done.stdout + done.stderr


def test_a_runtime_directory_that_cannot_be_made(refusal, tmp_path):
    assert "/proc/nowhere" in refusal("serve", str(tmp_path), "--port", "0", TANDEM_RUNTIME_DIR="/proc/nowhere")
    long = refusal("serve", str(tmp_path), "--port", "0", TANDEM_RUNTIME_DIR=str(tmp_path / ("r" * 60)))
    assert "longer than the 81 bytes" in long


def test_answers_get_less_time_to_finish_on_a_terminal(monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for words, seconds in (((), 5.0), (("--drain-timeout", "20"), 20.0)):
        settings = prepared(build_parser().parse_args(["serve", "demo", *words]), quiet=True)
        assert (settings.process.drain_timeout, settings.process.log_level) == (seconds, "WARNING")


def test_a_machine_that_is_announced_and_does_not_answer_is_not_listed(monkeypatch, capsys):
    found = [Found(name, (f"10.0.0.{number}",), 7000, {"pair_port": "7001"}) for number, name in enumerate(("mac-a", "mac-b"))]
    monkeypatch.setattr("tandem.cli.hosts.command.find", lambda seconds: found)

    def refusal(address, port, seconds):
        """Of the pairing port: at the other a connection without a key would be logged."""
        return None if (address, port) == ("10.0.0.0", 7001) else OSError("off")

    monkeypatch.setattr("tandem.cli.hosts.command.refusal", refusal)
    assert main(["hosts", "find", "--json"]) == 0
    said = capsys.readouterr()
    assert [one["name"] for one in json.loads(said.out)] == ["mac-a"]
    assert said.err == "mac-b is announced, but does not answer: it is off or cut off, or has a firewall\n"
