"""What the command line understands: words that were meant, short and full help, other names, models on the disk."""

from __future__ import annotations

import argparse
import os
import pkgutil
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from msgspec import structs

from jargon import jargon
from mac_evidence import pair
from statuses import STATUS
from tandem.cli import address, agent
from tandem.cli.arguments import OFTEN, Later
from tandem.cli.doctor import _print as print_doctor
from tandem.cli.main import build_parser, main
from tandem.cli.screen import event_lines, screen
from tandem.cli.status import Look, Replica, _picture
from tandem.config.options import by_name, options
from tandem.diagnostics.doctor.examine import findings
from tandem.errors import UsageError
from tandem.launchers.agent.agent_server import PROGRAMS, PURPOSES
from tandem.launchers.agent.pairing import ATTEMPTS, LIFE_S, AgentSide, HeadSide
from tandem.launchers.agent.trust import Trust
from tandem.protocol.agent_messages import PairHello
from tandem.protocol.control import RankInfo
from tandem.protocol.events import Event
from tandem.protocol.supervisor_messages import ReplicaInfo
from tandem.supervision.record import Background, Record
from tandem.testing import tiny_model


@pytest.fixture(autouse=True)
def _own_directories(tmp_path, monkeypatch):
    for name in ("TANDEM_CACHE", "TANDEM_STATE_DIR", "HF_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.delenv("TANDEM_BASE_URL", raising=False)


def test_a_model_that_is_nearly_there(capsys, tmp_path):
    tiny_model(tmp_path / "my-model")
    main(["model", "path", str(tmp_path / "my-modle")])
    assert f"did you mean {tmp_path / 'my-model'}?" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["model", "hosts", "bench"])
def test_a_command_without_its_action_lists_the_actions(capsys, command):
    with pytest.raises(SystemExit):
        main([command])
    shown = capsys.readouterr().err
    assert "name an action" in shown
    assert {"model": "prune", "hosts": "pair", "bench": "latency"}[command] in shown


@pytest.mark.parametrize("command", ["serve", "chat", "generate", "up"])
def test_help_is_short_and_help_all_has_everything(capsys, command):
    shown = {}
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as ended:
            main([command, flag])
        assert ended.value.code == 0
        shown[flag] = capsys.readouterr().out
    assert len(shown["--help"].splitlines()) <= 75
    assert f"tandem {command} --help-all" in shown["--help"]
    assert "--rejoin-timeout" not in shown["--help"]
    assert "--rejoin-timeout" in shown["--help-all"]
    if command == "serve":
        missing = [one.flag for one in options() if one.name != "model" and one.flag not in shown["--help-all"]]
        assert missing == []
        assert "--no-enable-metrics turns it off" in " ".join(shown["--help-all"].split())
    if command == "chat":
        assert shown["--help"].index("--system") < shown["--help"].index("--pipeline-parallel-size")


