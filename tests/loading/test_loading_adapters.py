"""LoRA adapters against mlx-lm's own load_adapters in one process: whole, in stages, and divided over ranks."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache, make_prompt_cache
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import load_model

from adapters import tiny_adapter
from tandem.checkpoints.resolve import resolve
from tandem.errors import BrokenModel, ModelNotFound, UnsupportedModel
from tandem.loading.lora import LoRA
from tandem.loading.stage import StageModel, load_stage
from tandem.models.adapter_files import read_adapter
from tandem.models.description import describe
from tandem.models.shard import plan_shards
from tandem.runner.kv_store import KVStore
from tandem.testing import tiny_model
from thread_ranks import ThreadGroup
from wide import wide_figures

PROMPT = [3 + (7 * i * i + 5 * i) % 290 for i in range(21)]
RANK, SCALE = 4, 2.0


def peft_adapter(mlx: Path, path: Path, **config: object) -> Path:
    """The same adapter as PEFT writes it."""
    path.mkdir()
    arrays = {}
    for name, array in mx.load(str(mlx / "adapters.safetensors")).items():
        module, _, side = name.rpartition(".lora_")
        arrays[f"base_model.model.{module}.lora_{side.upper()}.weight"] = mx.contiguous(array.T)
    mx.save_safetensors(str(path / "adapter_model.safetensors"), arrays)
    (path / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": SCALE * RANK, "bias": "none"} | config)
    )
    return path


def want(model_path: Path, adapter: Path | None) -> np.ndarray:
    """Logits of the prompt by mlx-lm, in float32."""
    model, _ = load_model(model_path)
    if adapter is not None:
        model = load_adapters(model, str(adapter))
    model.set_dtype(mx.float32)
    model.eval()
    return np.array(model(mx.array([PROMPT]), cache=make_prompt_cache(model)))


def adapted(model: Path, layers: range, *adapters: Path, **options: object) -> StageModel:
    """A stage whose forward passes use the first of these adapters."""
    files = resolve(str(model))
    stage = load_stage(files, describe(files), layers, dtype="float32", max_loras=len(adapters), **options)
    for number, adapter in enumerate(adapters, 1):
        stage.adapters.load(number, str(adapter))
    stage.adapters.choose([1])
    return stage


def logits(stages) -> np.ndarray:
    h = mx.array([PROMPT], mx.int32)
    for stage in stages:
        h = stage.forward(h, stage.make_caches())
    return np.array(stages[-1].head(h))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Three kv heads, so that two ranks get uneven parts."""
    path = tmp_path_factory.mktemp("adapters")
    tiny_model(
        path / "model",
        config={"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16, "intermediate_size": 192},
        dtype="float32",
    )
    tiny_adapter(path / "model", path / "mlx", layers=2, rank=RANK, scale=SCALE)
    peft_adapter(path / "mlx", path / "peft")
    return path


@pytest.mark.parametrize("kind", ["mlx", "peft"])
def test_stages_compute_what_mlx_lm_computes(tiny, kind):
    """Bit for bit, as the scale is a power of two; any other is within rounding."""
    expected = want(tiny / "model", tiny / "mlx")
    assert np.abs(expected - want(tiny / "model", None)).max() > 0.1, "the adapter does something"
    for ranges in ([range(4)], [range(3), range(3, 4)]):
        stages = [adapted(tiny / "model", one, tiny / kind) for one in ranges]
        np.testing.assert_array_equal(logits(stages), expected)


@pytest.mark.parametrize(("size", "shares"), [(2, None), (2, (1.0, 3.0)), (3, None)])
def test_ranks_share_an_adapter(tiny, size, shares):
    expected = want(tiny / "model", tiny / "mlx")
    shards = plan_shards(describe(resolve(str(tiny / "model"))), size, weights=shares)
    for rank, got in enumerate(
        ThreadGroup(size).run(
            lambda tp: logits([adapted(tiny / "model", range(4), tiny / "peft", shard=shards[tp.rank], tensor_parallel=tp)])
        )
    ):
        assert np.abs(got - expected).max() < 1e-4 * np.abs(expected).max(), rank


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("gemma4_text", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.down_proj")),  # layers differ
        ("mimo_v2_flash", ("self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")),
        ("deepseek_v3", ("self_attn.q_a_proj", "self_attn.q_b_proj", "self_attn.o_proj", "mlp.shared_experts.down_proj")),
        ("qwen3_next", ("self_attn.q_proj", "linear_attn.in_proj_qkvz", "linear_attn.out_proj")),
        ("phi3", ("self_attn.qkv_proj", "mlp.gate_up_proj", "mlp.down_proj")),
    ],
)
def test_ranks_share_an_adapter_as_they_share_the_layers(tmp_path, family, keys):
    tiny_model(tmp_path / "model", family, layers=2, config=wide_figures(family), dtype="float32")
    adapter = tiny_adapter(tmp_path / "model", tmp_path / "mlx", keys=keys, layers=2)
    expected = want(tmp_path / "model", tmp_path / "mlx")
    assert np.abs(expected - want(tmp_path / "model", None)).max() > 0.1, "the adapter does something"
    shards = plan_shards(describe(resolve(str(tmp_path / "model"))), 3)
    for got in ThreadGroup(3).run(
        lambda tp: logits([adapted(tmp_path / "model", range(2), adapter, shard=shards[tp.rank], tensor_parallel=tp)])
    ):
        assert np.abs(got - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("dequantize", [False, True])
def test_a_quantised_model_keeps_its_weights_and_its_adapter(tmp_path, dequantize):
    tiny_model(tmp_path / "model", quantized=True, dtype="float32")
    tiny_adapter(tmp_path / "model", tmp_path / "mlx", keys=("self_attn.q_proj", "mlp.down_proj"))
    model, adapter = tmp_path / "model", tmp_path / "mlx"
    expected = want(model, adapter)
    whole = logits([adapted(model, range(4), adapter, dequantize=dequantize)])
    assert np.abs(whole - expected).max() < 1e-3 * np.abs(expected).max()
    shards = plan_shards(describe(resolve(str(model))), 2, dequantize=dequantize)
    for got in ThreadGroup(2).run(
        lambda tp: logits([adapted(model, range(4), adapter, dequantize=dequantize, shard=shards[tp.rank], tensor_parallel=tp)])
    ):
        assert np.abs(got - expected).max() < 1e-3 * np.abs(expected).max()


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("fuse", [False, True])
def test_rows_of_one_batch_use_their_own_adapters(tiny, tmp_path, fuse, quantized):
    """Ranks 4 and 16, other layers, no adapter, and one that is unloaded: each row as alone, over stages and over ranks."""
    model, first = tiny / "model", tiny / "mlx"
    if quantized:
        model = tmp_path / "quantized"
        tiny_model(model, quantized=True, dtype="float32")
        first = tiny_adapter(model, tmp_path / "first", layers=2)
    other = tiny_adapter(model, tmp_path / "other", keys=("self_attn.k_proj", "mlp.down_proj"), layers=4, rank=16, scale=1.5)
    alone, near = [want(model, first), want(model, None), want(model, other)], 1e-3 if quantized else 1e-4
    assert np.abs(alone[0] - alone[1]).max() > 0.1 < np.abs(alone[2] - alone[1]).max(), "they do something"
    shards = plan_shards(describe(resolve(str(model))), 2, dequantize=False)

    def batch(stages):
        h = mx.array([PROMPT] * 3, mx.int32)
        for stage in stages:
            stage.adapters.choose([1, 0, 2])
            h = stage.forward(h, stage.make_caches())
        together = np.array(stages[-1].head(h))
        for stage in stages:
            stage.adapters.unload(1)
            stage.adapters.choose([2])
        return together, logits(stages)

    def stage(layers, **options):
        return adapted(model, layers, first, other, fuse=fuse, dequantize=False, **options)

    def over_ranks(tp):
        return batch([stage(range(4), shard=shards[tp.rank], tensor_parallel=tp)])

    for together, left in [batch([stage(range(3)), stage(range(3, 4))]), *ThreadGroup(2).run(over_ranks)]:
        for row, expected in enumerate(alone):
            assert np.abs(together[row] - expected[0]).max() < near * np.abs(expected).max(), row
        assert np.abs(left - alone[2]).max() < near * np.abs(alone[2]).max()


def test_a_product_restacks_its_adapters_once_for_each_change(tiny, monkeypatch):
    """Not once for each of the layers that are fused into it."""
    stage, stacked, stack = adapted(tiny / "model", range(4), tiny / "mlx", tiny / "peft", fuse=True), [], LoRA._stack
    monkeypatch.setattr(LoRA, "_stack", lambda self, held: (stacked.append(self), stack(self, held))[1])
    for change in (lambda: stage.adapters.unload(1), lambda: stage.adapters.load(1, str(tiny / "mlx"))):
        stacked.clear()
        change()
        assert len(stacked) == len(set(stacked)) == 2 * 4  # two layers, each with q and v, o, gate, and down


def test_an_adapter_in_the_place_of_an_unloaded_one_has_nothing_of_it(tiny, tmp_path):
    """In a layer that the old one adapted, the new one does not, and another still does."""
    model = tiny / "model"
    paths = [
        tiny_adapter(model, tmp_path / name, keys=keys)
        for name, keys in (("old", ("self_attn.q_proj",)), ("other", ("self_attn.q_proj",)), ("new", ("mlp.up_proj",)))
    ]
    stage = adapted(model, range(4), *paths[:2])
    stage.adapters.unload(1)
    stage.adapters.load(1, str(paths[2]))
    stage.adapters.choose([1, 2, 0])
    together = np.array(stage.head(stage.forward(mx.array([PROMPT] * 3, mx.int32), stage.make_caches())))
    for row, alone in enumerate((paths[2], paths[1], None)):
        expected = want(model, alone)
        assert np.abs(together[row] - expected[0]).max() < 1e-4 * np.abs(expected).max(), row


@pytest.mark.parametrize(
    ("config", "error", "word"),
    [
        ({"use_dora": True}, UnsupportedModel, "use_dora"),
        ({"peft_type": "IA3"}, UnsupportedModel, "IA3"),
        ({"modules_to_save": ["lm_head"]}, UnsupportedModel, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 8}}, UnsupportedModel, "rank_pattern"),
        ({"bias": "all"}, UnsupportedModel, "bias"),
        ({"r": 0}, BrokenModel, "r must be above 0"),
        ({"lora_alpha": None}, BrokenModel, "lora_alpha"),
    ],
)
def test_what_peft_asks_for_and_is_not_there_is_refused(tiny, tmp_path, config, error, word):
    adapter = peft_adapter(tiny / "mlx", tmp_path / "peft", **config)
    with pytest.raises(error, match=word):
        read_adapter(str(adapter), describe(resolve(str(tiny / "model"))))


