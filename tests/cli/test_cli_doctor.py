"""`tandem doctor` for one machine, and its mistakes."""

from __future__ import annotations

import json
import socket

import pytest

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


def test_the_table_ends_with_remedies(tmp_path, capsys):
    assert main(["doctor", "--model", str(tmp_path / "none"), "--port", "0"]) == 1
    text = capsys.readouterr().out
    assert "is not on this machine" in text
    assert "name a model that is on this machine" in text
    assert "1 check(s) failed." in text


def test_deep_runs_the_self_test_afterwards(tmp_path, capsys, monkeypatch):
    asked = []
    monkeypatch.setattr("tandem.cli.selftest.run", lambda arguments: asked.append(arguments) or 3)
    model = str(tiny_model(tmp_path / "m"))
    assert main(["doctor", "--deep", "--model", model, "--port", "0"]) == 3
    assert (asked[0].model, asked[0].hostfile, asked[0].minutes) == (model, None, 5.0)
    assert "Nothing is wrong." in capsys.readouterr().out
    assert main(["doctor", "--deep", "--model", str(tmp_path / "none"), "--port", "0"]) == 1


def test_ports():
    assert parse_ports(None) == []
    assert parse_ports("7") == [7]
    assert parse_ports("7-9") == [7, 8, 9]
    with pytest.raises(ConfigError, match="0-3"):
        parse_ports("0-3")
