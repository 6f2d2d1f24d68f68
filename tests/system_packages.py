"""Programs of the system that tests use, and the packages that bring them: a run says at its end for want of which it
skipped tests, and how to install them."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterable

import pytest

PACKAGES = {
    "bash": ("bash", "bash"),
    "fish": ("fish", "fish"),
    "zsh": ("zsh", "zsh"),
    "chromium": ("chromium", "chromium"),
    "chromedriver": ("chromium-driver", "chromedriver"),
    "firefox": ("firefox-esr", "firefox"),
    "openssl": ("openssl", "openssl"),
    "ps": ("procps", ""),
    "mount": ("mount", ""),
    "systemd-analyze": ("systemd", ""),
    "ip": ("iproute2", ""),
    "tc": ("iproute2", ""),
    "nft": ("nftables", ""),
    "sshd": ("openssh-server", ""),
    "ssh": ("openssh-client", ""),
    "ssh-keygen": ("openssh-client", ""),
    "nsenter": ("util-linux", ""),
    "unshare": ("util-linux", ""),
}
"""For each program Debian's package and Homebrew's; none where a Mac has the program, or can never have it."""
MISSING = re.compile(r"programs not found: (.*)")


def missing(*programs: str, path: str | None = None) -> str:
    """Why a test that uses these programs is skipped; empty when all are here."""
    absent = [program for program in programs if shutil.which(program, path=path) is None]
    assert PACKAGES.keys() >= set(absent)
    return f"programs not found: {', '.join(absent)}" if absent else ""


def require(*programs: str) -> None:
    """Skip the test unless these programs are here."""
    if reason := missing(*programs):
        pytest.skip(reason)


def advice(reasons: Iterable[str], platform: str = sys.platform) -> str:
    """How to install what tests were skipped for, given the reasons of all skipped tests; empty when it was nothing."""
    found = [match[1].split(", ") for reason in reasons if (match := MISSING.search(reason))]
    column = 1 if platform == "darwin" else 0
    packages = sorted({PACKAGES[program][column] for programs in found for program in programs} - {""})
    if not packages:
        return ""
    command = "brew install" if platform == "darwin" else "sudo apt-get install --no-install-recommends"
    return f"{len(found)} tests were skipped for want of system packages. This installs them:\n  {command} {' '.join(packages)}"
