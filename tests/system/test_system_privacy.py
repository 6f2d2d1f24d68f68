"""What macOS withholds is told as that, and nothing else is."""

from __future__ import annotations

import errno
import os
import socket
import sys

import pytest

from macs import recorded
from tandem.system import privacy


def trouble(number: int) -> OSError:
    return OSError(number, os.strerror(number))


@pytest.fixture
def mac(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(privacy, "output_of", lambda words: recorded("ifconfig"))


@pytest.mark.parametrize(
    ("number", "address", "withheld"),
    [
        (errno.EHOSTUNREACH, "10.254.0.2", True),
        (errno.EHOSTUNREACH, "192.168.1.99", True),
        (errno.EHOSTUNREACH, "172.16.0.1", False),  # there may well be no way to it
        (errno.ECONNREFUSED, "10.254.0.2", False),
    ],
)
def test_no_route_to_a_neighbour_is_the_local_network_permission(mac, number, address, withheld):
    assert privacy.network_withheld(trouble(number), address) == withheld
    assert ("Local Network" in privacy.connect_trouble(trouble(number), address)) == withheld


def test_elsewhere_words_stay_what_they_are():
    assert privacy.connect_trouble(trouble(errno.EHOSTUNREACH), socket.gethostname()) == "No route to host"
