"""Gemma 4's assistants: the outputs are those of plain decoding, and an assistant that is right is believed."""

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
from mlx.utils import tree_flatten

from drafting import GREEDY, answers, answers_amid_a_kill, assert_weights_as_told, change, drafting, drafts_after, plain, prompts
from submitted import ask, check
from tandem import LLM
from tandem.engine.engine import Engine
from tandem.errors import ConfigError, LayoutError, ModelError
from tandem.models.sources import has_mlx_vlm
from tandem.testing import tiny_model

pytestmark = [
    pytest.mark.skipif(not has_mlx_vlm(), reason="mlx-vlm is not installed"),
    pytest.mark.usefixtures("steps_that_cost_alike"),
]
WIDTH, VOCAB = 64, 512
KINDS = ["sliding_attention", "sliding_attention", "full_attention"]


def theirs() -> Any:
    package = "mlx_vlm.speculative.drafters.gemma4_assistant"  # by its modules, as loading leaves packages empty
    config = importlib.import_module(f"{package}.config")
    model = importlib.import_module(f"{package}.gemma4_assistant").Gemma4AssistantDraftModel
    return SimpleNamespace(Model=model, ModelConfig=config.Gemma4AssistantConfig, TextConfig=config.TextConfig)


def assistant(model: Path, *, ordered: bool = False, **changes: Any) -> Path:
    """A random assistant beside `model`, as its authors store it; `ordered` as those of small models, with clusters of tokens."""
    config = json.loads((model / "config.json").read_text())
    text = {**config, **config.get("text_config", {})}
    shared = ("num_key_value_heads", "num_global_key_value_heads", "head_dim", "global_head_dim", "attention_k_eq_v")
    own = {name: text[name] for name in (*shared, "sliding_window", "vocab_size") if name in text}
    own |= {
        "model_type": "gemma4_text", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "layer_types": KINDS,
        "num_attention_heads": 4, "num_kv_shared_layers": 3, "hidden_size_per_layer_input": 0,
    }  # fmt: skip
    config = {
        "model_type": "gemma4_assistant", "backbone_hidden_size": WIDTH, "use_ordered_embeddings": ordered,
        "num_centroids": 32, "centroid_intermediate_top_k": 4, "tie_word_embeddings": True, "text_config": own,
    }  # fmt: skip
    rng, arrays = np.random.default_rng(0), {}
    for name, array in tree_flatten(theirs().Model(theirs().ModelConfig.from_dict(config)).parameters()):
        arrays[name] = mx.array(np.ones(array.shape) if array.ndim == 1 else rng.standard_normal(array.shape) / 4)
    if ordered:
        arrays["masked_embedding.token_ordering"] = mx.array(rng.permutation(VOCAB), mx.int64)
    path = model.parent / f"{model.name}-assistant"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(path / "model.safetensors"), arrays)
    change(path, **changes)
    return path


def gemma(directory: Path, family: str = "gemma4", **changes: Any) -> Path:
    """A model of six layers, of which the last two share keys and values; of `gemma4_text` none does."""
    rope: dict[str, Any] = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    rope["full_attention"] = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    config = {"rope_parameters": rope, "layer_types": [*rope] * 3, "final_logit_softcapping": 60.0}
    config |= {"num_kv_shared_layers": 2} if family == "gemma4" else {}
    model = tiny_model(directory / "model", family, layers=6, config=config)
    change(model, **changes)
    return model


def planted(directory: Path) -> tuple[Path, Path]:
    """A model that repeats its last token, and an assistant that guesses this."""
    model = gemma(directory)
    loaded: Any = mx.load(str(model / "model.safetensors"))
    silent = {"o_proj", "down_proj", "per_layer_projection"}
    news = {name: mx.zeros_like(array) for name, array in loaded.items() if silent & {*name.split(".")}}
    place = next(name for name in loaded if name.endswith("embed_tokens.weight"))
    tokens = np.random.default_rng(1).standard_normal((VOCAB, WIDTH)) * (np.arange(WIDTH) < 32)
    tokens *= 2 / np.linalg.norm(tokens, axis=1, keepdims=True)
    ones = {name: mx.ones_like(array) for name, array in loaded.items() if name.endswith(("layer_scalar", "model.norm.weight"))}
    change(model, **news, **ones, **{place: mx.array(tokens)})
    own = {"pre_projection.weight": np.eye(32, 2 * WIDTH), "model.embed_tokens.weight": tokens[:, :32]}
    path = assistant(model, **{name: mx.array(array) for name, array in own.items()})
    loaded = mx.load(str(path / "model.safetensors"))
    change(path, **{name: mx.zeros_like(array) for name, array in loaded.items() if silent & {*name.split(".")}})
    return model, path


