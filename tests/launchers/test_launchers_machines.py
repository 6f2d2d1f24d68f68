"""Which hosts a layout and its replicas get, and what contradicts what."""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import tandem
from tandem import LLM, SamplingParams
from tandem.config.loading import build, load
from tandem.config.options import by_name
from tandem.config.settings import Settings
from tandem.engine import build_layout as layout_module
from tandem.engine.build_layout import plan_layout
from tandem.errors import ConfigError, LayoutError
from tandem.launchers.base import OnWait, Place
from tandem.launchers.host_addresses import replica_hosts, stage_memory, with_layout
from tandem.launchers.local import LocalLauncher
from tandem.launchers.registry import LAUNCHERS, sharing
from tandem.supervision.replica_process import replica_settings
from tandem.testing import tiny_model

SOURCE = Path(tandem.__file__).parent


def hosts(tmp_path: Path, *names: str, **fields: object) -> str:
    path = tmp_path / "hosts.json"
    path.write_text(json.dumps([{"ssh": name, **fields} for name in names]))
    return str(path)


def settings(**values: object) -> Settings:
    return build({"model": "m", "engine_socket": "/run/engine.sock", **values})


def test_a_hostfile_alone_is_a_pipeline_over_its_hosts(tmp_path: Path) -> None:
    chosen = with_layout(settings(hostfile=hosts(tmp_path, "a", "b", "c")).parallel)
    assert chosen.pipeline_parallel_size == 3
    assert with_layout(settings(hostfile=chosen.hostfile, tensor_parallel_size=2).parallel).pipeline_parallel_size == 1
    assert with_layout(settings(hostfile=chosen.hostfile, host_entries=(2,)).parallel).pipeline_parallel_size == 1


def test_replicas_get_their_groups_of_hosts(tmp_path: Path) -> None:
    given = settings(hostfile=hosts(tmp_path, "a", "b", "c", "d"), data_parallel_size=2)
    first, second = replica_settings(given, 0), replica_settings(given, 1)
    assert first.parallel.host_entries == (0, 1) and second.parallel.host_entries == (2, 3)
    assert first.parallel.pipeline_parallel_size == 2 and first.parallel.data_parallel_size == 1
    assert first.parallel.threads_per_rank is None and first.scheduler.memory_fraction == 0.85
    assert with_layout(second.parallel) == second.parallel
    with pytest.raises(LayoutError, match="replica 2 needs 2 hosts, and .* has no more"):
        replica_hosts(given.parallel, 2)


def test_replicas_on_one_machine_share_its_memory(tmp_path: Path) -> None:
    given = settings(hostfile=hosts(tmp_path, "a", "b", "b", "c"), data_parallel_size=2)
    assert sharing(given.parallel, 0) == sharing(given.parallel, 1) == 2
    assert replica_settings(given, 0).scheduler.memory_fraction == pytest.approx(0.425)


def test_replicas_by_hand_listen_at_ports_of_their_own() -> None:
    given = settings(launcher="manual", token_file="t", data_parallel_size=2)
    assert [replica_settings(given, index).parallel.join_port for index in (0, 1)] == [29650, 29651]


def test_too_few_hosts(tmp_path: Path) -> None:
    path = hosts(tmp_path, "a", "b", "c")
    with pytest.raises(LayoutError, match=r"--data-parallel-size 2: .* has 3 hosts, which cannot be shared out evenly"):
        with_layout(settings(hostfile=path, data_parallel_size=2).parallel)
    with pytest.raises(LayoutError, match=r"the layout has 2 times 2 ranks and .* has 3 hosts"):
        with_layout(settings(hostfile=path, data_parallel_size=2, tensor_parallel_size=2).parallel)


