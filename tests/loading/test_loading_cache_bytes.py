"""What a sequence takes in a stage's caches: measured on the rank, and told before from config.json."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from tandem.checkpoints.resolve import resolve
from tandem.errors import UnsupportedModel
from tandem.loading.stage import StageModel, load_stage
from tandem.models.caches import LayerCache, layer_caches
from tandem.models.description import describe
from tandem.models.families.tiny import TINY
from tandem.models.footprint import token_elements
from tandem.runner.kv_store import make_store
from tandem.runner.prefix_store import trimmable
from tandem.testing import tiny_model

PAGE = (Path(__file__).parents[2] / "docs" / "models-list.md").read_text(encoding="utf-8")
UNTOLD = {
    "baichuan_m1": "its convolution's state is not counted", "recurrent_gemma": "counted as attention throughout",
    "openelm": "its layers differ in heads, and count as the largest",
    "longcat_flash_ngram": "four tokens are not counted",
}


def assert_as_listed(family: str, stage: StageModel) -> None:
    """docs/models-list.md says of the type what its caches can do."""
    _, drafts, prefixes, batches = next(line.strip("| ").split(" | ")[1:] for line in PAGE.splitlines()
                                        if line.startswith(f"| `{family}` |"))
    assert prefixes == ("any length" if trimmable(stage.make_caches()) else "blocks")
    assert batches == ("one by one" if stage.one_by_one else "together")
    try:
        make_store(stage.make_caches, 2, stage.one_by_one)
        can_draft = "yes"
    except UnsupportedModel:
        can_draft = "no"
    assert drafts == can_draft


@pytest.mark.parametrize("family", sorted(TINY))
def test_what_is_told_is_what_is_measured(family: str, tmp_path: Path) -> None:
    files = resolve(str(tiny_model(tmp_path, family, dtype="float32")))
    description = describe(files)
    layers = description.num_layers
    whole = load_stage(files, description, range(layers))
    assert_as_listed(family, whole)
    told = (token_elements(description) * layers * 4, description.state_elements * layers * 4)
    if family in UNTOLD:
        assert whole.cache_bytes[0] <= told[0]
        return
    assert whole.cache_bytes == told


def test_a_measured_cache_is_a_used_one(tmp_path: Path) -> None:
    """The figures against bytes of caches after a real call, on two stages of a model with states and positions."""
    files = resolve(str(tiny_model(tmp_path, "qwen3_next", dtype="float32")))
    description = describe(files)
    x = mx.array([[5] * 256])
    for layers in (range(2), range(2, 4)):
        stage = load_stage(files, description, layers)
        caches = stage.make_caches()
        x = stage.forward(x, caches)
        mx.eval(x, [cache.state for cache in caches])
        assert sum(cache.nbytes for cache in caches) == 256 * stage.cache_bytes.position + stage.cache_bytes.state


def test_the_models_that_people_ask_for() -> None:
    deepseek = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 128}
    assert layer_caches(deepseek, 61, 2 * 128 * 192) == (LayerCache("latent", 576),) * 61
    assert not any(cache.can_be_cut is False for cache in layer_caches(deepseek, 61, 0))
    coder = {"linear_num_value_heads": 32, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
             "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4}
    caches = layer_caches(coder, 48, 2 * 2 * 256)
    assert [cache.kind for cache in caches[:4]] == ["state"] * 3 + ["positions"]
    assert caches[0].state == 32 * 128 * 128 + 3 * (2 * 16 * 128 + 32 * 128) and not caches[0].can_be_cut
    assert layer_caches({}, 2, 64) == (LayerCache("positions", 64),) * 2