def test_drafts_of_an_assistant_that_is_right_change_no_token(tmp_path: Path) -> None:
    model, head = planted(tmp_path)
    expected = plain(model)
    with LLM(str(model), prefill_chunk=16, **drafting("mtp", head)) as llm:
        assert answers(llm) == expected
        status = ask(llm, Engine.status)
        assert status.speculation == "mtp" and status.prefix_hits > 0
        assert_weights_as_told(llm, head)
        assert status.draft_tokens > 100 and status.accepted_tokens > 0.8 * status.draft_tokens


@pytest.mark.parametrize("ordered", [False, True])
def test_drafts_of_an_assistant_that_is_wrong_change_no_token_amid_preemptions(tmp_path: Path, ordered: bool) -> None:
    model = gemma(tmp_path, "gemma4_text")
    head, expected = assistant(model, ordered=ordered), plain(model)
    with LLM(str(model), prefill_chunk=16, kv_tokens=256, **drafting("mtp", head)) as llm:
        assert answers(llm) == expected
        check(llm)
        status = ask(llm, Engine.status)
        assert llm.engine.scheduler.batches.preemptions > 0
        assert status.draft_tokens > 0 and status.accepted_tokens < 0.1 * status.draft_tokens


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 3])
def test_stages_give_the_tokens_of_plain_decoding_though_a_rank_dies_between_drafts(tmp_path: Path, stages: int) -> None:
    model, head = planted(tmp_path)
    with LLM(str(model), prefill_chunk=16, speculative_method="none") as llm:
        expected = [one.token_ids for one in llm.generate(prompts(), GREEDY)]
    with LLM(str(model), prefill_chunk=16, pipeline_parallel_size=stages, **drafting("mtp", head)) as llm:
        assert answers_amid_a_kill(llm) == expected
        assert_weights_as_told(llm, head)
        assert llm.engine.status().accepted_tokens > 0.7 * llm.engine.status().draft_tokens


