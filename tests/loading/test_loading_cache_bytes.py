"""What a sequence takes in a stage's caches: measured on the rank, and told before from config.json."""

from __future__ import annotations

import math
import re
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from tandem.checkpoints.resolve import resolve
from tandem.errors import UnsupportedModel
from tandem.loading.prefix import trimmable
from tandem.loading.stage import StageModel, load_stage
from tandem.models.caches import LayerCache, layer_caches
from tandem.models.description import ModelDescription, describe
from tandem.models.families.tiny import TINY
from tandem.models.footprint import kv_bytes_per_token, layer_state_bytes, state_bytes
from tandem.models.partition import split_layers
from tandem.models.shard import held_kv_heads, plan_shards
from tandem.runner.kv_store import make_store
from tandem.testing import tiny_model
from tandem.vllm_plugin.rank import counted_heads, counted_room
from thread_ranks import ThreadGroup, ThreadRank

PAGE = (Path(__file__).parents[2] / "docs" / "models-list.md").read_text(encoding="utf-8")
UNTOLD = {
    "openelm": "its layers differ in heads, and count as the largest",
    "longcat_flash_ngram": "four tokens are not counted",
    "glm5_next": "a byte of each position, and keys that are not compressed yet, are not counted",
    "qwen4_exp": "its n-grams' tokens, and keys that are not compressed yet, are not counted",
    "deepseek_v4": "keys that are not compressed yet are not counted",
}


def assert_as_listed(family: str, stage: StageModel, description: ModelDescription) -> None:
    """docs/models-list.md says of the type what its caches can do, and drafts are refused before it is loaded."""
    drafts, prefixes, _, batches = next(
        line.strip("| ").split(" | ")[-5:-1] for line in PAGE.splitlines() if line.startswith(f"| `{family}` |")
    )
    assert prefixes == ("any length" if trimmable(stage.make_caches()) else "blocks")
    assert batches == ("one by one" if stage.one_by_one else "together")
    try:
        make_store(stage.make_caches, 2, stage.one_by_one)
        can_draft = "yes"
    except UnsupportedModel:
        can_draft = "no"
    assert re.split("[:,]", drafts)[0] == can_draft == ("no" if description.no_drafts else "yes")


@pytest.mark.parametrize("family", sorted(TINY))
def test_what_is_told_is_what_arrays_take(family: str, tmp_path: Path) -> None:
    """config.json, shapes, and arrays after a real call agree, in single and half precision (states stay single)."""
    files = resolve(str(tiny_model(tmp_path, family, dtype="float32")))
    description = describe(files)
    layers = description.num_layers
    for kind in ("bfloat16", "float32"):
        stage = load_stage(files, description, range(layers), dtype=kind)
        if family in UNTOLD:
            continue
        assert stage.cache_bytes == (
            kv_bytes_per_token(description, layers, kind, gpu=False),
            state_bytes(description, layers, kind, gpu=False),
        ), kind
    assert_as_listed(family, stage, description)
    caches = stage.make_caches()
    # A layer that is planned as quantised under --kv-dtype keeps all positions, by head.
    assert not any(
        description.kv_groups[i][0] for at, cache in enumerate(caches) if type(cache) is not KVCache for i in stage.layers_of(at)
    )
    mx.eval(stage.forward(mx.array([[5] * 256]), caches))
    if "not compressed yet" not in UNTOLD.get(family, ""):
        assert sum(cache.nbytes for cache in caches) == 256 * stage.cache_bytes.position + stage.cache_bytes.state


