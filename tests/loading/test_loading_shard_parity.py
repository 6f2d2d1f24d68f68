"""Tensor-parallel stages against the undivided model: the same tokens, logits within rounding, on all ranks alike."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import BatchKVCache

from tandem.checkpoints.resolve import resolve
from tandem.errors import ModelNotFound
from tandem.loading.stage import load_stage
from tandem.models.description import describe
from tandem.models.families.sharding import SHARDING
from tandem.models.partition import split_layers
from tandem.models.shard import plan_shards
from tandem.testing import tiny_model
from thread_ranks import ThreadGroup
from wide import LAYERS, alike, repeats, wide_figures

REQUIRED = ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma3_text", "gpt_oss", "phi3"]
PROMPT = [3 + (7 * i * i + 5 * i) % 290 for i in range(27)]  # longer than the windows of tiny models
CHUNKS = (11, 16)
DECODE = 3
"""Tokens after the prompt, where caches are looked at; elsewhere one."""


def wide(path, family, **options):
    config = {**wide_figures(family), **options.pop("config", {})}
    return resolve(str(tiny_model(path, family, layers=LAYERS.get(family, 2), config=config, **options)))


def run(stages, steps=None, decode=1):
    """Logits of each step and the tokens put in: prompt in chunks, then `decode` greedy ones; or `steps`."""
    caches = [stage.make_caches() for stage in stages]
    tokens = [PROMPT[: CHUNKS[0]], PROMPT[CHUNKS[0] :]] if steps is None else list(steps)
    logits = []
    for i in range(len(steps or CHUNKS) + (decode if steps is None else 0)):
        h = mx.array([tokens[i]], mx.int32)
        for stage, cache in zip(stages, caches, strict=True):
            h = stage.forward(h, cache)
        got = stages[-1].head(h)
        mx.eval(got)
        logits.append(np.array(got.astype(mx.float32)))
        if steps is None:
            tokens.append([int(logits[-1][0, -1].argmax())])
    return logits, tokens[: len(logits)]


def assert_parity(files, layouts, *, stages=1, tolerance=1e-4, dequantize=False, dtype="float32", decode=1, **plan):
    """Each of `layouts`, (ranks, weights) and stages if they are not `stages`, agrees with one process."""
    d = describe(files)
    options = {"dtype": dtype, "dequantize": dequantize}
    want, steps = run([load_stage(files, d, range(d.num_layers), **options)], decode=decode)
    scale = max(np.abs(w).max() for w in want)
    for size, weights, *own in layouts:
        ranges = split_layers(d.num_layers, own[0] if own else stages, uncut=d.uncut)
        shards = plan_shards(d, size, weights=weights, dequantize=dequantize, **plan)
        group = ThreadGroup(size)

        def work(tp, shards=shards, ranges=ranges):
            parts = [load_stage(files, d, r, shard=shards[tp.rank], tensor_parallel=tp, **options) for r in ranges]
            return run(parts, steps)[0]

        results = group.run(work)
        for step, logits in enumerate(want):
            for rank, result in enumerate(results):
                np.testing.assert_array_equal(result[step], results[0][step], err_msg=f"rank {rank}")
            assert np.abs(results[0][step] - logits).max() < tolerance * scale, (size, weights, step)
            assert (results[0][step][0, -1].argmax(-1) == logits[0, -1].argmax(-1)).all()
        sums = [shape for name, shape in group.calls if name == "sum"]
        if d.family in TWO_SUMS:
            assert len(sums) == 2 * d.num_layers * len(want)  # two a layer and step


GROWS = {"gemma4": 3e-5, "gemma4_unified": 3e-5, "qwen4_exp": 3e-5}
"""Gemma's attention scores are not scaled: what rounding changes is three times as much after each layer, and these have
three. It is rounding: with every weight of the undivided model changed by half a unit of its last place, logits change
by 0.9e-5 to 1.5e-5 of the largest, and by 0.8e-5 when three ranks sum (Llama: 0.3e-5 and 0.1e-5). Qwen4 takes square
roots of gates near 0: by 1.1e-5 to 2.2e-5, and by 1.3e-5 when three ranks sum."""
TWO_SUMS = [
    name for name, one in SHARDING.items() if len(one.sums) == 2 and not one.norms | one.variants and name != "nemotron-nas"
]  # it lacks parts
EVEN, UNEVEN = [(3, None)], [(2, None), (2, (1, 3))]
EXPANDED = sorted({*REQUIRED, *alike()})
EXPERTS = sorted(name for name, one in SHARDING.items() if one.experts and name != "qwen3_5")  # dense here
PACKED_EXPERTS = ["deepseek_v3", "gpt_oss", "lfm2_moe", "llama4", "qwen3_moe"]


def by_turns(families):
    """Of families that are cut alike, one in each run; the others only where there is time for all."""
    return [pytest.param(one, marks=[] if one in EXPANDED else pytest.mark.slow) for one in families]


@pytest.mark.parametrize("family", by_turns(sorted(SHARDING)))
def test_plain_weights(family, tmp_path):
    """Two stages of two ranks, for one of all families that are cut alike of three; one stage where weights are packed."""
    layouts = [*(EVEN + UNEVEN[1:] if family in REQUIRED else []), (3 if family in EXPANDED else 2, None, 2)]
    assert_parity(wide(tmp_path, family), layouts, tolerance=GROWS.get(family, 1e-5), decode=DECODE)


@pytest.mark.parametrize("family", by_turns(sorted(SHARDING)))
def test_packed_weights(family, tmp_path):
    assert_parity(wide(tmp_path, family, quantized=True), EVEN + UNEVEN if family in REQUIRED else UNEVEN[1:])


@pytest.mark.parametrize("family", EXPANDED)
def test_expanded_weights(family, tmp_path):
    """What is expanded depends on how it is cut alone: one of all families that are cut alike."""
    assert_parity(wide(tmp_path, family, quantized=True), EVEN + UNEVEN[1:], dequantize=True)


@pytest.mark.parametrize("family", by_turns(EXPERTS))
def test_whole_experts(family, tmp_path):
    """Four experts over three ranks."""
    assert_parity(wide(tmp_path, family, quantized=family in PACKED_EXPERTS), EVEN, expert_parallel=True)


@pytest.mark.parametrize("family", ["granitemoehybrid", "mamba2"])
def test_a_single_group_of_states_is_cut_between_its_heads(family, tmp_path):
    assert_parity(wide(tmp_path, family, config={"mamba_n_groups": 1, "n_groups": 1}), EVEN + UNEVEN)


FOUR = {  # two kv heads with two query heads each; four of what is not attention
    **dict.fromkeys(
        (
            "num_attention_heads",
            "linear_num_key_heads",
            "linear_num_value_heads",
            "mamba_n_groups",
            "n_groups",
            "mamba_n_heads",
            "mamba_num_heads",
            "group_norm_size",
        ),
        4,
    ),
    **dict.fromkeys(
        (
            "hidden_size",
            "moe_intermediate_size",
            "intermediate_size",
            "intermediate_size_mlp",
            "shared_expert_intermediate_size",
            "moe_shared_expert_intermediate_size",
            "shared_intermediate_size",
            "block_dim",
            "block_ff_dim",
            "mamba_d_ssm",
        ),
        128,
    ),
    **dict.fromkeys(("n_head", "n_heads"), 4),
    "n_embd": 128,
    "n_kv_heads": 1,
    "kv_channels": 32,
    "attn_config": {"kv_n_heads": 1, "clip_qkv": 8, "rope_theta": 10000.0},
    "d_model": 128,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "mamba_head_dim": 32,
    "mamba_d_head": 32,
    "hidden_size_per_head": 32,
}
_LONG = {"type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16, "short_mscale": 1.1, "long_mscale": 1.2}
SEVERAL = ["gemma2", "gpt_oss", "llama", "nemotron_h", "qwen3_next", "spark2_5"]
"""Families tried with two kv heads; the others with one."""


@pytest.mark.parametrize("family", by_turns(family for family in sorted(SHARDING) if repeats(family)))
def test_more_ranks_than_kv_heads(family, tmp_path):
    """Two ranks have the same key and value head, and half of its queries each."""
    config = FOUR | ({"rope_scaling": _LONG} if family == "phimoe" else {})
    if family not in SEVERAL:
        assert_parity(wide(tmp_path, family, config=config | {"num_key_value_heads": 1}), [(2, None)])
        return
    for quantized in (False, True):
        files = wide(tmp_path / f"{quantized}", family, config=config, quantized=quantized)
        assert_parity(files, [(4, None)])


def test_a_tied_head_is_cut_and_other_tables_are_not(tmp_path):
    config = {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 512}
    files = wide(tmp_path, "gemma4_text", dtype="float32", config=config)
    assert_parity(files, [(2, None), (2, None, 2)])


def test_masks_of_rows_where_ranks_have_one_query_head_each(tmp_path):
    """Scores of Gemma 2 have an axis for the queries of a kv head, where there are several."""
    config = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128, "head_dim": 32}
    files = wide(tmp_path, "gemma2", config=config)
    d = describe(files)
    tokens = mx.array([PROMPT[:12], PROMPT[12:24]], mx.int32)

    def logits(stage):
        caches = [BatchKVCache([3, 0]) for _ in stage.layers]
        return np.array(stage.head(stage.forward(tokens, caches)))[:, 3:]

    want = logits(load_stage(files, d, range(2), dtype="float32"))
    for size in (2, 4):
        shards = plan_shards(d, size)
        found = ThreadGroup(size).run(
            lambda tp, shards=shards: logits(
                load_stage(files, d, range(2), dtype="float32", shard=shards[tp.rank], tensor_parallel=tp)
            )
        )
        assert np.abs(found[0] - want).max() < 1e-4 * np.abs(want).max()


def test_whole_experts_in_stages_of_several_ranks(tmp_path):
    assert_parity(wide(tmp_path, "deepseek_v3"), UNEVEN, stages=2, expert_parallel=True)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "phi"])
def test_stages_of_several_ranks(family, tmp_path):
    """The last stage holds rows of a tied embedding (qwen2), of a head (qwen3), of a head with a bias (phi)."""
    assert_parity(wide(tmp_path, family, vocab=509), UNEVEN, stages=2)
    quantized = wide(tmp_path / "q", family, vocab=509, quantized=True)
    assert_parity(quantized, UNEVEN, stages=2)


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_biases_count_once(family, tmp_path):
    files = wide(tmp_path, family, config={"attention_bias": True, "mlp_bias": True})
    assert_parity(files, EVEN + UNEVEN)


def test_half_precision(tmp_path):
    """Rounding differs with the order of sums, and tokens may where two are close: only logits are compared."""
    files = wide(tmp_path, "llama")
    d = describe(files)
    want, steps = run([load_stage(files, d, range(2), dtype="bfloat16")])
    shards = plan_shards(d, 2)
    results = ThreadGroup(2).run(
        lambda tp: run([load_stage(files, d, range(2), dtype="bfloat16", shard=shards[tp.rank], tensor_parallel=tp)], steps)[0]
    )
    scale = max(np.abs(w).max() for w in want)
    assert max(np.abs(a - b).max() for a, b in zip(results[0], want, strict=True)) < 0.03 * scale


def test_a_failing_rank_ends_the_others():
    def work(tp):
        if tp.rank == 1:
            raise RuntimeError("lost")
        return tp.sum(mx.ones((2,)))

    with pytest.raises(RuntimeError, match="lost"):
        ThreadGroup(3).run(work)
    with pytest.raises(ValueError, match="ranks sum different arrays"):
        ThreadGroup(2).run(lambda tp: tp.sum(mx.ones((tp.rank + 1,))))


@pytest.mark.demo
def test_demo_model_over_two_ranks():
    try:
        files = resolve("demo")
    except ModelNotFound as error:
        pytest.skip(str(error))
    d = describe(files)
    shards = plan_shards(d, 2)
    assert [len(s.kv_heads) for s in shards] == [2, 1]
    prompt = [[1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]]
    options = {"dtype": "float32", "dequantize": True}

    def last(stage):
        caches = stage.make_caches()
        tokens, logits = prompt, []
        for _ in range(4):
            got = stage.head(stage.forward(mx.array(tokens, mx.int32), caches)[:, -1:])
            mx.eval(got)
            logits.append(np.array(got))
            tokens = [[int(logits[-1].argmax())]]
        return logits

    want = last(load_stage(files, d, range(d.num_layers), **options))
    results = ThreadGroup(2).run(
        lambda tp: last(load_stage(files, d, range(d.num_layers), shard=shards[tp.rank], tensor_parallel=tp, **options))
    )
    for got, expected in zip(results[1], want, strict=True):
        assert np.abs(got - expected).max() < 1e-4 * np.abs(expected).max()
        assert got.argmax() == expected.argmax()
