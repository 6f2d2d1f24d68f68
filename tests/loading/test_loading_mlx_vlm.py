"""Types that mlx-vlm computes: what is said without it, weights under the names of the original, and where they are cut."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from seeing import seeing_model
from tandem.checkpoints.resolve import resolve
from tandem.cli.main import main
from tandem.config.settings import ModelSettings, ParallelSettings, Settings
from tandem.engine import build_layout
from tandem.errors import UnsupportedModel
from tandem.loading import dry_run
from tandem.loading.build_model import build_model
from tandem.loading.mlx_lm_models import FAILURES
from tandem.loading.pipeline_model import PipelineModel
from tandem.loading.stage import load_stage
from tandem.loading.stage_payload import TRACED, ArraySpec, StagePayload
from tandem.models.description import describe, text_config
from tandem.models.families.table import FAMILIES, family_of
from tandem.models.families.tiny import tiny_config
from tandem.models.partition import uncut
from tandem.testing import tiny_model

TYPES = sorted(name for name, family in FAMILIES.items() if family.source == "mlx_vlm")


@pytest.mark.parametrize(
    ("installed", "said"),
    [
        ({}, "mlx-vlm and pillow are not installed here"),
        ({"mlx-vlm": "0.7.12"}, "pillow is not installed here"),
        ({"mlx-vlm": "0.7.9", "pillow": "12.0.0"}, "mlx-vlm 0.7.9 is here"),
        ({"mlx-vlm": "0.8.0rc1", "pillow": "12.0.0"}, "mlx-vlm 0.8.0 is here"),
    ],
)
def test_a_model_of_mlx_vlm_is_refused_without_it(
    installed: dict[str, str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    """By the commands, and by the engine before any weights are downloaded: from a hub it has their headers alone."""
    (tmp_path / "config.json").write_text('{"model_type": "kolibri1"}')

    def version(package: str) -> str:
        if package not in installed:
            raise importlib.metadata.PackageNotFoundError(package)
        return installed[package]

    monkeypatch.setattr(importlib.metadata, "version", version)
    for named in ("kolibri1", str(tmp_path)):
        assert main(["parity", "--tiny", named]) == 2
        error = capsys.readouterr().err
        assert said in error and "pip install --no-deps 'mlx-vlm>=0.7.10,<0.8'" in error and error.count("\n") == 1
    sees = {"model": str(seeing_model(tmp_path / "sees", "mistral3"))}
    layout = build_layout.plan_layout(Settings(model=ModelSettings(**sees), parallel=ParallelSettings()))
    assert said in layout.description.no_pictures and "vision left out (pictures are encoded by mlx-vlm 0.7.10" in caplog.text
    with pytest.raises(UnsupportedModel, match=said):
        build_layout.plan_layout(Settings(model=ModelSettings(**sees, vision_rank="own"), parallel=ParallelSettings()))
    downloads = []
    files = resolve(str(tiny_model(tmp_path / "llama")))

    def resolved(model: str, revision: str | None = None, weights: bool = True) -> object:
        downloads.append(weights)
        return files

    description = build_layout.describe(files)
    monkeypatch.setattr(build_layout, "resolve", resolved)
    monkeypatch.setattr(build_layout, "describe", lambda files, vision: dataclasses.replace(description, family="kolibri1"))
    with pytest.raises(UnsupportedModel, match=said):
        build_layout.plan_layout(
            Settings(model=ModelSettings(model="org/name", weights_from="head"), parallel=ParallelSettings())
        )
    assert downloads == [False]


def uncut_places(config: dict[str, Any]) -> frozenset[int]:
    """Layers of a reduced model at which no second stage can begin: it is refused, or its logits differ."""
    small, model = dry_run.cut_down(config)
    rows, want = dry_run._wanted(small, model)
    found = set()
    for split in ((range(cut), range(cut, len(model.layers))) for cut in range(1, len(model.layers))):
        try:
            frames = [PipelineModel(model, own, family_of(str(small["model_type"]))) for own in split]
            alone, _ = dry_run._staged_logits(frames, rows)
        except (UnsupportedModel, *FAILURES):
            found.add(split[1].start)
            continue
        if not all(mx.array_equal(got, whole).item() for got, whole in zip(alone, want, strict=True)):
            found.add(split[1].start)
    return frozenset(found)


@pytest.mark.parametrize("family", TYPES)
def test_each_cut_is_exact_or_known_as_none(family: str) -> None:
    """A second stage begins at each layer in turn: mlx-vlm's own logits, or the planner never begins one there."""
    config = tiny_config(family)
    assert uncut_places(config) == uncut(text_config(config), 4)


