"""Which machine it is, whatever it is called."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from macs import answers, mac_environment, recorded
from tandem.system.identity import machine_id

ASK = "from tandem.system.identity import machine_id; print(machine_id())"


def asked(environment: dict[str, str]) -> str:
    return subprocess.run([sys.executable, "-c", ASK], env=environment, capture_output=True, text=True, check=True).stdout.strip()


def test_a_mac_is_known_by_its_hardware_and_not_by_its_name(tmp_path):
    assert asked(mac_environment(tmp_path / "a")) == "0F1E2D3C-4B5A-6978-8796-A5B4C3D2E1F0"
    answers(tmp_path / "b", {"ioreg": recorded("ioreg").replace("0F1E2D3C", "11111111")})
    assert asked(mac_environment(tmp_path / "b")).startswith("11111111-")


def test_a_mac_that_tells_nothing_goes_by_its_name(tmp_path):
    answers(tmp_path, {"ioreg": "nothing\n"})
    assert asked(mac_environment(tmp_path)) == socket.gethostname()


def test_all_processes_of_a_linux_machine_agree(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "renamed")
    assert machine_id() == asked(dict(os.environ))
