"""DFlash heads: the outputs are those of plain decoding, and a head that is right is believed."""

from __future__ import annotations

import importlib
import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from drafting import GREEDY, answers, answers_amid_a_kill, assert_weights_as_told, change, drafting, drafts_after, plain, prompts
from submitted import ask
from tandem import LLM
from tandem.checkpoints.resolve import resolve
from tandem.engine.engine import Engine
from tandem.errors import ConfigError, ModelError
from tandem.loading.stage import load_stage
from tandem.models.description import describe
from tandem.models.sources import has_mlx_vlm
from tandem.testing import tiny_model

pytestmark = [
    pytest.mark.skipif(not has_mlx_vlm(), reason="mlx-vlm is not installed"),
    pytest.mark.usefixtures("steps_that_cost_alike"),
]
WIDTH, VOCAB, MASK, READ = 64, 512, 1, (0, 1, 3)


def dflash(model: Path, **changes: Any) -> Path:
    """A random head beside `model`, as its authors store it."""
    rng = np.random.default_rng(0)
    shapes = {"fc": (WIDTH, len(READ) * WIDTH), "hidden_norm": (WIDTH,), "norm": (WIDTH,)}
    for i in range(2):
        parts: dict[str, tuple[int, ...]] = {f"self_attn.{name}_proj": (WIDTH, WIDTH) for name in "qkvo"}
        parts |= {"self_attn.q_norm": (32,), "self_attn.k_norm": (32,), "input_layernorm": (WIDTH,)}
        parts |= {"mlp.gate_proj": (96, WIDTH), "mlp.up_proj": (96, WIDTH), "mlp.down_proj": (WIDTH, 96)}
        shapes |= {f"layers.{i}.{name}": shape for name, shape in (parts | {"post_attention_layernorm": (WIDTH,)}).items()}
    arrays = {
        f"{name}.weight": np.ones(shape) if len(shape) == 1 else rng.standard_normal(shape) / 8 for name, shape in shapes.items()
    }
    config = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": WIDTH, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": VOCAB,
        "rope_theta": 10000, "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(READ)},
    }  # fmt: skip
    path = model.parent / f"{model.name}-dflash"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(path / "model.safetensors"), {name: mx.array(array) for name, array in arrays.items()})
    change(path, **changes)
    return path


def planted(directory: Path) -> tuple[Path, Path]:
    """A model that repeats its last token, and a head that guesses the token of which it has read most states.

    Its layers' outputs are the token's embedding, so that the head's difference of two of them is nothing, unless they are of
    other positions.
    """
    model = tiny_model(directory / "model", "qwen3", layers=4, config={"tie_word_embeddings": False})
    loaded: Any = mx.load(str(model / "model.safetensors"))
    silent = {name: mx.zeros_like(array) for name, array in loaded.items() if {"o_proj", "down_proj"} & {*name.split(".")}}
    tokens = np.random.default_rng(1).standard_normal((VOCAB, WIDTH))
    tokens *= 8 / np.linalg.norm(tokens, axis=1, keepdims=True)
    output, tokens[MASK] = tokens.copy(), 0
    news = {"model.embed_tokens.weight": tokens, "lm_head.weight": output, "model.norm.weight": np.ones(WIDTH)}
    change(model, **silent, **{name: mx.array(array) for name, array in news.items()})
    one, none = np.eye(WIDTH), np.zeros((WIDTH, WIDTH))
    own = {"fc.weight": np.concatenate([one, 50 * one, -50 * one], axis=1)}
    for i in range(2):
        parts = {"q_proj": none, "v_proj": one if i == 0 else none, "o_proj": one}
        own |= {f"layers.{i}.self_attn.{name}.weight": array for name, array in parts.items()}
        own[f"layers.{i}.mlp.down_proj.weight"] = np.zeros((WIDTH, 96))
    return model, dflash(model, **{name: mx.array(array) for name, array in own.items()})


