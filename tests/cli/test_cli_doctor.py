"""`tandem doctor` for one machine, and its mistakes."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import pytest

from macs import answers, mac_environment, recorded
from tandem.cli.doctor import parse_ports
from tandem.cli.main import main
from tandem.errors import ConfigError
from tandem.testing import tiny_model


def examined(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict]:
    code = main(["doctor", "--json", *words])
    return code, json.loads(capsys.readouterr().out)


def test_one_machine(tmp_path, capsys):
    model = str(tiny_model(tmp_path / "m"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, said = examined(capsys, "--model", model, "--port", str(port))
    found = {one["check"]: one for one in said["findings"]}
    assert (code, said["ok"]) == (1, False)
    assert found["ports"]["verdict"] == "fail"
    assert str(port) in found["ports"]["detail"]
    assert {found[name]["verdict"] for name in ("versions", "model", "memory")} == {"ok"}
    assert {found[name]["verdict"] for name in ("ssh", "hostname", "reachable", "all_sum", "rdma")} == {"skip"}


def test_a_model_with_a_file_missing(tmp_path, capsys):
    model = tiny_model(tmp_path / "m", shards=2)
    next(model.glob("model-00001*.safetensors")).unlink()
    code, said = examined(capsys, "--model", str(model), "--port", "0")
    [found] = [one for one in said["findings"] if one["check"] == "model"]
    assert code == 1
    assert found["verdict"] == "fail"
    assert "model-00001-of-00002.safetensors: is missing" in found["detail"]


def test_the_table_ends_with_remedies_and_knows_tandems_own_server(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("tandem.cli.doctor.is_heard", lambda path: path.name == f"serve-{port}.sock")
    with socket.create_server(("127.0.0.1", 0)) as own:
        port = own.getsockname()[1]
        assert main(["doctor", "--model", str(tmp_path / "none"), "--port", str(port)]) == 1
    text = capsys.readouterr().out
    assert f"Tandem serves at port {port}" in text
    assert "\n    tandem model list\n    (name" in text
    assert "is not on this machine" in text
    assert "name a model that is on this machine" in text
    assert "1 check(s) failed." in text


@pytest.mark.parametrize("chip", ["Apple M4 Max", "Apple M1 Max"])
def test_a_mac_is_reported_with_its_build_ports_cable_and_fence(tmp_path, chip):
    """Two entries for this Mac, over jaccl; the answers of Apple's tools are stand-ins."""
    said = tmp_path / "said"
    answers(said, {"sysctl": recorded("sysctl").replace("Apple M4 Max", chip), "rdma_ctl": "RDMA is disabled\n"})
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps([{"ssh": "127.0.0.1", "ips": ["127.0.0.1"], "rdma": [None]}]))
    words = [sys.executable, "-m", "tandem", "doctor", "--hostfile", str(hosts), "--backend", "jaccl", "--port", "0"]
    run = subprocess.run([*words, "--json"], env=mac_environment(said), capture_output=True, text=True, timeout=240)
    assert run.returncode == 1, run.stderr
    found = json.loads(run.stdout)
    assert found["macs"] == [
        {
            "host": "127.0.0.1",
            "chip": chip,
            "macos": "26.3",
            "build": "25D125",
            "ports": "2 Thunderbolt",
            "cables": "port 1 at 80 Gb/s",
            "fence": "MLX's own",
        }
    ]
    [rdma] = [one for one in found["findings"] if one["check"] == "rdma"]
    if chip == "Apple M1 Max":
        assert "Apple M1 Max has no Thunderbolt 5" in rdma["detail"] and "rdma_ctl" not in rdma["remedy"]
    else:
        assert "is disabled" in rdma["detail"] and "System Settings, search for RDMA" in rdma["remedy"]
    run = subprocess.run(words, env=mac_environment(said), capture_output=True, text=True, timeout=240)
    text = " ".join(run.stdout.split())
    assert f"127.0.0.1: {chip}, macOS 26.3 (25D125), ports: 2 Thunderbolt, cables: port 1 at 80 Gb/s" in text


def test_deep_runs_the_self_test_afterwards(tmp_path, capsys, monkeypatch):
    asked = []
    monkeypatch.setattr("tandem.cli.selftest.run", lambda arguments: asked.append(arguments) or 3)
    model = str(tiny_model(tmp_path / "m"))
    assert main(["doctor", "--deep", "--model", model, "--port", "0"]) == 3
    assert (asked[0].model, asked[0].hostfile, asked[0].minutes) == (model, None, None)  # its own defaults
    assert "Nothing is wrong." in capsys.readouterr().out
    assert main(["doctor", "--deep", "--model", str(tmp_path / "none"), "--port", "0"]) == 1


def test_ports():
    assert parse_ports(None) == []
    assert parse_ports("7") == [7]
    assert parse_ports("7-9") == [7, 8, 9]
    with pytest.raises(ConfigError, match="0-3"):
        parse_ports("0-3")


@pytest.mark.parametrize("text", ["1-1001", "9-7", "65000-65536", "1-999999999999", f"1-{10**30}", "a", ""])
def test_wrong_ports_are_refused_before_they_are_listed(text):
    with pytest.raises(ConfigError, match="at most 1000 ports"):
        parse_ports(text)