@pytest.mark.parametrize("family", ["kolibri1"])
def test_weights_have_the_names_of_the_original_too(family: str, tmp_path: Path) -> None:
    """Experts one by one, and no `language_model`."""
    model = build_model(tiny_config(family, layers=1))
    weights: dict[str, mx.array] = {}
    own = dict(tree_flatten(model.parameters()))
    for name, array in own.items():
        plain = name.removeprefix("language_model.")
        if ".switch_mlp." in plain:
            before, after = plain.split(".switch_mlp.")
            weights |= {f"{before}.experts.{i}.{after}": array[i] for i in range(array.shape[0])}
        else:
            weights[plain] = array
    found = model.sanitize(weights)
    assert {name: array.shape for name, array in found.items()} == {name: array.shape for name, array in own.items()}


@pytest.mark.parametrize("family", TYPES)
def test_the_planner_counts_what_stages_hand_on(family: str, tmp_path: Path) -> None:
    files = resolve(str(tiny_model(tmp_path, family)))
    description = describe(files)
    stage = load_stage(files, description, range(1))
    assert stage.hidden_size == (description.payload_elements or description.hidden_size)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
def test_token_ids_are_exact_between_stages(dtype: mx.Dtype) -> None:
    ids = mx.array([[0, 257, 129_279], [65_537, 2**24 - 1, 5]], mx.int32)
    payload = StagePayload(ArraySpec((), (4,)), (), (ArraySpec.of(mx.zeros(TRACED, mx.int32)),))
    sent = payload.packed((mx.ones((2, 3, 4), dtype), ids))
    assert sent.dtype == dtype and sent.shape[-1] == payload.width == 7
    assert mx.array_equal(payload.unpacked(sent)[1], ids).item()


@pytest.mark.parametrize("family", ["hy_v4", "deepseek_v4"])
def test_logits_do_not_depend_on_how_a_prompt_is_cut_into_chunks(family: str, tmp_path: Path) -> None:
    """And upstream's still do; once they do not, mlx_vlm_mends.py can lose its entry, and this test that part."""
    files = resolve(str(tiny_model(tmp_path, family, dtype="float32")))
    stage = load_stage(files, describe(files), range(4), dtype="float32")
    tokens = mx.array([[3 + (7 * i * i + 5 * i) % 290 for i in range(40)]], mx.int32)

    def last(*ends: int) -> mx.array:
        caches = stage.make_caches()
        for start, end in pairwise((0, *ends)):
            h = stage.forward(tokens[:, start:end], caches)
            mx.eval(h)
        return stage.head(h)[0, -1]

    want = last(40)
    for ends in ((32, 40), (20, 31, 40)):
        assert mx.max(mx.abs(last(*ends) - want)).item() < 1e-5 * mx.max(mx.abs(want)).item()
    assert AS_IS[family](), "mlx-vlm is right now: remove the mend"


def as_is(module: str) -> Any:
    """A module of mlx-vlm without our mends."""
    spec = importlib.util.find_spec(f"mlx_vlm.models.{module}")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def selection_differs() -> bool:
    """Of hy_v4's index, traced with 40 keys and used with 100."""
    theirs = as_is("hy_v4.indexer")._partition_scores(6, False)

    def selected(select: Any, keys: int) -> set[int]:
        q, k, weights = (mx.random.normal(shape, key=mx.random.key(7)) for shape in ((1, 2, 1, 32), (1, 1, keys, 32), (1, 1, 2)))
        return set(select(q, k, weights)[0, 0, 0, -6:].tolist())

    ours = importlib.import_module("mlx_vlm.models.hy_v4.indexer")._partition_scores(6, False)
    return selected(theirs, 40) == selected(ours, 40) and selected(theirs, 100) != selected(ours, 100)


def compression_differs() -> bool:
    """Of eight tokens in one chunk and in two, by DeepSeek V4's compressor."""
    config = importlib.import_module("mlx_vlm.models.deepseek_v4.config").ModelConfig(hidden_size=64, qk_rope_head_dim=16)
    compressor, caches = as_is("deepseek_v4.language").Compressor(config, 4, 32), importlib.import_module("mlx_vlm.models.cache")
    x, once, twice = mx.random.normal((1, 8, 64), key=mx.random.key(7)), caches.PoolingCache(4), caches.PoolingCache(4)
    want = compressor(x, once, 0)
    compressor(x[:, :4], twice, 0)
    return not mx.allclose(compressor(x[:, 4:], twice, 4), want, atol=1e-5).item()


AS_IS = {"hy_v4": selection_differs, "deepseek_v4": compression_differs}
