"""EAGLE-3 heads: the outputs are those of plain decoding, and a head that is right is believed."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from drafting import GREEDY, answers, answers_amid_a_kill, assert_weights_as_told, change, drafting, drafts_after, plain, prompts
from submitted import ask, check
from tandem import LLM
from tandem.checkpoints.resolve import resolve
from tandem.engine.engine import Engine
from tandem.errors import ConfigError, ModelError
from tandem.loading.stage import load_stage
from tandem.models.description import describe
from tandem.models.draft_heads import read_head
from tandem.models.sources import has_mlx_vlm
from tandem.runner.heads.separate import load_head
from tandem.testing import tiny_model

pytestmark = [
    pytest.mark.skipif(not has_mlx_vlm(), reason="mlx-vlm is not installed"),
    pytest.mark.usefixtures("steps_that_cost_alike"),
]
WIDTH, VOCAB, FIRST = 64, 512, 16


def eagle3(model: Path, **changes: Any) -> Path:
    """A random head beside `model`, as SpecForge stores it: its vocabulary begins at FIRST."""
    rng, own = np.random.default_rng(0), VOCAB - FIRST
    inputs = {"q_proj": (64, 2 * WIDTH), "k_proj": (64, 2 * WIDTH), "v_proj": (64, 2 * WIDTH), "o_proj": (WIDTH, 64)}
    shapes = {f"midlayer.self_attn.{name}": shape for name, shape in inputs.items()}
    shapes |= {"midlayer.mlp.gate_proj": (96, WIDTH), "midlayer.mlp.up_proj": (96, WIDTH), "midlayer.mlp.down_proj": (WIDTH, 96)}
    shapes |= {"fc": (WIDTH, 3 * WIDTH), "lm_head": (own, WIDTH)}
    norms = ("norm", "midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm")
    arrays: dict[str, Any] = {f"{name}.weight": rng.standard_normal(shape) / 8 for name, shape in shapes.items()}
    arrays |= {f"{name}.weight": np.ones(WIDTH) for name in norms}
    arrays = {name: mx.array(array).astype(mx.bfloat16) for name, array in arrays.items()}
    arrays |= {"d2t": mx.full(own, FIRST, mx.int64), "t2d": mx.arange(VOCAB) >= FIRST}
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": WIDTH, "intermediate_size": 96,
        "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64, "vocab_size": VOCAB,
        "draft_vocab_size": own, "norm_before_residual": True,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
    }  # fmt: skip
    path = model.parent / f"{model.name}-eagle3"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(path / "model.safetensors"), arrays)
    change(path, **changes)
    return path


def planted(directory: Path, family: str = "llama", right: float = 1.0, *, embedding: bool = False) -> tuple[Path, Path]:
    """A model whose tokens each determine the next one, and a head that predicts it.

    The head's attention replaces what it read before with the token's embedding. It is wrong where the states of the three
    layers, all of the token before, have the mark that part of the tokens carry.
    """
    model = tiny_model(directory / "model", family, layers=4, config={"tie_word_embeddings": False})
    loaded: Any = mx.load(str(model / "model.safetensors"))
    silent = {name: mx.zeros_like(array) for name, array in loaded.items() if {"o_proj", "down_proj"} & {*name.split(".")}}
    rng = np.random.default_rng(1)
    tokens, output = rng.standard_normal((VOCAB, WIDTH)), rng.standard_normal((VOCAB, WIDTH)) / 10
    follower = np.full(VOCAB, FIRST)
    order = FIRST + rng.permutation(VOCAB - FIRST)
    follower[order] = np.roll(order, -1)
    output[follower[order]] = tokens[order]
    output[:, 0], tokens[:, 0] = 0, 4 * (rng.random(VOCAB) >= right)
    place = {name.rpartition("embed_tokens")[0] for name in loaded if "embed_tokens" in name}.pop()
    news = {f"{place}embed_tokens.weight": tokens, "lm_head.weight": output, f"{place}norm.weight": np.ones(WIDTH)}
    change(model, **silent, **{name: mx.array(array) for name, array in news.items()})
    fc, own, none = np.zeros((WIDTH, 3 * WIDTH)), np.diag([0] + [1] * (WIDTH - 1)), np.zeros((WIDTH, WIDTH))
    fc[0, ::WIDTH] = 1, -1, 1
    wrong = -np.eye(WIDTH)
    wrong[1:, 0] = tokens[FIRST, 1:]
    attention = {"q_proj": (8 * own, none), "k_proj": (own, none), "v_proj": (own, wrong)}
    head = {f"midlayer.self_attn.{name}.weight": np.concatenate(parts, axis=1) for name, parts in attention.items()}
    head |= {
        "midlayer.self_attn.o_proj.weight": np.eye(WIDTH),
        "midlayer.mlp.down_proj.weight": np.zeros((WIDTH, 96)),
        "fc.weight": fc,
    }
    head |= {"lm_head.weight": output[FIRST:]} | ({"embed_tokens.weight": tokens} if embedding else {})
    return model, eagle3(model, **{name: mx.array(array) for name, array in head.items()})


@pytest.mark.parametrize(("family", "embedding"), [("llama", False), ("qwen3", True)])
def test_a_head_that_is_right_is_always_accepted_after_prefix_hits_too(tmp_path: Path, family: str, embedding: bool) -> None:
    model, head = planted(tmp_path, family, embedding=embedding)
    expected = plain(model)
    with LLM(str(model), prefill_chunk=16, **drafting("eagle3", head)) as llm:
        assert answers(llm) == expected
        status = ask(llm, Engine.status)
        assert status.speculation == "eagle3" and status.prefix_hits > 0
        assert_weights_as_told(llm, head)
        assert 150 < status.draft_tokens == status.accepted_tokens


def test_a_head_that_is_never_right_changes_nothing_when_preempted_nor_with_positions_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.speculation.proposers.TRY_AGAIN", 8)
    monkeypatch.setattr("tandem.runner.drafter.MOST_STATES", 5)  # asked again, it lacks positions
    model = tiny_model(tmp_path / "model", "qwen3", layers=4, config={"tie_word_embeddings": True})
    head, expected = eagle3(model), plain(model)
    with LLM(str(model), prefill_chunk=16, kv_tokens=256, **drafting("eagle3", head)) as llm:
        assert answers(llm) == expected
        check(llm)
        status = ask(llm, Engine.status)
        assert llm.engine.scheduler.batches.preemptions > 0
        assert status.draft_tokens > 0 and status.accepted_tokens < 0.1 * status.draft_tokens


def test_drafts_after_a_prefix_hit_are_those_after_the_whole_prompt_and_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(tmp_path / "model", layers=4)
    first, *others = drafts_after(monkeypatch, model, [{}, {}], **drafting("eagle3", eagle3(model)))
    assert first and others == [first] * 2


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layout"), [("llama", "pipeline"), ("qwen3", "tensor")])
def test_layouts_give_the_tokens_of_plain_decoding_though_a_rank_dies_between_drafts(
    tmp_path: Path, family: str, layout: str
) -> None:
    model, head = planted(tmp_path, family, right=0.7)
    with LLM(str(model), prefill_chunk=16, speculative_method="none") as llm:
        expected = [one.token_ids for one in llm.generate(prompts(), GREEDY)]
    ranks = {"pipeline": 3, "tensor": 2}[layout]
    with LLM(str(model), prefill_chunk=16, **drafting("eagle3", head), **{f"{layout}_parallel_size": ranks}) as llm:
        assert answers_amid_a_kill(llm) == expected
        assert_weights_as_told(llm, head)
        assert 0.4 < llm.engine.status().accepted_tokens / llm.engine.status().draft_tokens < 1


def test_drafts_are_those_that_mlx_vlm_makes(tmp_path: Path) -> None:
    """Of a random head after a prompt that comes in chunks, and again after two of its drafts and another token."""
    theirs = importlib.import_module("mlx_vlm.speculative.drafters.eagle3.eagle3")
    model = tiny_model(tmp_path / "model", "llama", layers=4)
    files, path = resolve(str(model)), eagle3(model)
    description, own_files = describe(files), resolve(str(path))
    stage = load_stage(files, description, range(4), dtype="float32")
    stage.capture(read_head("eagle3", own_files, description).layers)
    head, embedding = load_head("eagle3", own_files, files, stage, dequantize=False), stage.modules["model.embed_tokens"]

    config = json.loads((path / "config.json").read_text())
    words = {"model_type": "eagle3", "transformer_layer_config": config, "target_hidden_size": WIDTH}
    drafter = theirs.Eagle3DraftModel(theirs.Eagle3Config.from_dict(config | words))
    arrays: Any = mx.load(str(path / "model.safetensors"))
    named = {name.replace("midlayer", "layers.0"): array for name, array in arrays.items()}
    named |= {"embed_tokens.weight": embedding.weight}
    drafter.load_weights(
        [(name, one if name == "d2t" else one.astype(mx.float32)) for name, one in drafter.sanitize(named).items()]
    )
    drafter.reset(SimpleNamespace(embed_tokens=embedding))

    def drafts(tokens: mx.array, states: mx.array) -> list[int]:
        hidden, found = head.join(tokens, states, own)[:, -1:], list[mx.array]()
        for _ in range(4):
            found.append(head.tokens(mx.argmax(head.head(hidden)[:, -1:], axis=-1)))
            hidden = head.join(found[-1], hidden, own) if len(found) < 4 else hidden
        own[0].trim(3)
        return [one.item() for one in found]

    prompt, caches, own = mx.array([prompts()[1]]), stage.make_caches(), head.make_caches()
    states = [head.states(stage.forward(part, caches)) for part in (prompt[:, :30], prompt[:, 30:])]
    token, rest = mx.array([[77]]), mx.concatenate([prompt[:, 31:], mx.array([[77]])], axis=1)
    drafter.prefill_from_target_hidden(prompt, mx.concatenate(states, axis=1), 77, None, greedy=True)
    expected = drafter.draft_block(77, None, None, 5, None, greedy=True)
    head.join(prompt[:, 1:31], states[0], own)
    assert drafts(rest, states[1]) == expected[0].tolist()

    verified = head.states(stage.forward(mx.concatenate([token, expected], axis=1), caches))
    drafter.accept_verified_tokens(verified, expected, 2, [*expected[0, :2].tolist(), 99], None, greedy=True)
    more = mx.concatenate([expected[:, :2], mx.array([[99]])], axis=1)
    assert drafts(more, verified[:, :3]) == drafter.draft_block(99, None, None, 5, None, greedy=True)[0].tolist()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fc__weight": mx.zeros((64, 96))}, "has shape (64, 96), where 3 hidden states of the model make (64, 192)"),
        ({"t2d": mx.ones(640)}, "has a vocabulary of 640 tokens, and the model's has 512"),
        ({"config": {"vocab_size": 1000}}, "has a vocabulary of 1000 tokens, and the model's has 512"),
        ({"d2t": None}, "has 496 tokens of its own, and no map d2t of as many to the model's"),
        ({"d2t": mx.full(496, 17, mx.int64)}, "d2t does not map its tokens to those of the model in t2d"),
        ({"norm__weight": None}, "weight norm.weight is missing"),
        ({"midlayer__mlp__up_proj__weight": None}, "weight layers.0.mlp.up_proj.weight is missing"),
        ({"midlayer__extra__weight": mx.zeros(3)}, "weight layers.0.extra.weight does not fit config.json"),
        ({"fc__scales": mx.zeros(3)}, "is quantised, and heads are read as bfloat16"),
        ({"config": {"speculators_config": {"verifier": {"architectures": ["Qwen3"]}}}}, "was made for Qwen3, and"),
        ({"config": {"eagle_config": {}}}, "reads the layers (1, 1, 0), and must read 3 in order of the model's 4"),
        ({"config": {"eagle_aux_hidden_state_layer_ids": ["a"], "eagle_config": None}}, "reads the layers (), and must read 3"),
        ({"config": {"architectures": ["LlamaForCausalLM"]}}, "is no EAGLE-3 head, as its config.json tells"),
    ],
)  # fmt: skip
def test_heads_that_do_not_fit_are_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    model = tiny_model(tmp_path / "model", layers=4)
    head = eagle3(model, **changes)
    with pytest.raises(ModelError) as error:
        LLM(str(model), **drafting("eagle3", head))
    assert words in error.value.message


def test_heads_are_refused_with_other_models_methods_and_tokenizers(tmp_path: Path) -> None:
    model, other = tiny_model(tmp_path / "model", layers=4), tiny_model(tmp_path / "other", "qwen2", layers=4)
    head = eagle3(model)
    with pytest.raises(ModelError, match="heads for qwen2 are not read, those for llama and qwen3 are"):
        LLM(str(other), **drafting("eagle3", head))
    with pytest.raises(ConfigError, match="is a draft head; add --speculative-method eagle3"):
        LLM(str(model), draft_model=str(head))
    with pytest.raises(ConfigError, match="needs --draft-model MODEL, the head's directory"):
        LLM(str(model), speculative_method="eagle3")
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    swapped = {"a": "b", "b": "a"}
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {swapped.get(word, word): number for word, number in vocabulary.items()}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (head / name).write_text((model / name).read_text())
    (head / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="has another tokenizer than model: token"):
        LLM(str(model), **drafting("eagle3", head))
