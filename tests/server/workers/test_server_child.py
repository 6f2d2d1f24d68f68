"""The limits that a worker process sets itself."""

from __future__ import annotations

import pytest

from tandem.server.workers import child


@pytest.mark.parametrize(("hard", "soft"), [(child.resource.RLIM_INFINITY, 1000), (5000, 1000), (600, 600)])
def test_a_lower_hard_limit_of_the_user_holds(monkeypatch, hard, soft):
    done = []
    monkeypatch.setattr(child.resource, "getrlimit", lambda kind: (hard, hard))
    monkeypatch.setattr(child.resource, "setrlimit", lambda kind, limits: done.append((kind, limits)))
    child._limit(child.resource.RLIMIT_AS, 1000)
    assert done == [(child.resource.RLIMIT_AS, (soft, hard))]