def test_rank_stabilised_scale(tiny, tmp_path):
    adapter = peft_adapter(tiny / "mlx", tmp_path / "peft", use_rslora=True)
    assert read_adapter(str(adapter), describe(resolve(str(tiny / "model")))).scale == SCALE * RANK / RANK**0.5


@pytest.mark.parametrize(
    ("change", "error", "word"),
    [
        (lambda path, config, arrays: config.update(fine_tune_type="dora"), UnsupportedModel, "dora"),
        (lambda path, config, arrays: config.update(lora_parameters={"rank": 4, "alpha": 8}), BrokenModel, "scale"),
        (
            lambda path, config, arrays: arrays.update(
                {"lm_head.lora_a": mx.zeros((96, 4)), "lm_head.lora_b": mx.zeros((4, 512))}
            ),
            UnsupportedModel,
            "lm_head",
        ),
        (
            lambda path, config, arrays: arrays.update(
                {"model.layers.7.mlp.up_proj.lora_a": mx.zeros((96, 4)), "model.layers.7.mlp.up_proj.lora_b": mx.zeros((4, 192))}
            ),
            BrokenModel,
            "4 layers",
        ),
        (lambda path, config, arrays: arrays.pop("model.layers.3.mlp.down_proj.lora_b"), BrokenModel, "down_proj"),
        (
            lambda path, config, arrays: arrays.update({"model.layers.3.mlp.down_proj.m": mx.zeros(4)}),
            UnsupportedModel,
            "down_proj.m",
        ),
        (lambda path, config, arrays: arrays.clear(), BrokenModel, "no LoRA weights"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(tiny, tmp_path, change, error, word):
    config = json.loads((tiny / "mlx" / "adapter_config.json").read_text())
    arrays = mx.load(str(tiny / "mlx" / "adapters.safetensors"))
    change(tmp_path, config, arrays)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), arrays)
    with pytest.raises(error, match=word):
        read_adapter(str(tmp_path), describe(resolve(str(tiny / "model"))))


def test_what_does_not_fit_a_layer_or_is_not_finite_is_refused_and_changes_nothing(tiny, tmp_path):
    stage = adapted(tiny / "model", range(4), tiny / "mlx", tiny / "mlx")
    before = logits([stage])
    for name, inputs, value, word in (
        ("mlp.up_proj", 64, 0.0, "64 inputs"),
        ("mlp.no_proj", 96, 0.0, "no_proj"),
        ("mlp.up_proj", 96, float("nan"), "not all finite"),
    ):
        path = tmp_path / word
        path.mkdir()
        (path / "adapter_config.json").write_text(json.dumps({"lora_parameters": {"scale": 1.0}}))
        arrays = {"lora_a": mx.full((inputs, 4), value), "lora_b": mx.zeros((4, 192))}
        mx.save_safetensors(
            str(path / "adapters.safetensors"), {f"model.layers.1.{name}.{side}": array for side, array in arrays.items()}
        )
        with pytest.raises((BrokenModel, UnsupportedModel), match=word):
            stage.adapters.load(2, str(path))
    with pytest.raises(ModelNotFound, match="adapter_config"):
        read_adapter(str(tmp_path), describe(resolve(str(tiny / "model"))))
    np.testing.assert_array_equal(logits([stage]), before)


def test_states_taken_back_are_computed_again_with_the_adapter_of_their_row(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model", "qwen3_next", dtype="float32")
    keys = ["linear_attn.in_proj_qkvz"]
    stage = adapted(model, range(4), tiny_adapter(model, tmp_path / "mlx", layers=4, rank=RANK, scale=SCALE, keys=keys))
    store, rows = KVStore(stage.make_caches, 3), {"a": 1, "b": 0, "c": 1}
    alone = {}
    for name, adapter in rows.items():
        stage.adapters.choose([adapter])
        for tokens in ([5, 6, 7], [5, 6, 7, 8]):
            alone[name] = stage.make_caches()
            stage.forward(mx.array([tokens]), alone[name])
            if len(tokens) == 3:
                store.join(name, alone[name], 3)
    stage.adapters.choose(list(rows.values()))
    stage.forward(mx.array([[8, 9, 10]] * 3), store.batch([3] * 3))
    store.leave("a")  # the last row takes its place
    for name in "cb":
        store.cut(name, 4)
        for mine, theirs in zip(store.extract(name), alone[name], strict=True):
            if isinstance(theirs, ArraysCache):
                for one, other in zip(mine.state[0], theirs.state[0], strict=True):
                    np.testing.assert_allclose(np.array(one), np.array(other), rtol=1e-3, atol=1e-4)
    assert stage.adapters.chosen == [1, 0, 1]
