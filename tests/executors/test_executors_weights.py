"""Ranks that get their weights from the engine's machine answer as those that have a copy."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import msgspec
import pytest

import engines
from tandem import LLM, SamplingParams
from tandem.checkpoints import demo
from tandem.checkpoints.files import ModelFiles
from tandem.checkpoints.stored import demo_path
from tandem.cli.serve import checked
from tandem.config.settings import Settings
from tandem.diagnostics.doctor.model_files import look_at
from tandem.engine.build_layout import plan_layout
from tandem.errors import ModelError, OutOfMemory, RankFailure
from tandem.executors import assembly
from tandem.executors.assembly import require_memory
from tandem.executors.weight_source import Head, obtain_files, serve_model
from tandem.launchers.local import LocalLauncher
from tandem.models.footprint import slice_bytes
from tandem.processes.child import ChildProcess
from tandem.protocol.control import Output
from tandem.protocol.keys import ClusterKeys
from tandem.protocol.payloads import WorkerPayload
from tandem.protocol.request import EngineRequest
from tandem.testing import tiny_model

PROMPT = [5, 9, 70, 3, 111, 42]
GREEDY = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)


class Elsewhere(LocalLauncher):
    """Ranks on machines of their own: the model's directory is not there, and each has its own cache."""

    def __init__(self, caches: Path) -> None:
        super().__init__(threads_per_rank=1)
        self.caches = caches

    def start(self, rank: int, world_size: int, payload: bytes, extra_env: dict[str, str]) -> ChildProcess:
        told = msgspec.json.decode(payload, type=WorkerPayload)
        moved = msgspec.structs.replace(told.spec, model_path="/nonexistent/on/this/machine")
        payload = msgspec.json.encode(msgspec.structs.replace(told, spec=moved))
        return super().start(rank, world_size, payload, {**extra_env, "TANDEM_CACHE": str(self.caches / str(rank))})


def settings_of(model: Path, **parallel: object) -> Settings:
    return engines.settings_of(
        model, **{"weights_from": "head", "executor": "cluster", "prefill_chunk": 4, "kv_tokens": 256, **parallel}
    )


def generate(settings: Settings, caches: Path, seen: list[tuple[int, int, int, str]]) -> list[int]:
    engine = engines.launched(settings, Elsewhere(caches))
    tokens: list[int] = []
    try:
        engine.start(lambda *progress: seen.append(progress))
        engine.submit(EngineRequest(request_id="a", prompt=PROMPT, params=GREEDY))
        while not engine.idle:
            for message in engine.pump(1.0):
                assert isinstance(message, Output)
                tokens += message.tokens
    finally:
        engine.close()
    return tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "parallel"),
    [("qwen3_moe", {"pipeline_parallel_size": 2}), ("llama", {"parallel": (2, 1)})],
    ids=["pp 2 moe", "2,1"],
)
def test_ranks_without_a_copy_answer_as_ranks_with_one(tmp_path: Path, family: str, parallel: dict[str, object]) -> None:
    model = tiny_model(tmp_path / "m", family, shards=2)
    with LLM(str(model), prefill_chunk=4) as llm:
        expected = llm.generate([PROMPT], GREEDY)[0].token_ids
    seen: list[tuple[int, int, int, str]] = []
    assert generate(settings_of(model, **parallel), tmp_path / "caches", seen) == expected
    ranks = 3 if "parallel" in parallel else 2
    for rank in range(ranks):
        for phase in ("fetch", "load"):
            mine = [(done, total) for r, done, total, p in seen if (r, p) == (rank, phase)]
            assert mine and mine[-1][0] == mine[-1][1] > 0, (rank, phase)
        kept = {file.name for file in (tmp_path / "caches" / str(rank)).rglob("parts/*")}
        assert ("layer-00000.safetensors" in kept) == (rank < ranks - 1)
        assert "layer-00003.safetensors" in kept or rank < ranks - 1

    # A second start finds everything there.
    times = {file: file.stat().st_mtime_ns for file in (tmp_path / "caches").rglob("*.safetensors")}
    assert generate(settings_of(model, **parallel), tmp_path / "caches", seen) == expected
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "caches").rglob("*.safetensors")} == times


@pytest.mark.slow
def test_ranks_of_one_machine_through_the_python_api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(tmp_path / "m", shards=2)
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    answers = []
    for options in ({}, {"weights_from": "head"}, {"weights_from": "head", "tensor_parallel_size": 2}):
        with LLM(str(model), **options) as llm:
            answers.append(llm.generate([PROMPT], GREEDY)[0].token_ids)
    assert answers[0] == answers[1] == answers[2]
    assert len(list((tmp_path / "cache").rglob("parts/layer-*.safetensors"))) == 4  # shared by both ranks


