"""Limits that a sandbox sets itself, and tasks that run once."""

from __future__ import annotations

import os
import sys

import pytest

from tandem.processes import sandbox_child as child
from tandem.processes.sandbox import SandboxTask, TaskDone, run_once


@pytest.mark.parametrize(("hard", "soft"), [(child.resource.RLIM_INFINITY, 1000), (5000, 1000), (600, 600)])
def test_a_lower_hard_limit_of_the_user_holds(monkeypatch, hard, soft):
    done = []
    monkeypatch.setattr(child.resource, "getrlimit", lambda kind: (hard, hard))
    monkeypatch.setattr(child.resource, "setrlimit", lambda kind, limits: done.append((kind, limits)))
    child._limit(child.resource.RLIMIT_AS, 1000)
    assert done == [(child.resource.RLIMIT_AS, (soft, hard))]


def test_on_a_mac_each_task_may_add_so_much_memory(monkeypatch):
    monkeypatch.setattr(child, "_MACOS", True)
    monkeypatch.setattr(child, "start_thread", lambda *_, **__: None)
    monkeypatch.setattr(child, "peak_bytes", lambda: 5)
    monkeypatch.setattr(child.os, "nice", lambda _: None)
    monkeypatch.setattr(child.resource, "setrlimit", lambda *_: None)
    monkeypatch.setattr(child.gc, "disable", lambda: None)
    limits = child.ProcessLimits()
    limits.renew(1, 7)
    assert limits._most_resident == 5 + 7


ODD = """
import os, sys
def double(number: int) -> int: return 2 * number
def wrong() -> None: raise ValueError("in many\\nlines")
def crash() -> None:
    print("last words", file=sys.stderr)
    os.abort()
"""


@pytest.mark.parametrize(
    ("function", "why"),
    [
        ("wrong", "ValueError: in many lines"),
        ("missing", "AttributeError: module 'odd_tasks' has no attribute 'missing'"),
        ("crash", "its process crashed (SIGABRT): last words"),
    ],
)
def test_a_task_that_runs_once_answers_or_says_why_not(tmp_path, monkeypatch, function, why):
    (tmp_path / "odd_tasks.py").write_text(ODD)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    answer = run_once(SandboxTask("odd_tasks", "double", {"number": 21}))
    assert isinstance(answer, TaskDone) and answer.decoded(int) == 42
    reply = run_once(SandboxTask("odd_tasks", function, {}))
    assert not isinstance(reply, TaskDone) and reply.why == why
