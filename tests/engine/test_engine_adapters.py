"""LoRA adapters in one batch: every row's tokens are those of its adapter alone, in every layout, also after kills."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from adapters import tiny_adapter
from served import wait_until
from submitted import Killer, ask, submitted
from tandem import LLM, SamplingParams
from tandem.engine.engine import Engine
from tandem.errors import UnavailableError, UsageError
from tandem.protocol.adapters import AdapterChanged, ChangeAdapter
from tandem.protocol.request import EngineRequest
from tandem.testing import tiny_model

ADAPTERS: dict[str, dict[str, Any]] = {
    "plain": {"keys": ("self_attn.q_proj", "mlp.down_proj"), "layers": 4, "rank": 8},
    "wide": {"keys": ("self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj"), "layers": 2, "rank": 12, "scale": 1.5},
    "small": {"keys": ("self_attn.k_proj", "mlp.up_proj"), "layers": 3, "rank": 2, "scale": 4.0},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "inline": {},
    "speculation": {"speculative_method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1},
    "pp2": {"pipeline_parallel_size": 2},
    "tp2": {"tensor_parallel_size": 2},
    "tp2,1": {"parallel": (2, 1)},
    "pp2, files from the head": {"pipeline_parallel_size": 2, "weights_from": "head"},
}
PROMPT = [random.Random(3).randrange(3, 500) for _ in range(70)]
"""The same for all: a cached prefix of another adapter would be found by its tokens."""


def requests(name: str, count: int = 3) -> list[EngineRequest]:
    params = [SamplingParams(max_tokens=24 + 5 * i, temperature=0.7 * (i % 2), seed=i, ignore_eos=True) for i in range(count)]
    return [
        EngineRequest(request_id=f"{name}-{i}", prompt=PROMPT[: 70 - 20 * i], params=one, adapter=name)
        for i, one in enumerate(params)
    ]


def answered(llm: LLM, asked: list[EngineRequest], *seen: Killer) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    for message in submitted(llm, asked, *seen):
        tokens.setdefault(message.request_id, []).extend(message.tokens)
    return tokens


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("adapters")
    tiny_model(path / "model", dtype="float32")
    for name, options in ADAPTERS.items():
        tiny_adapter(path / "model", path / name, **options)
    return path / "model"


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, list[int]]:
    """Each adapter as the only one, applied to all requests, one after the other."""
    found: dict[str, list[int]] = {}
    for name in ("", *ADAPTERS):
        path = str(model.parent / name) if name else None
        with LLM(str(model), adapter_path=path, prefix_cache=0.0) as llm:
            for number, output in enumerate(requests(name)):
                [tokens] = answered(llm, [_without(output)]).values()
                found[f"{name}-{number}"] = tokens
    assert len({tuple(found[f"{name}-0"]) for name in ("", *ADAPTERS)}) == 4, "each adapter does something of its own"
    return found


def _without(request: EngineRequest) -> EngineRequest:
    return EngineRequest(request_id=request.request_id, prompt=request.prompt, params=request.params)


def modules(model: Path) -> tuple[str, ...]:
    return tuple(f"{name}={model.parent / name}" for name in ADAPTERS)


def everybody() -> list[EngineRequest]:
    return [one for number in range(3) for name in ("", *ADAPTERS) for one in [requests(name)[number]]]


@pytest.mark.parametrize(
    "layout", ["inline", "speculation", *(pytest.param(one, marks=pytest.mark.slow) for one in list(LAYOUTS)[4:])]
)  # ranks that die have the others
def test_a_batch_gives_the_tokens_of_each_adapter_alone(model, expected, layout, tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path))
    with LLM(str(model), lora_modules=modules(model), prefill_chunk=32, **LAYOUTS[layout]) as llm:
        assert answered(llm, everybody()) == expected
        assert answered(llm, everybody()) == expected  # now with cached prefixes
        assert ask(llm, Engine.status).prefix_hits > 0
    assert len(list(tmp_path.glob("adapters/*/adapters.safetensors"))) == (3 if "head" in layout else 0)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pp2", "tp2"])
def test_a_rank_that_dies_comes_back_with_its_adapters(model, expected, layout):
    told = 0

    def midway(message: object) -> bool:
        nonlocal told
        told += 1
        return told > 60

    with LLM(str(model), lora_modules=modules(model), **LAYOUTS[layout]) as llm:
        assert answered(llm, everybody(), Killer(llm, midway)) == expected
        assert llm.engine.restarts == 1


@pytest.mark.slow
def test_an_adapter_whose_files_are_gone_ends_no_other_request(model, expected, tmp_path, monkeypatch):
    """The other adapter is found at the same path below the new ranks' home, which is not that of the first ones."""
    told = 0

    def midway(message: object) -> bool:
        nonlocal told
        told += 1
        return told > 20

    gone = tiny_adapter(model, tmp_path / "gone")
    kept = shutil.copytree(model.parent / "plain", tmp_path / "head" / "plain")
    monkeypatch.setenv("HOME", str(tmp_path / "head"))
    with LLM(str(model), pipeline_parallel_size=2, lora_modules=(f"gone={gone}", f"plain={kept}")) as llm:
        (gone / "adapters.safetensors").unlink()
        (tmp_path / "head").rename(tmp_path / "rank")
        monkeypatch.setenv("HOME", str(tmp_path / "rank"))
        asked = [one for one in everybody() if one.adapter in ("", "plain")]
        lost = EngineRequest(
            request_id="lost", prompt=PROMPT, params=SamplingParams(max_tokens=150, ignore_eos=True), adapter="gone"
        )
        events: list[object] = []
        llm._session.engine.submit([lost], events.append).result()
        unloaded: list[AdapterChanged] = []  # it waits for that request, and finds the adapter gone
        ask(llm, lambda engine: engine.adapters.ask(ChangeAdapter(1, "gone"), unloaded.append))
        assert answered(llm, asked, Killer(llm, midway)) == {one.request_id: expected[one.request_id] for one in asked}
        assert isinstance(events[-1], UnavailableError) and "not loaded any more" in str(events[-1])
        assert [one.name for one in ask(llm, Engine.status).adapters] == ["plain"]
        wait_until(lambda: unloaded == [AdapterChanged(1)])