def test_drafts_of_a_head_that_is_mostly_right_change_no_token(tmp_path: Path) -> None:
    model, head = planted(tmp_path)
    expected = plain(model)
    with LLM(str(model), prefill_chunk=16, **drafting("dflash", head)) as llm:
        assert answers(llm) == expected
        status = ask(llm, Engine.status)
        assert status.speculation == "dflash" and status.prefix_hits > 0
        assert_weights_as_told(llm, head)
        assert status.draft_tokens > 100 and status.accepted_tokens > 0.8 * status.draft_tokens


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "ranks"), [("pipeline", 3), ("tensor", 2)])
def test_layouts_give_the_tokens_of_plain_decoding_though_a_rank_dies_between_drafts(
    tmp_path: Path, layout: str, ranks: int
) -> None:
    model, head = planted(tmp_path)
    with LLM(str(model), prefill_chunk=16, speculative_method="none") as llm:
        expected = [one.token_ids for one in llm.generate(prompts(), GREEDY)]
    with LLM(str(model), prefill_chunk=16, **drafting("dflash", head), **{f"{layout}_parallel_size": ranks}) as llm:
        assert answers_amid_a_kill(llm) == expected
        assert_weights_as_told(llm, head)
        assert llm.engine.status().accepted_tokens > 0.7 * llm.engine.status().draft_tokens


def test_drafts_are_those_that_mlx_vlm_makes_after_prefix_hits_and_a_restart_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a random head, in each step of an answer."""
    theirs = importlib.import_module("mlx_vlm.speculative.drafters.qwen3_dflash.dflash")
    model = tiny_model(tmp_path / "model", "qwen3", layers=4, dtype="float32")
    path = dflash(model)
    drafts, *others = drafts_after(monkeypatch, model, [{}, {}], **drafting("dflash", path))
    assert len(drafts) > 20 and others == [drafts] * 2

    with LLM(str(model), speculative_method="none") as llm:
        tokens = prompts()[1] + llm.generate([prompts()[1]], GREEDY)[0].token_ids
    files = resolve(str(model))
    stage = load_stage(files, describe(files), range(4), dtype="float32")
    stage.capture(READ)
    states = stage.forward(mx.array([tokens]), stage.make_caches())[..., -len(READ) * WIDTH :]
    drafter = theirs.DFlashDraftModel(theirs.DFlashConfig.from_dict(json.loads((path / "config.json").read_text())))
    arrays: Any = mx.load(str(path / "model.safetensors"))
    drafter.load_weights([(name, one.astype(mx.float32)) for name, one in arrays.items()])
    embedding, output = (stage.modules[name] for name in ("model.embed_tokens", "lm_head"))
    caches, read = drafter.reset(SimpleNamespace(embed_tokens=embedding, lm_head=output)), 0
    for length in sorted(drafts):
        new, read = states[:, read : length - 1], length - 1
        block = drafter.draft_block(tokens[length - 1], new, caches, 1 + len(drafts[length]), partial(mx.argmax, axis=-1))
        assert drafts[length] == block[0].tolist()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fc__weight": mx.zeros((64, 96))}, "has shape (64, 96), where 3 hidden states of the model make (64, 192)"),
        ({"config": {"vocab_size": 1000}}, "has a vocabulary of 1000 tokens, and the model's has 512"),
        ({"config": {"dflash_config": {"target_layer_ids": [0, 9]}}}, "reads the layers (0, 9), and must read some in order"),
        ({"config": {"dflash_config": {"target_layer_ids": [0, 1, 3]}}}, "has mask_token_id None, which is none of the model's"),
        ({"config": {"num_target_layers": 36}}, "was made for a model of 36 layers, and the model has 4"),
        ({"config": {"draft_window_size": 8}}, "has layers with a sliding window, which are not read"),
        ({"config": {"markov_rank": 8}}, "is no DFlash head of the first version"),
        ({"norm__weight": None}, "weight norm.weight is missing"),
        ({"layers__1__mlp__up_proj__weight": None}, "weight layers.1.mlp.up_proj.weight is missing"),
        ({"layers__1__extra__weight": mx.zeros(3)}, "weight layers.1.extra.weight does not fit config.json"),
        ({"fc__scales": mx.zeros(3)}, "is quantised, and heads are read as bfloat16"),
    ],
)
def test_heads_that_do_not_fit_are_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    model = tiny_model(tmp_path / "model", "qwen3", layers=4)
    with pytest.raises(ModelError) as error:
        LLM(str(model), **drafting("dflash", dflash(model, **changes)))
    assert words in error.value.message


def test_heads_are_refused_with_other_models_and_methods(tmp_path: Path) -> None:
    other = tiny_model(tmp_path / "other", "llama", layers=4)
    head = dflash(other)
    with pytest.raises(ModelError, match="DFlash heads for llama are not read, those for qwen3 are"):
        LLM(str(other), **drafting("dflash", head))
    with pytest.raises(ConfigError, match="is a draft head; add --speculative-method dflash"):
        LLM(str(other), draft_model=str(head))
