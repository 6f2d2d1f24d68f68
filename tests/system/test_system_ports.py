"""A port that macOS would give out twice."""

from __future__ import annotations

import socket
import sys

import pytest

from tandem.diagnostics.doctor.facts import _is_busy
from tandem.errors import ConfigError
from tandem.server.listener import listen
from tandem.system.ports import is_shadowed


@pytest.fixture
def taken():
    with socket.create_server(("127.0.0.1", 0)) as one:
        yield one.getsockname()[1]


@pytest.mark.parametrize("host", ["0.0.0.0", "", "::", "127.0.0.1", "localhost"])
def test_a_mac_asks_whether_somebody_listens_at_loopback(taken, monkeypatch, host):
    assert not is_shadowed(host, taken)  # elsewhere the system refuses it
    monkeypatch.setattr(sys, "platform", "darwin")
    assert is_shadowed(host, taken)
    with pytest.raises(ConfigError, match=rf"--port {taken}: cannot listen there \(Address already in use\)"):
        listen(host, taken)


def test_a_free_port_is_free_on_a_mac_too(taken, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with listen("0.0.0.0", 0) as one:
        port = one.getsockname()[1]
    assert not is_shadowed("0.0.0.0", port)
    assert not _is_busy(port)
    assert _is_busy(taken)
