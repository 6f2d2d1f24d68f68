"""Other machines are told to install what is installed here, from where it came."""

from __future__ import annotations

import json
import shlex
import sys

import pytest

from tandem.system import origin
from tandem.version import __version__


@pytest.mark.parametrize(
    ("direct", "command"),
    [
        ({}, f"on b: python -m pip install mlx-tandem=={__version__}"),
        (
            {"url": "https://example.org/tandem.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "on b: python -m pip install git+https://example.org/tandem.git@abc",
        ),
        (
            {"url": "https://example.org/mlx_tandem-0.1.0-py3-none-any.whl", "archive_info": {}},
            "on b: python -m pip install 'mlx-tandem @ https://example.org/mlx_tandem-0.1.0-py3-none-any.whl'",
        ),
        (
            {"url": "file:///tmp/mlx_tandem-0.1.0-py3-none-any.whl", "archive_info": {}},
            "copy /tmp/mlx_tandem-0.1.0-py3-none-any.whl to b; on b: python -m pip install ./mlx_tandem-0.1.0-py3-none-any.whl",
        ),
        (
            {"url": "file:///home/ann/tandem", "dir_info": {"editable": True}},
            "copy /home/ann/tandem to b; on b: python -m pip install ./tandem",
        ),
    ],
)
def test_the_command_installs_what_is_here(monkeypatch, direct, command):
    monkeypatch.setattr(origin, "_direct_url", lambda: json.loads(json.dumps(direct)))
    assert origin.install_command("python", "b") == f"{command}   (then start `tandem agent` there again)"


def test_a_wheel_of_any_name_is_one_word(monkeypatch):
    monkeypatch.setattr(origin, "_direct_url", lambda: {"url": "file:///tmp/our%20%22$best%22%20wheel's.whl", "archive_info": {}})
    words = shlex.split(origin.install_command("python", "b"))
    assert words[1] == '/tmp/our "$best" wheel\'s.whl'
    assert './our "$best" wheel\'s.whl' in words


@pytest.mark.parametrize(
    ("prefix", "direct", "command"),
    [
        ("/home/ann/.local/pipx/venvs/mlx-tandem", {}, "pipx install --force 'mlx-tandem[agent]'"),
        ("/home/ann/.local/share/uv/tools/mlx-tandem", {"url": "file:///a.whl"}, "uv tool install --force 'dist/NEW.whl[agent]'"),
        ("/opt/homebrew/Cellar/mlx-tandem/0.1.0/libexec", {"url": "file:///tmp/build"}, "brew upgrade mlx-tandem"),
        (
            "/opt/env",
            {"url": "https://example.org/tandem.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            f"{sys.executable} -m pip install --upgrade --force-reinstall git+https://example.org/tandem.git",
        ),
    ],
)
def test_the_command_that_updates_is_that_of_what_installed(monkeypatch, prefix, direct, command):
    monkeypatch.setattr(origin, "_direct_url", lambda: direct)
    monkeypatch.setattr(sys, "prefix", prefix)
    assert origin.update_command() == f"`{command}`"