def test_the_commands_are_listed_in_groups_a_line_each(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    (commands,) = [one for one in build_parser()._actions if isinstance(one, argparse._SubParsersAction)]
    listed = [one.dest for one in commands._choices_actions]
    rows = [line.split()[0] for line in shown.splitlines() if line.startswith("  ")]
    assert sorted(rows) == sorted(listed)
    assert "To begin with: tandem model get demo" in shown
    assert [line for line in shown.splitlines() if line.endswith(":")][0] == "a model:"
    assert max(map(len, shown.splitlines())) <= 110


def test_what_doctor_status_and_plan_print_needs_no_glossary(capsys):
    evidence = pair(backend="ring", own_port=8000)
    print_doctor(evidence, findings(evidence), verbose=False)
    elsewhere = replace(evidence, hosts=[replace(host, address=f"10.0.0.{n}") for n, host in enumerate(evidence.hosts)])
    print_doctor(elsewhere, findings(elsewhere), verbose=False)
    ranks = [RankInfo(n, n, (4 * n, 4 * n + 4), 7, f"mac-{n}", 9, 9, 0.1, slowdown=4.0) for n in range(2)]
    status = structs.replace(STATUS, ranks=ranks, stages=2, detail="loads")
    event = Event(number=1, at=0.0, kind="rank_lost", level="error", text="a Mac is away", remedy="wait", replica=0)
    replicas = [Replica(ReplicaInfo(0, "ipc://x", "running", 2, 0), status, 0.0, 3.0)]
    look = Look("default", True, 7, "http://127.0.0.1:8000", "m", 1.0, replicas, events=[event], announced=True)
    screen(160).print(_picture(look))
    hosts = ["--hosts", "a=128GB:m4-max", "b=64GB:m4-pro", "c=64GB:m4-pro", "d=64GB:m4-pro"]
    assert main(["plan", "Qwen3-32B", "--quant", "8bit", "--streams", "4", "--all", *hosts]) == 0
    shown = capsys.readouterr().out
    assert shown.count("networksetup -setmanual") == 1 and "thunderbolt (a, b): 10.0.0.0 is not" in shown
    for words in (
        "2 warning(s), no fault: serving works",
        "sums that 2 machines make together are right",
        "GPU setting",
        "server: ready",
        "2 of 2",
        "4.0 x slower",
        "(-tp 2 -pp 2: ",
    ):
        assert words in shown
    views = "\n".join(line for line in shown.splitlines() if not line.startswith("tandem "))  # commands have the flags' words
    assert "\n".join(line for line in views.splitlines() if jargon(re.sub(r"-[pdt]p( \d|,)", "", line))) == ""
    print_doctor(evidence, findings(evidence), verbose=True)
    assert {"all_sum", "fence"} <= jargon(capsys.readouterr().out)


def test_other_names_are_the_same_commands():
    for short, action in (("pull", "get"), ("rm", "rm"), ("show", "show")):
        arguments = build_parser().parse_args([short, "demo"])
        assert (arguments.action, arguments.name) == (action, "demo")
    for short, action in (("list", "list"), ("ls", "list"), ("ps", "ps")):
        assert build_parser().parse_args([short]).action == action
    assert build_parser().parse_args(["run", "demo"]).run == build_parser().parse_args(["chat", "demo"]).run


def test_models_are_listed_shown_and_removed(capsys, tmp_path):
    assert main(["list"]) == 0
    assert "tandem model get demo" in capsys.readouterr().out
    model = tiny_model(tmp_path / "TANDEM_CACHE" / "converted" / "tiny")
    (model / "generation_config.json").write_text('{"temperature": 0.5}')
    snapshot = tmp_path / "HF_HOME" / "hub" / "models--org--small" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "blob").write_bytes(b"x" * 2**20)
    (snapshot.parents[2] / "models--org--odd[4bit][" / "snapshots" / "abc").mkdir(parents=True)
    (snapshot.parents[2] / "models--org--odd[4bit][" / "snapshots" / "abc" / "config.json").write_text("{}")
    assert main(["list"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert any(row.startswith("org/odd[4bit][ ") for row in rows)
    assert rows[0].split() == ["name", "kind", "size", "modified"]
    assert any(row.split()[:4] == ["org/small", "incomplete", "1", "MiB"] for row in rows), "it has no weights"
    assert any(row.split()[:2] == [str(model), "converted"] for row in rows)
    assert main(["show", str(model)]) == 0
    shown = capsys.readouterr().out
    assert "temperature 0.5" in shown and "layers" in shown
    assert main(["rm", "org/small"]) == 0
    assert "org/small is removed; 1 MiB are free again" in capsys.readouterr().out
    assert not snapshot.exists() and model.exists()
    assert main(["rm", "org/small"]) != 0
    assert "org/small: is in no cache of models" in capsys.readouterr().err


def of(*words):
    return build_parser().parse_args(["top", *words])


def test_every_command_finds_the_server_in_the_same_way(monkeypatch):
    assert address.server_url(of()) == "http://127.0.0.1:8000"
    lock = Background("default").lock()
    try:
        Background("default").write(Record(1, "0.0.0.0", 22100, "demo", 0.0, 1.0))
        assert address.server_url(of()) == "http://127.0.0.1:22100"
        assert address.server_url(of("--name", "default")) == "http://127.0.0.1:22100"
        monkeypatch.setenv("TANDEM_BASE_URL", "http://mac:8000/v1/")
        assert address.server_url(of()) == "http://mac:8000"
        assert address.server_url(of("--port", "9")) == "http://127.0.0.1:9"
        for flag in ("--url", "--base-url"):
            assert address.server_url(of(flag, "https://a:1/v1")) == "https://a:1"
        with pytest.raises(UsageError, match="--port and --name both name a server"):
            address.server_url(of("--port", "9", "--name", "x"))
    finally:
        os.close(lock)
    with pytest.raises(UsageError, match="--name gone: no server of that name runs"):
        address.server_url(of("--name", "gone"))
    for words in (["replica", "list"], ["batch", "a", "b"], ["model", "ps"], ["chat"], ["generate"], ["bench", "latency"]):
        assert isinstance(build_parser().parse_args([*words, "--url", "http://a:1"]), argparse.Namespace)


def test_a_model_that_quant_is_not_for_is_answered_in_a_short_line(capsys, tmp_path):
    model = tiny_model(tmp_path / "Qwen3-8B-4bit")
    assert main(["plan", str(model), "--quant", "4bit", "--hosts", "a=8GB"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "leave --quant out" in line and "did you mean Qwen/Qwen3-8B?" in line
    assert len(line) < 300 + len(str(model))


def test_the_planned_command_keeps_the_machines(capsys, tmp_path):
    model = tiny_model(tmp_path / "tiny")
    assert main(["plan", str(model), "--hosts", "a=8GB:m4,b=64GB:m3-ultra"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line in ("tandem hosts write hosts.json a", "tandem hosts write hosts.json b") for line in lines)
    assert any(line.startswith(f"tandem serve {model} --hostfile hosts.json") for line in lines)
    file = tmp_path / "hosts.json"
    file.write_text('[{"ssh": "a", "memory": "8GB", "chip": "m4"}, {"ssh": "b", "memory": "64GB", "chip": "m3-ultra"}]')
    assert main(["plan", str(model), "--hostfile", str(file)]) == 0
    (serve,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("tandem serve ")]
    assert f"--hostfile {file}" in serve


def test_what_does_not_apply_is_one_line_of_the_doctor(capsys, monkeypatch):
    from tandem.cli import doctor
    from tandem.diagnostics.doctor.evidence import Evidence, Finding

    found = [
        Finding("versions", "ok", "here", "alike"),
        Finding("ssh", "skip", "", "one machine"),
        Finding("rdma", "skip", "", "no Mac"),
    ]
    monkeypatch.setattr(doctor, "examine", lambda question, *_: Evidence([], "here"))
    monkeypatch.setattr(doctor, "findings", lambda evidence: found)
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "2 more checks do not apply here (--verbose says why)." in shown
    assert "one machine" not in shown
    assert main(["doctor", "--verbose"]) == 0
    assert "one machine" in capsys.readouterr().out


def test_every_command_is_where_the_parser_says():
    parsers, places = [build_parser()], set()
    while parsers:
        parser = parsers.pop()
        run = parser.get_default("run")
        if isinstance(run, Later):
            assert callable(pkgutil.resolve_name(f"tandem.cli.{run.place}")), run.place
            places.add(run.place)
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
    assert len(places) > 15


def test_help_names_settings_that_exist():
    assert set(by_name()) >= OFTEN


def test_the_first_replica_is_named_with_its_events():
    event = {"level": "info", "time": 0.0, "model": "", "text": "it is lost", "remedy": ""}
    assert "replica 0: it is lost" in event_lines([{**event, "replica": 0}])[1].plain
    assert "replica" not in event_lines([{**event, "replica": None}])[1].plain


def test_a_control_socket_is_that_of_a_server_on_this_machine(capsys):
    for host in ("127.0.0.1", "localhost", "[::1]", "0.0.0.0"):
        assert address.local_port(f"http://{host}:8000") == 8000
    with pytest.raises(UsageError, match="name the port too"):
        address.local_port("http://127.0.0.1")
    for words in (["status"], ["replica", "list"]):
        for host in ("192.0.2.1", "a..b"):
            assert main([*words, "--url", f"http://{host}:8000"]) == 2
            assert f"{host} is no address of this machine" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["http://a:99999", "http://a:b", "http://[::1:8000"])
def test_an_address_with_a_wrong_port_is_named(url, capsys):
    for command in ("status", "top"):
        assert main([command, "--url", url]) == 2
        assert f"--url {url}: must be like" in capsys.readouterr().err


def test_a_port_is_asked_as_the_background_server_there_answers():
    lock = Background("secure").lock()
    try:
        Background("secure").write(Record(1, "0.0.0.0", 22101, "demo", 0.0, 1.0, "https"))
        assert address.server_url(of("--port", "22101")) == "https://127.0.0.1:22101"
        assert address.server_url(of("--port", "22102")) == "http://127.0.0.1:22102"
    finally:
        os.close(lock)


def test_an_agent_shows_new_codes_for_some_time_and_says_so(capsys):
    clock = [0.0]
    machine = SimpleNamespace(name="mac-b", port=1, pair_port=2, pairing=AgentSide("mac-b", "A" * 40, lambda: clock[0]))
    shown = agent._say(machine, Trust("agent"), pair=False)
    for number in range(1, agent.MOST_CODES + 1):
        assert not agent._ends(machine, shown, []) and len(shown) == number
        clock[0] += LIFE_S
        assert not agent._ends(machine, shown, [])
    said = capsys.readouterr().out
    codes = re.findall(r"^code (\d{3} \d{3}): type", said, re.MULTILINE)
    assert len(codes) == agent.MOST_CODES and said.count("5 minutes have passed; here is a new one:") == len(codes) - 1
    assert "The code is no longer good; for a new one end this (Ctrl-C)" in said.splitlines()[-1]
    assert not machine.pairing.is_open and shown == [] and agent._ends(machine, shown, [15])
    assert jargon(said) == jargon(" ".join(PURPOSES.values())) == set() and set(PURPOSES) == set(PROGRAMS)


def test_an_agent_whose_code_was_guessed_at_shows_no_other(capsys):
    machine = SimpleNamespace(name="mac-b", pairing=AgentSide("mac-b", "A" * 40))
    shown = [agent._show_code(machine)]
    for peer in (b"%d" % number for number in range(ATTEMPTS)):
        identity, _ = machine.pairing.answer(peer, PairHello("head", "B" * 40))
        head = HeadSide(f"{(int(shown[0]) + 1) % 10**6:06d}", PairHello("head", "B" * 40), identity)
        element, _ = machine.pairing.answer(peer, head.start())
        machine.pairing.answer(peer, head.confirm(element))
    agent._ends(machine, shown, [])
    assert shown == [] and "for a new one end this (Ctrl-C), and run it again with --pair" in capsys.readouterr().out