@pytest.mark.parametrize(
    "family",
    [
        "deepseek_v3",
        "gpt_bigcode",
        "kimi_linear",
        "llama",
        "llama4",
        "mimo_v2_flash",
        "minimax_m3_vl",
        "qwen3_next",
        "recurrent_gemma",
    ],
)
def test_what_is_told_of_a_rank_is_what_it_takes(family: str, tmp_path: Path) -> None:
    """Latents, an index's keys and a kv head alone are on both ranks, states and other heads are shared."""
    files = resolve(str(tiny_model(tmp_path, family, dtype="float32")))
    description = describe(files)
    layers = range(description.num_layers)
    told = kv_bytes_per_token(description, len(layers), "float32", gpu=False)
    states = state_bytes(description, len(layers), "float32", gpu=False)
    for shard in plan_shards(description, 2):
        rank = ThreadRank(ThreadGroup(2), shard.rank)
        stage = load_stage(files, description, layers, dtype="float32", shard=shard, tensor_parallel=rank)
        held = held_kv_heads(description, shard)
        share = description.cache_share(held / description.num_kv_heads)
        assert stage.cache_bytes == (told * share, states / 2)
        heads, width = counted_heads(description, held)  # as vLLM counts them: 4 bytes, of a key and of a value
        assert 0 <= 2 * heads * width * 4 * len(layers) - stage.cache_bytes.position < 2 * 4 * len(layers)


@pytest.mark.parametrize("family", ["gemma4", "kimi_linear", "llama", "mamba2", "mimo_v2_flash", "minimax_m3_vl", "qwen3_next"])
def test_vllm_hands_out_no_more_than_the_layers_of_a_stage_take(family: str, tmp_path: Path) -> None:
    """It counts all layers alike; those of a stage may take more of a token, or of a snapshot's states."""
    files = resolve(str(tiny_model(tmp_path, family, dtype="float32", layers=4)))
    description = describe(files)
    heads, width = counted_heads(description, description.num_kv_heads)
    snapshot = math.ceil(layer_state_bytes(description, 4) / max(description.token_elements * 4, 1))
    stages = [range(4), *split_layers(4, 4 - len(description.uncut), uncut=description.uncut)]
    for layers in stages:
        own = load_stage(files, description, layers).cache_bytes
        counted = 2 * heads * width * 4 * len(layers)
        tokens = counted_room(10**8, counted, own, snapshot) // counted
        assert tokens * own.position <= 10**8
        if own.position * snapshot >= own.state:
            assert (tokens + 1) * own.position > 10**8, "and no less"
        if snapshot:
            assert tokens // snapshot * own.state <= 10**8


def test_kv_heads_that_config_json_does_not_count(tmp_path: Path) -> None:
    """StarCoder says that there is one, PLaMo how many heads share one; Recurrent Gemma always has one."""
    heads = {"gpt_bigcode": 1, "plamo": 2, "recurrent_gemma": 1}
    found = {family: describe(resolve(str(tiny_model(tmp_path / family, family)))).num_kv_heads for family in heads}
    assert found == heads


def test_stages_have_the_bytes_of_their_own_layers(tmp_path: Path) -> None:
    """A stage of one layer with a state, and one of a layer with positions."""
    files = resolve(str(tiny_model(tmp_path, "qwen3_next", dtype="float32", layers=2)))
    description = describe(files)
    state, positions = (load_stage(files, description, layers).cache_bytes for layers in (range(1), range(1, 2)))
    assert (state.position, positions.state) == (0, 0)
    assert state.state == state_bytes(description, 2, "float32", gpu=False)
    assert positions.position == kv_bytes_per_token(description, 2, "float32", gpu=False)


def test_the_models_that_people_ask_for() -> None:
    deepseek = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 128}
    assert layer_caches(deepseek, 61, 2 * 128 * 192) == (LayerCache("latent", 576),) * 61
    coder = {
        "linear_num_value_heads": 32,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
    }
    caches = layer_caches(coder, 48, 2 * 2 * 256)
    assert [cache.kind for cache in caches[:4]] == ["state"] * 3 + ["positions"]
    assert caches[0].float32 == 32 * 128 * 128
    assert caches[0].state - caches[0].float32 == 3 * (2 * 16 * 128 + 32 * 128)
    assert layer_caches({}, 2, 64) == (LayerCache("positions", 64),) * 2
