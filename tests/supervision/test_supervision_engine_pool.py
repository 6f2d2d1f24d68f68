"""The memory plan of several models, and engines that cannot start."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tandem.config.loading import load
from tandem.config.settings import ParallelSettings, Settings
from tandem.config.several import settings_of
from tandem.errors import UsageError
from tandem.protocol.supervisor_messages import ReplicaInfo
from tandem.supervision import engine_pool
from tandem.supervision.engine_pool import EnginePool, several, with_names
from tandem.supervision.model_memory import Machines, footprint, granted
from tandem.testing import tiny_model

HOSTFILE = """[
  {"ssh": "a", "ips": ["10.0.0.1"], "memory": 1000000000},
  {"ssh": "b", "ips": ["10.0.0.2"], "memory": 1000000000}
]"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("engine_pool"))


class BrokenEngines:
    """Engines of which those of `broken` end at once, and the others load for ever."""

    last_words = "no weights"
    announced = False

    def __init__(self, settings: Settings, *, model: str, numbers: Any, **_: Any) -> None:
        self.model, self.children = model, ()

    def start(self) -> None: ...

    def close(self) -> None: ...

    def statuses(self) -> dict[int, Any]:
        return {}

    def look(self) -> int | None:
        return 2 if self.model == "broken" else None


@pytest.fixture
def server(model: Path, monkeypatch: pytest.MonkeyPatch) -> EnginePool:
    monkeypatch.setattr(engine_pool, "EngineSet", BrokenEngines)
    return EnginePool(with_names(load({"model": [str(model)], "also": [f"broken={model}"]}).settings))


def test_a_model_that_a_request_wants_cannot_end_a_server_that_still_starts(server: EnginePool) -> None:
    server.start()
    server.load("broken")
    assert server.look() is None
    assert [(one.state, one.detail) for one in server.models()] == [("running", ""), ("failed", "no weights")]


def test_a_model_that_the_configuration_wants_ends_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_pool, "EngineSet", BrokenEngines)
    names = {"model": [str(model)], "served_name": ["broken", "alias"], "also": [f"b={model}"]}
    settings = with_names(load(names).settings)
    assert [settings_of(settings, one).model.served_name for one in settings.named] == [("broken", "alias"), ("b",)]
    server = EnginePool(settings)
    server.start()
    assert server.look() == 2


def test_an_only_model_that_is_unloaded_while_idle_has_all_the_memory(model: Path) -> None:
    settings = load({"model": [str(model)], "unload_after": ["60"]}).settings
    pool = EnginePool(with_names(settings))
    [only] = pool.models()
    assert several(settings) and (only.unload_after, only.needs) == (60.0, pool.budget) and pool.budget


def test_hosts_and_launchers_that_the_plan_does_not_know_are_named(model: Path, tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts.json"
    hostfile.write_text(HOSTFILE)
    settings = load({"model": [str(model)]}).settings
    elsewhere = dataclasses.replace(
        settings, parallel=ParallelSettings(hostfile=str(hostfile), pipeline_parallel_size=2, launcher="ssh")
    )
    with pytest.raises(UsageError, match="the memory of b is not known"):
        footprint(elsewhere, Machines({"a": 10**9}, False), {"a": 8 * 10**8})
    assert set(footprint(elsewhere, Machines({"a": 10**9, "b": 10**9}, False), {"a": 8 * 10**8, "b": 8 * 10**8}).needs) == {
        "a",
        "b",
    }
    by_hand = dataclasses.replace(settings, parallel=ParallelSettings(launcher="manual", token_file="t"))
    with pytest.raises(UsageError, match="--launcher manual"):
        footprint(by_hand, Machines({}, False), {})


def test_without_a_plan_models_share_the_fraction() -> None:
    settings = Settings()
    fraction = settings.scheduler.memory_fraction
    unknown = Machines({}, False)
    assert granted(settings, {}, unknown, 2).scheduler.memory_fraction == fraction / 2
    assert granted(settings, {}, unknown, None).scheduler.memory_fraction == fraction
    on_ray = dataclasses.replace(settings, parallel=ParallelSettings(launcher="ray"))
    assert granted(on_ray, {}, unknown, 2).scheduler.memory_fraction == fraction, "each rank has a device of its own"


def test_a_failed_replica_can_be_drained(server: EnginePool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BrokenEngines, "infos", lambda _: [ReplicaInfo(3, "", "failed", None, 9)], raising=False)
    monkeypatch.setattr(BrokenEngines, "drain", lambda _, index: index, raising=False)
    server.start()
    assert server.drain(3) == 3
    with pytest.raises(UsageError, match="there is no replica 0; there are: 3"):
        server.drain(0)