@pytest.mark.parametrize(("family", "ordered"), [("gemma4", True), ("gemma4_text", False)])
def test_drafts_are_those_that_mlx_vlm_makes_after_prefix_hits_and_a_restart_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, ordered: bool
) -> None:
    """Of a random assistant, in each step of an answer."""
    model = gemma(tmp_path, family)
    path = assistant(model, ordered=ordered)
    drafts, *others = drafts_after(monkeypatch, model, [{}, {}], dtype="float32", **drafting("mtp", path))
    assert len(drafts) > 20 and others == [drafts] * 2

    config = json.loads((model / "config.json").read_text())
    language = importlib.import_module("mlx_vlm.models.gemma4.language")
    target = language.LanguageModel(theirs().TextConfig.from_dict({**config, **config.get("text_config", {})}))
    drafter = theirs().Model(theirs().ModelConfig.from_dict(json.loads((path / "config.json").read_text())))
    for whole, files in ((target, model), (drafter, path)):
        arrays: Any = mx.load(str(files / "model.safetensors"))
        arrays = {name.removeprefix("language_model."): array for name, array in arrays.items()}
        numbers = {name: one if name.endswith("ordering") else one.astype(mx.float32) for name, one in arrays.items()}
        whole.load_weights([*drafter.sanitize(numbers).items()])
    expected: dict[int, list[int]] = {}
    draft_block = drafter.draft_block

    def noted(token: int, *rest: Any, **options: Any) -> mx.array:
        made: mx.array = draft_block(token, *rest, **options)
        expected[drafter._kv_offset + 1] = made[0].tolist()
        return made

    drafter.draft_block = noted
    prompt, caches, pick = mx.array([prompts()[1]]), target.make_cache(), partial(mx.argmax, axis=-1)
    read = target(prompt, cache=caches, return_hidden=True, return_shared_kv=True)
    rounds = importlib.import_module("mlx_vlm.speculative.mtp")._mtp_rounds(
        target, drafter, caches, read.hidden_states[-1], read.shared_kv_states, prompt_tokens=prompt, max_tokens=40,
        first_bonus=pick(read.logits[0, -1]).item(), sampler=pick, draft_block_size=4, greedy_sampling=True,
    )  # fmt: skip
    assert len(list(rounds)) == 39 and expected.keys() >= drafts.keys()
    assert all(made[: len(expected[length])] == expected[length][: len(made)] for length, made in drafts.items())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"config": {"backbone_hidden_size": 128}}, "its backbone_hidden_size is 128, and the model's hidden size is 64"),
        ({"config": {"text_config": {"vocab_size": VOCAB}}}, "config.json: layer_types is missing"),
        ({"config": {"text_config": {"vocab_size": VOCAB, "layer_types": KINDS * 2}}}, "has 3 layers, and layer_types of its"),
        ({"config": {"model_type": "gemma4"}}, "is no assistant head, as its config.json tells"),
        ({"model__embed_tokens__weight": mx.zeros((640, 32))}, "has a vocabulary of 640 tokens, and the model's has 512"),
        ({"model__layers__2__mlp__up_proj__weight": None}, "weight layers.2.mlp.up_proj.weight is missing"),
        ({"post_projection__weight": None}, "weight post_projection.weight is missing"),
        ({"pre_projection__scales": mx.zeros(3)}, "is quantised, and heads are read as bfloat16"),
    ],
)
def test_assistants_that_do_not_fit_are_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    model = gemma(tmp_path)
    with pytest.raises(ModelError) as error:
        LLM(str(model), **drafting("mtp", assistant(model, **changes)))
    assert words in error.value.message


@pytest.mark.parametrize(
    "changes",
    [
        {"masked_embedding__token_ordering": mx.arange(VOCAB) + 10**8},
        {"config": {"centroid_intermediate_top_k": 99}},
        {"config": {"num_centroids": 33}, "masked_embedding__centroids__weight": mx.zeros((33, 32))},
    ],
)
def test_assistants_whose_clusters_do_not_fit_are_refused_at_the_start(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = gemma(tmp_path)
    head = assistant(model, ordered=True)
    change(head, **changes)
    with pytest.raises(ModelError, match="does not fit the model's keys and values"):
        LLM(str(model), **drafting("mtp", head))


def test_assistants_are_refused_with_other_models_methods_and_layouts(tmp_path: Path) -> None:
    model, other = gemma(tmp_path), tiny_model(tmp_path / "other", "llama")
    head, sized = assistant(model), assistant(gemma(tmp_path / "sized", config={}))
    with pytest.raises(ModelError, match="assistant heads for llama are not read, those for gemma4 and gemma4_text and"):
        LLM(str(other), **drafting("mtp", head))
    with pytest.raises(ConfigError, match="is a draft head; add --speculative-method mtp"):
        LLM(str(model), draft_model=str(head))
    with pytest.raises(LayoutError, match="of which each of the last stage's 2 ranks has a part; give that stage one rank"):
        LLM(str(model), tensor_parallel_size=2, **drafting("mtp", head))
    with pytest.raises(LayoutError, match="no stage can begin at layer 5, since layers 2 to 5 share keys and values"):
        LLM(str(model), layer_split=(5, 1), pipeline_parallel_size=2, **drafting("mtp", head))
    text = json.loads((sized / "config.json").read_text())["text_config"]
    change(sized, config={"text_config": {**text, "head_dim": 8}})
    with pytest.raises(ModelError, match=r"its layers read \[32, 32, 128\] elements of keys and values a token"):
        LLM(str(model), **drafting("mtp", sized))
