"""Entries of config.json that are missing or make no sense: refused with the entry's name, or of no importance."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tandem.checkpoints.resolve import resolve
from tandem.errors import UsageError
from tandem.models.description import describe
from tandem.models.families.table import FAMILIES, UNREAD, module_of
from tandem.models.partition import split_layers
from tandem.models.shard import plan_shards
from tandem.testing import tiny_model

KINDS = (
    "baichuan_m1",
    "bailing_hybrid",
    "bailing_moe_v3",
    "dbrx",
    "deepseek_v2",
    "falcon_h1",
    "gemma4",
    "hunyuan",
    "kimi_k3",
    "lfm2",
    "llama4",
    "mimo_v2_flash",
    "minimax_m3_vl",
    "nemotron_h",
    "qwen3_next",
)
"""Types whose layers are told from other entries each."""
MISSING = object()
ODD = (MISSING, None, "two", -1, 10**30, ["x"])


def changed(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Each with one entry that is odd in one of two ways, of the text model where that is nested."""
    for i, (key, value) in enumerate(config.items()):
        if key == "text_config":
            yield from ({**config, key: one} for one in changed(value))
        for odd in (ODD[i % len(ODD)], ODD[(i + 3) % len(ODD)]):
            yield {**{k: v for k, v in config.items() if k != key}, **({} if odd is MISSING else {key: odd})}


@pytest.mark.parametrize("family", KINDS)
def test_no_entry_ends_in_a_traceback_or_a_hang(family: str, tmp_path: Path) -> None:
    path = tiny_model(tmp_path, family)
    config = json.loads((path / "config.json").read_text())
    refused = 0
    for odd in changed(config):
        (path / "config.json").write_text(json.dumps(odd))
        try:
            description = describe(resolve(str(path)))
            split_layers(description.num_layers, 2, uncut=description.uncut)
            plan_shards(description, 2)
        except UsageError as error:
            refused += 1
            assert len(error.message) < 400 and "\n" not in error.message
    assert refused > 3


@pytest.mark.parametrize(
    ("family", "entry"),
    [
        ("bailing_moe_v3", "layer_group_size"),
        ("deepseek_v3", "kv_lora_rank"),
        ("deepseek_v32", "index_head_dim"),
        ("gemma4_text", "num_key_value_heads"),
        ("glm4_moe_lite", "v_head_dim"),
        ("nanbeige", "tie_word_embeddings"),
        ("plamo2", "mamba_step"),
        ("qwen3_next", "full_attention_interval"),
    ],
)
def test_an_entry_that_is_left_out_is_what_mlx_lm_takes_it_for(family: str, entry: str, tmp_path: Path) -> None:
    path = tiny_model(tmp_path, family)
    config = json.loads((path / "config.json").read_text())
    del config[entry]
    assumed = getattr(import_module(f"mlx_lm.models.{module_of(family)}").ModelArgs.from_dict(config), entry)
    described = []
    for entries in ({}, {entry: assumed}):
        (path / "config.json").write_text(json.dumps({**config, **entries}))
        described.append(describe(resolve(str(path))))
    assert described[0] == described[1]


@pytest.mark.parametrize(
    ("family", "nested", "entries", "said"),
    [
        ("deepseek_v2", False, {"qk_nope_head_dim": "two"}, "qk_nope_head_dim is 'two', of which nothing can be made"),
        ("deepseek_v3", False, {"intermediate_size": -1}, "intermediate_size must be a positive whole number, is -1"),
        ("deepseek_v3", False, {"moe_intermediate_size": 10**30}, "moe_intermediate_size must be a positive whole number"),
        ("bailing_hybrid", False, {"layer_group_size": 0}, "layer_group_size is 0, of which nothing can be made"),
        ("bailing_hybrid", False, {"group_norm_size": 0}, "group_norm_size must be a positive whole number, is 0"),
        ("bailing_moe_linear", False, {"group_norm_size": -1}, "group_norm_size must be a positive whole number, is -1"),
        ("bailing_moe_v3", False, {"n_group": 0}, "n_group must be a positive whole number, is 0"),
        ("dots1", False, {"n_group": 0}, "n_group must be a positive whole number, is 0"),
        ("gemma4", True, {"num_global_key_value_heads": 0}, "num_global_key_value_heads must be a positive whole number"),
        ("lfm2", False, {"block_ffn_dim_multiplier": 1e30}, "block_ffn_dim_multiplier is 1e+30, of which nothing can be"),
        ("gemma4", True, {"layer_types": ["x"]}, "layer_types is ['x'], of which nothing can be made"),
        ("kimi_k3", True, {"linear_attn_config": {}}, "num_heads is missing"),
        ("qwen3_5", True, {"text_config": {"hidden_size": 64}, "hidden_size": None}, "hidden_size must be a positive"),
    ],
)
def test_the_entry_is_named(family: str, nested: bool, entries: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = tiny_model(tmp_path, family)
    config = json.loads((path / "config.json").read_text())
    (config["text_config"] if nested else config).update(entries)
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError) as found:
        describe(resolve(str(path)))
    assert f"{path}/config.json: {said}" in found.value.message


@pytest.mark.parametrize("family", sorted(UNREAD))
def test_an_entry_that_mlx_lm_does_not_read_has_no_effect(family: str, tmp_path: Path) -> None:
    path = tiny_model(tmp_path, family)
    config = json.loads((path / "config.json").read_text())
    described = []
    for width, count in ((24, 7), (40, 9)):
        odd = {key: value for key, value in {"head_dim": width, "num_hidden_layers": count}.items() if key in UNREAD[family]}
        changed = {**config, "text_config": {**config["text_config"], **odd}} if "text_config" in config else {**config, **odd}
        (path / "config.json").write_text(json.dumps(changed))
        described.append(describe(resolve(str(path))))
    assert described[0] == described[1]
    if "head_dim" in UNREAD[family] and family not in ("plamo2", "longcat_flash", "longcat_flash_ngram"):
        assert described[0].head_dim == described[0].hidden_size // described[0].num_heads


def test_types_whose_module_takes_no_width_of_heads_are_listed() -> None:
    """But those with latents or states, whose heads are told otherwise."""
    unlisted = set()
    for family in FAMILIES.keys() - UNREAD.keys():
        if FAMILIES[family].source != "mlx_lm":
            continue  # the tables of these come with tests of their own
        module = import_module(f"mlx_lm.models.{module_of(family)}")
        own = [kind for kind in vars(module).values() if isinstance(kind, type) and kind.__module__ == module.__name__]
        fields = {one.name for kind in own if dataclasses.is_dataclass(kind) for one in dataclasses.fields(kind)}
        if not fields & {"head_dim", "kv_lora_rank", "text_config", "state_size", "d_state"}:
            unlisted.add(family)
    assert unlisted == set()


def test_rotary_embeddings_that_change_with_length_are_used_as_far_as_they_do_not(tmp_path: Path) -> None:
    """Further on mlx-lm takes another base at each call: tokens would depend on where a prompt is cut into chunks."""
    scaling = {"type": "dynamic", "factor": 2.0}
    path = tiny_model(tmp_path, "internlm2", config={"rope_scaling": scaling, "max_position_embeddings": 512})
    description = describe(resolve(str(path)))
    assert description.max_context == 512 and "rotary" in description.no_drafts