def test_only_the_models_own_files_are_served(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "m")
    for name in ("notes.md", "other.safetensors", ".env", "code.py"):
        (model / name).write_text("private")
    (model / "directory.json").mkdir()
    server = serve_model(model, ClusterKeys.generate(), "127.0.0.1")
    try:
        assert {file.name for file in server.served.values()} == {
            "config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
        }
    finally:
        server.close()


@pytest.mark.parametrize("place", ["models/m", ".cache/tandem/demo/SmolLM2-135M-Instruct"])
def test_a_path_below_the_heads_home_is_found_below_the_ranks_own(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TANDEM_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "head"))
    (spec,) = plan_layout(settings_of(tiny_model(tmp_path / "head" / place), weights_from="local")).ranks
    monkeypatch.setenv("HOME", str(tmp_path / "rank"))
    (tmp_path / "head").rename(tmp_path / "rank")
    assert obtain_files(spec, None, lambda done, total: None).path == tmp_path / "rank" / place
    found = look_at(spec.model_path, home=spec.home)
    assert (found.path, found.problem) == (str(tmp_path / "rank" / place), None)
    assert look_at("/nowhere", home=spec.home).problem == "/nowhere is not on this machine"


def test_a_rank_without_the_demo_model_downloads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path))
    (spec,) = plan_layout(settings_of(tiny_model(demo_path()), weights_from="local")).ranks
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "other"))
    shutil.rmtree(tmp_path / "demo")
    monkeypatch.setattr(demo, "_download", lambda directory, progress: pytest.fail(f"downloads into {directory}"))
    for needs in (lambda: obtain_files(spec, None, lambda done, total: None), lambda: checked(settings_of(Path("demo")))):
        with pytest.raises(pytest.fail.Exception, match="downloads into"):
            needs()


def test_a_slice_that_does_not_fit_never_travels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    model = tiny_model(tmp_path / "m")
    spec = msgspec.structs.replace(plan_layout(settings_of(model, pipeline_parallel_size=2)).ranks[0], memory_share=1e-9)
    keys = ClusterKeys.generate()
    server = serve_model(model, keys, "127.0.0.1")
    try:
        with pytest.raises(OutOfMemory, match="stage 1/2.*needs .* MiB for its weights, and may use 0 MiB"):
            obtain_files(spec, Head(server.endpoint, keys), lambda done, total: None, accept=partial(require_memory, spec))
    finally:
        server.close()
    assert not list((tmp_path / "cache").rglob("parts/*"))


def test_a_rank_with_a_gpu_of_its_own_may_use_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = plan_layout(settings_of(tiny_model(tmp_path / "m"), pipeline_parallel_size=2))
    files = ModelFiles(path=Path(layout.ranks[0].model_path), name="m")
    spec = msgspec.structs.replace(layout.ranks[0], memory_share=0.4, gpu_share=0.8)
    need = slice_bytes(layout.description, range(*spec.layers), spec.dtype, dequantize=False, share=1.0, gpu=True)
    monkeypatch.setattr(assembly, "memory_bytes", lambda: int(need / 0.6))
    with pytest.raises(OutOfMemory):
        require_memory(spec, files)
    monkeypatch.setattr(assembly, "on_gpu", lambda: True)
    require_memory(spec, files)
    with pytest.raises(OutOfMemory):
        require_memory(msgspec.structs.replace(spec, gpu_share=None), files)


def test_a_head_that_is_gone_or_has_changed_is_a_failed_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    model = tiny_model(tmp_path / "m")
    spec = plan_layout(settings_of(model, pipeline_parallel_size=2)).ranks[0]
    keys = ClusterKeys.generate()
    server = serve_model(model, keys, "127.0.0.1")
    head = Head(server.endpoint, keys)
    assert server.served
    (model / "config.json").write_text("{}")
    with pytest.raises(RankFailure, match="config.json: has changed"):
        obtain_files(spec, head, lambda done, total: None)
    server.close()
    with pytest.raises(RankFailure, match="stage 1/2.* has sent nothing"):
        obtain_files(spec, head, lambda done, total: None, patience_s=0.3)


@pytest.mark.slow
def test_what_the_user_must_mend_is_said_as_such(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "m")
    (tmp_path / "caches").mkdir()
    (tmp_path / "caches" / "1").write_text("not a directory")
    with pytest.raises(Exception, match="rank 1: .*TANDEM_CACHE") as error:
        generate(settings_of(model, pipeline_parallel_size=2), tmp_path / "caches", [])
    assert not isinstance(error.value, RankFailure | ModelError)
