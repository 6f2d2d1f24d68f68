"""The limits that a sandbox sets itself."""

from __future__ import annotations

import pytest

from tandem.processes import sandbox_child as child


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