def change(llm: LLM, name: str, path: Path | str = "") -> AdapterChanged:
    found: list[AdapterChanged] = []
    ask(llm, lambda engine: engine.adapters.ask(ChangeAdapter(1, name, str(path)), found.append))
    wait_until(lambda: found)
    return found[0]


def test_adapters_come_and_go_and_what_cannot_be_loaded_changes_nothing(model, expected, tmp_path):
    with LLM(str(model), enable_lora=True, max_loras=2, max_lora_rank=12) as llm:
        for name in ("plain", "wide"):
            assert change(llm, name, model.parent / name) == AdapterChanged(1)
        assert "the most (--max-loras)" in change(llm, "small", model.parent / "small").message
        assert "already been loaded" in change(llm, "wide", model.parent / "small").message
        assert change(llm, "wide") == AdapterChanged(1)
        assert change(llm, "wide").status == 404
        for name, options, word in (
            ("far", {"rank": 16}, "--max-lora-rank 16"),
            ("nan", {}, "not all finite"),
            ("other", {"model": tiny_model(tmp_path / "model", config={"hidden_size": 96}, dtype="float32")}, "another model"),
        ):
            path = tiny_adapter(options.pop("model", model), tmp_path / name, **options)
            if name == "nan":
                arrays = mx.load(str(path / "adapters.safetensors"))
                arrays = {key: array * float("nan") if "layers.3" in key else array for key, array in arrays.items()}
                mx.save_safetensors(str(path / "adapters.safetensors"), arrays)
            answer = change(llm, name, path)
            assert answer.status == 400 and word in answer.message
        os.mkfifo(tiny_adapter(model, tmp_path / "pipe") / "other_config.json")
        for path, word in ((tmp_path / "pipe", "it is a pipe"), ("~nobody-here/sql", "has no adapter_config.json")):
            answer = change(llm, "odd", path)
            assert answer.status == 400 and word in answer.message
        assert change(llm, "small", model.parent / "small") == AdapterChanged(1)
        asked = [one for one in everybody() if one.adapter != "wide"]
        assert answered(llm, asked) == {one.request_id: expected[one.request_id] for one in asked}
    with LLM(str(model)) as llm:
        assert "--enable-lora" in change(llm, "plain", model.parent / "plain").message


def test_an_adapter_that_cannot_be_used_ends_the_start(model, tmp_path):
    with pytest.raises(UsageError, match="adapter_config"):
        LLM(str(model), lora_modules=(f"sql={tmp_path}",))
