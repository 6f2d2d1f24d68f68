"""A request that really ends whatever computes it: it is found and refused, and nobody else is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

KILLER = [499, 498, 497, 496]
HOOK = f"""
import importlib.abc, importlib.util, os, signal, sys


def deadly(module):
    execute = module.Runner.execute

    def hurt(self, plan, *args, **kwargs):
        if any(op.tokens[:4] == {KILLER} for op in plan.inserts):
            os.kill(os.getpid(), signal.SIGSEGV)
        return execute(self, plan, *args, **kwargs)

    module.Runner.execute = hurt


def restless(module):
    module.REST_S = 1.0


changes = {{"tandem.runner.runner": deadly, "tandem.protocol.quarantine": restless}}


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if (change := changes.pop(name, None)) is None:
            return None
        spec = importlib.util.find_spec(name)
        whole = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (whole(module), change(module))
        return spec


sys.meta_path.insert(0, Finder())
"""
"""As `sitecustomize`: every Python that Tandem starts has it, and a rank dies of the killer's prompt. Engines rest for
one second and not for ten before they try it again."""


@pytest.mark.parametrize("replicas", [1, 2])
def test_of_engines_that_a_request_kills_it_alone_is_refused(
    running: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replicas: int
) -> None:
    (tmp_path / "sitecustomize.py").write_text(HOOK)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    with running(str(model), "-dp", str(replicas), "--prefix-cache", "0", "--start-timeout", "120") as server:
        server.learn()
        innocents = server.load()
        server.wait(lambda: innocents[0].chunks > 2, "tokens")
        killer = server.call({"prompt": KILLER, "max_tokens": 5})
        server.check(innocents)
        killer.join()
        assert killer.status == 500, f"{killer.status} {killer.result} {killer.error!r}\n{server.tail()}"
        assert killer.result["error"]["code"] == "engine_lost", killer.result
        deaths = int(killer.result["error"]["message"].split()[0])
        assert deaths < 8, f"{deaths} engines for two deaths in company and two alone\n{server.tail()}"
        server.wait(lambda: server.settled(replicas), "all replicas are back")
        server.check(server.load())
