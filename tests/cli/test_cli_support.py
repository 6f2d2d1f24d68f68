"""`tandem support`: the file that a bug report gets."""

from __future__ import annotations

import getpass
import re
import socket
from pathlib import Path

import msgspec
import pytest

from tandem.cli.main import main
from tandem.supervision.record import Background, Record


def test_the_file_for_a_bug_report_has_what_helps_and_no_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TANDEM_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("TANDEM_API_KEY", "open-sesame-1")
    (tmp_path / "keys").write_text("open-sesame-2 name=reader\n")
    server = Background("house")
    server.lock()
    server.keep(msgspec.json.encode({"options": {"setting_dtype": "bfloat16"}, "variables": {"HF_TOKEN": "hf_0123456789"}}))
    server.write(Record(1, "127.0.0.1", 1, "m", 0.0, 1.0, api_key_file=str(tmp_path / "keys")))
    server.log.write_text(
        "an old line\n"
        f"12:00:01 WARNING rank 1 died on {socket.gethostname()} (10.1.2.3), prompt_tokens: 12, {tmp_path}/model\n"
        'a client wrote {"prompt": "my \\"own\\" words", "n": 1}, Bearer sk-abcdefgh, open-sesame-1, open-sesame-2\n'
    )
    assert main(["support", "house", "--lines", "2", "--output", "report.txt"]) == 0
    text = Path("report.txt").read_text()
    assert re.findall("^==== (.+)$", text, re.MULTILINE) == [
        "versions and machine",
        "settings of house",
        "state of house",
        "log of house",
        "doctor",
    ]
    for there in ("bfloat16", "WARNING rank 1 died on", "prompt_tokens: 12", '"n": 1', '"mlx": "', '"check": "versions"'):
        assert there in text
    for secret in ("open-sesame", "hf_0", "own\\", "words", "sk-abc", "10.1.2.3", str(tmp_path), "old line"):
        assert secret not in text, secret
    for name in (socket.gethostname(), getpass.getuser()):
        assert not re.search(rf"\b{re.escape(name)}\b", text), name
    assert Path("report.txt").stat().st_mode & 0o77 == 0
    assert "report.txt: read it, then attach it" in capsys.readouterr().out
    for words, told in (
        (["--output", "report.txt"], "--output report.txt: cannot be written: File exists; name another file"),
        (["barn"], "barn: no server of this name was started by `tandem up`"),
        (["--hostfile", "hosts.json"], "hosts.json"),
    ):
        assert main(["support", *words]) == 2
        assert told in capsys.readouterr().err
