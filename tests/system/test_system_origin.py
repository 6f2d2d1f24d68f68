"""Other machines are told to install what is installed here, from where it came."""

from __future__ import annotations

import json
import shlex

import pytest

from tandem.system import origin
from tandem.version import __version__


@pytest.mark.parametrize(
    ("direct", "command"),
    [
        ({}, f"ssh b \"python -m pip install 'mlx-tandem=={__version__}'\""),
        (
            {"url": "https://example.org/tandem.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "ssh b \"python -m pip install 'git+https://example.org/tandem.git@abc'\"",
        ),
        (
            {"url": "https://example.org/mlx_tandem-0.1.0-py3-none-any.whl", "archive_info": {}},
            "ssh b \"python -m pip install 'mlx-tandem @ https://example.org/mlx_tandem-0.1.0-py3-none-any.whl'\"",
        ),
        (
            {"url": "file:///tmp/mlx_tandem-0.1.0-py3-none-any.whl", "archive_info": {}},
            "scp /tmp/mlx_tandem-0.1.0-py3-none-any.whl b: && ssh b 'python -m pip install ./mlx_tandem-0.1.0-py3-none-any.whl'",
        ),
        (
            {"url": "file:///home/ann/tandem", "dir_info": {"editable": True}},
            "rsync -a --exclude '.*' /home/ann/tandem/ b:tandem/ && ssh b \"python -m pip install ./tandem\"",
        ),
    ],
)
def test_the_command_installs_what_is_here(monkeypatch, direct, command):
    monkeypatch.setattr(origin, "_direct_url", lambda: json.loads(json.dumps(direct)))
    assert origin.install_command("python", "b") == command


def test_a_wheel_of_any_name_is_one_word_on_both_machines(monkeypatch):
    monkeypatch.setattr(origin, "_direct_url", lambda: {"url": "file:///tmp/our%20%22$best%22%20wheel's.whl", "archive_info": {}})
    local = shlex.split(origin.install_command("python", "b"))
    assert local[1] == '/tmp/our "$best" wheel\'s.whl'
    assert shlex.split(local[-1])[-1] == './our "$best" wheel\'s.whl'