def test_memory_in_the_hostfile_decides_the_layers(tmp_path: Path) -> None:
    path = tmp_path / "hosts.json"
    path.write_text(json.dumps([{"ssh": "a", "memory": "48GB"}, {"ssh": "b", "memory": "16GB"}]))
    model = tiny_model(tmp_path / "tiny", "llama", layers=8)
    layout = plan_layout(build({"model": str(model), "hostfile": str(path)}))
    assert [spec.layers for spec in layout.ranks] == [(0, 6), (6, 8)]
    assert stage_memory(build({"hostfile": hosts(tmp_path, "a", "b")}).parallel, (1, 1)) == [1, 1]


class Uneven(LocalLauncher):
    """Says that the first machine has three times the memory of the second."""

    def recruit(
        self, count: int, deadline: float, on_wait: OnWait | None = None, slots: Sequence[int] | None = None
    ) -> list[Place]:
        return [
            replace(place, host=f"h{i}", memory_bytes=[48, 16][i] * 2**30)
            for i, place in enumerate(super().recruit(count, deadline, on_wait, slots))
        ]


@pytest.mark.slow
def test_machines_that_report_more_memory_get_more_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(tmp_path / "tiny", "llama", layers=8)
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    with LLM(str(model)) as llm:
        expected = llm.generate([[5, 9, 70]], params)[0].token_ids
    monkeypatch.setattr(layout_module, "make_launcher", lambda settings: Uneven(1))
    for options, layers in (({}, [(0, 6), (6, 8)]), ({"layer_split": (4, 4)}, [(0, 4), (4, 8)])):
        with LLM(str(model), pipeline_parallel_size=2, **options) as llm:
            assert llm.generate([[5, 9, 70]], params)[0].token_ids == expected
            assert [rank.layers for rank in llm.engine.status().ranks] == layers


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"launcher": "ssh"}, "--launcher ssh: needs --hostfile FILE"),
        ({"launcher": "manual"}, "--launcher manual: needs --token-file FILE"),
        ({"launcher": "local", "hostfile": "h"}, "--hostfile: is for --launcher ssh, not local"),
        ({"token_file": "t"}, "--token-file: is for --launcher manual, not local"),
        ({"token_file": "t", "hostfile": "h"}, "--token-file: is for --launcher manual, not ssh"),
        ({"remote_python": "p"}, "--remote-python: is for --launcher ssh, not local"),
        ({"hostfile": ""}, "--hostfile: must not be empty"),
        ({"heartbeat_timeout": "0.5"}, "--heartbeat-timeout: 0.5 is out of range: must be 2 or more"),
        ({"host_entries": "-1", "hostfile": "h"}, "--host-entries: -1 is out of range"),
    ],
)
def test_settings_that_contradict_one_another(flags: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load({name: [text] for name, text in flags.items()})


def test_a_model_in_the_engine_is_on_no_other_machine(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "tiny", "llama")
    with pytest.raises(LayoutError, match="--executor inline: computes in the engine's process, .* --launcher ssh"):
        plan_layout(build({"model": str(model), "executor": "inline", "hostfile": hosts(tmp_path, "a")}))


def test_every_launcher_of_the_settings_is_in_the_registry() -> None:
    assert {*LAUNCHERS, "auto"} == {*by_name()["launcher"].choices}
    for name, kind in LAUNCHERS.items():
        assert kind.here + kind.by_hostfile + kind.by_hand + kind.own_devices == 1, name


def test_launchers_names_are_compared_nowhere() -> None:
    """Nor are they keys of tables: other packages ask the registry what a launcher is like."""
    names = {*LAUNCHERS, "auto"}
    found = []
    for path in SOURCE.rglob("*.py"):
        if path.parent.name == "launchers":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Compare)
                and "launcher" in ast.unparse(node)
                and any(isinstance(part, ast.Constant) and part.value in names for part in ast.walk(node))
            ):
                found.append(f"{path.relative_to(SOURCE)}: {ast.unparse(node)}")
    assert found == ["config/settings.py: self.launcher != 'auto'"]


def test_a_layer_split_may_leave_the_number_of_stages_to_the_hostfile() -> None:
    assert load({"hostfile": ["h"], "layer_split": ["20,16"]}).settings.parallel.layer_split == (20, 16)
