"""Models that are planned for by name: their counts against what is published, and against files."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from script_files import script
from tandem.checkpoints.resolve import resolve
from tandem.errors import ConfigError
from tandem.models.description import describe
from tandem.models.footprint import kv_bytes_per_token
from tandem.planner.hardware import link, machine
from tandem.planner.plan import plan
from tandem.planner.presets import QUANTS, Preset, find, planned, presets, read_experts
from tandem.planner.types import ManualLayout, Request
from tandem.testing import tiny_model

GIB = 2**30
PUBLISHED = {  # billions of parameters in all and active, as their makers say
    "deepseek-ai/DeepSeek-V3": (671, 37), "moonshotai/Kimi-K2-Instruct": (1000, 32),
    "Qwen/Qwen3-235B-A22B": (235, 22), "Qwen/Qwen3-30B-A3B": (30.5, 3.3), "Qwen/Qwen3-32B": (32.8, None),
    "Qwen/Qwen3-Coder-480B-A35B-Instruct": (480, 35), "Qwen/Qwen3-Next-80B-A3B-Instruct": (80, 3),
    "Qwen/Qwen3.5-397B-A17B": (397, 17), "openai/gpt-oss-120b": (117, 5.1), "openai/gpt-oss-20b": (21, 3.6),
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": (109, 17), "meta-llama/Meta-Llama-3.1-405B": (405, None),
    "zai-org/GLM-4.6": (355, 32), "zai-org/GLM-4.7": (358, 32),
    "mistralai/Mistral-Small-3.2-24B-Instruct-2506": (23.57, None), "zai-org/GLM-4.5-Air": (106, 12),
    "zai-org/GLM-5": (744, 40), "MiniMaxAI/MiniMax-M2.5": (229, 10),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (31.6, 3.2), "Qwen/Qwen3-0.6B": (0.6, None), "Qwen/Qwen3-1.7B": (1.72, None),
    "Qwen/Qwen3-4B": (4.02, None), "Qwen/Qwen3-14B": (14.8, None), "meta-llama/Llama-3.2-1B-Instruct": (1.24, None),
    "meta-llama/Llama-3.2-3B-Instruct": (3.21, None), "HuggingFaceTB/SmolLM2-135M": (0.135, None),
    "deepseek-ai/DeepSeek-Coder-V2-Lite-Instruct": (15.7, 2.4),
}  # fmt: skip


def counted(config):
    """As `scripts/presets` counts it."""
    return msgspec.json.decode(json.dumps(script("presets").row(config)), type=Preset)


def as_planned(name, quant="bf16"):
    return planned(*find(name), quant)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_that_the_makers_publish(name):
    total, active = PUBLISHED[name]
    model = as_planned(name)
    d, experts = model.description, model.experts
    stored = sum(d.layer_bytes) + d.embed_bytes + d.head_bytes
    assert stored / 2e9 == pytest.approx(total, rel=0.035)
    if active is not None:
        left = sum(experts.layer_bytes) * (1 - experts.used / experts.count)
        # Makers round; some count the embedding or the head as active, some do not.
        assert (stored - left - d.embed_bytes - d.head_bytes) / 2e9 * 0.9 <= active
        assert (stored - left) / 2e9 * 1.03 >= active


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma3_text"])
def test_a_row_counts_what_the_files_have(family, tmp_path):
    files = resolve(str(tiny_model(tmp_path, family)))
    want = describe(files)
    got = planned("tiny", counted(json.loads((files.path / "config.json").read_text())), "bf16")
    for field in ("num_layers", "hidden_size", "vocab_size", "num_kv_heads", "layer_bytes", "embed_bytes", "head_bytes",
                  "tied_head", "max_context"):  # fmt: skip
        assert getattr(got.description, field) == getattr(want, field), field
    assert kv_bytes_per_token(got.description, 3, "auto", gpu=True) == kv_bytes_per_token(want, 3, "auto", gpu=True)
    assert got.experts == read_experts(files, want)


@pytest.mark.parametrize("family", ["minimax_m3_vl", "gemma4", "glm_moe_dsa", "qwen3_next", "deepseek_v2"])
def test_a_row_counts_what_each_rank_keeps_of_a_token(family, tmp_path):
    files = resolve(str(tiny_model(tmp_path, family)))
    want = describe(files)
    got = planned("tiny", counted(json.loads((files.path / "config.json").read_text())), "bf16").description
    for field in ("token_elements", "whole_elements", "replicated_cache", "index_heads"):
        assert getattr(got, field) == getattr(want, field), field


def test_the_keys_of_an_index_are_on_every_rank():
    model = as_planned("MiniMax-M3").description

    def kv(ranks):
        hosts = [machine(name, 2048 * GIB, "m3-ultra") for name in "abcd"[:ranks]]
        request = Request(context=1024, streams=2, layouts=(ManualLayout(stages=(ranks,)),))
        return plan(model, hosts, [link("thunderbolt5-rdma")], request).chosen.prediction.memory[0].kv

    index, heads = 57 * 128, 60 * 2 * 4 * 128
    for ranks in (1, 2, 4):
        assert kv(ranks) == pytest.approx(2 * (heads / ranks + index) * 1024 * 2, rel=1e-6)


REAL_WIDTHS = json.loads((Path(__file__).parents[2] / "benchmarks" / "real_widths.json").read_text())


@pytest.mark.parametrize("name", REAL_WIDTHS)
def test_configs_at_real_widths_are_those_that_were_counted(name):
    """benchmarks/real_widths.py holds the planner to what these models take."""
    case = REAL_WIDTHS[name]
    preset = presets()[case["preset"]]
    assert counted(case["config"]) == msgspec.structs.replace(preset, native=None), "as if nothing were packed"


def test_a_latent_is_counted_once_a_token_and_layer():
    model = as_planned("deepseek-ai/DeepSeek-V3").description
    assert kv_bytes_per_token(model, 1, "bfloat16", gpu=True) == 2 * 576
    answer = plan(model, [machine("a", 2048 * GIB, "m3-ultra")], [], Request(context=1024, streams=4))
    assert answer.chosen.prediction.memory[0].kv == 2 * 576 * 61 * 1024 * 4


def test_a_state_is_counted_once_a_stream():
    model = as_planned("Qwen/Qwen3.5-35B-A3B").description
    each = 2 * 40 * model.token_elements

    def kv(context, streams):
        answer = plan(model, [machine("a", 2048 * GIB, "m3-ultra")], [], Request(context=context, streams=streams))
        memory = answer.chosen.prediction.memory[0]
        assert f"Each checkpoint of a cached prefix takes {memory.checkpoint / 2**20:.0f} MiB." in " ".join(answer.reasons)
        assert memory.kv == pytest.approx(streams * (each * context + memory.checkpoint), abs=2)
        return memory.kv

    state = kv(1000, 1) - each * 1000
    narrow = model.state_elements - model.float32_elements
    assert state == pytest.approx(40 * (2 * narrow + 4 * model.float32_elements), abs=2)
    assert narrow == 30 / 40 * 3 * (2 * 16 * 128 + 32 * 128) and model.float32_elements == 30 / 40 * 32 * 128 * 128
    assert kv(2000, 3) == pytest.approx(3 * (2000 * each + state), abs=2)


def test_bits_scale_the_weights_and_experts_that_are_published_packed_stay_so():
    plain, four = as_planned("openai/gpt-oss-120b"), as_planned("openai/gpt-oss-120b", "4bit")
    native = as_planned("gpt-oss-120b", "native")
    assert sum(four.description.layer_bytes) / sum(plain.description.layer_bytes) == pytest.approx(4.5 / 16, rel=0.01)
    assert sum(native.experts.layer_bytes) / sum(plain.experts.layer_bytes) == pytest.approx(4.25 / 16, rel=1e-4)
    assert native.description.embed_bytes == plain.description.embed_bytes


@pytest.mark.parametrize("name", sorted(presets()))
def test_every_preset_can_be_planned_for_in_every_format(name):
    for quant in QUANTS:
        model = as_planned(name, quant)
        d = model.description
        assert min(d.layer_bytes) > 0
        assert d.embed_bytes > 0
        routed = model.experts.layer_bytes if model.experts else [0] * d.num_layers
        assert all(part <= whole for part, whole in zip(routed, d.layer_bytes, strict=True))
        hosts = [machine("a", 16384 * GIB, "m3-ultra")]
        assert plan(d, hosts, [], Request(context=512), experts=model.experts).chosen is not None


def test_names_are_found_in_any_case_and_by_their_last_part():
    assert find("DeepSeek-v3.2")[0] == find("deepseek-ai/deepseek-v3.2")[0] == "deepseek-ai/DeepSeek-V3.2"
    assert find("DeepSeek") is None
    with pytest.raises(ConfigError, match="--quant 7bit: is not one of"):
        as_planned("gpt-oss-20b", "7bit")
