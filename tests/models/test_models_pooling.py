"""Embeddings: which pooling a model's files ask for, and the hidden states that every family hands over."""

from __future__ import annotations

import json
import struct

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from tandem.checkpoints.resolve import resolve
from tandem.errors import BrokenModel
from tandem.loading.shard_modules import at, put
from tandem.loading.stage import load_stage
from tandem.models.description import describe
from tandem.models.families.table import family_of
from tandem.models.pooling import pooling_of, unit_vector
from tandem.testing import TINY, tiny_model
from tandem.text.tokenizer import load_tokenizer
from their_models import load_theirs

TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
DENSE = {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}


def lay(path, modules, **modes):
    if modules is not None:
        (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 8, **modes}))


@pytest.mark.parametrize(
    ("modules", "modes", "expected"),
    [
        ([TRANSFORMER, POOLING, NORMALIZE], {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, "last"),
        ([TRANSFORMER, POOLING], {"pooling_mode_mean_tokens": True}, "mean"),
        (None, {"pooling_mode_mean_tokens": True}, "mean"),
        ([TRANSFORMER, POOLING], {"pooling_mode_cls_token": True}, None),
        ([TRANSFORMER, POOLING], {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": True}, None),
        ([TRANSFORMER, POOLING, DENSE], {"pooling_mode_mean_tokens": True}, None),
    ],
)
def test_what_the_files_ask_for(tmp_path, modules, modes, expected):
    lay(tmp_path, modules, **modes)
    assert pooling_of(tmp_path) == expected
    assert pooling_of(tmp_path, "mean") == "mean"


def test_without_files_it_is_the_last_token_and_broken_ones_are_named(tmp_path):
    assert pooling_of(tmp_path) == "last"
    (tmp_path / "modules.json").write_text("{}")
    with pytest.raises(BrokenModel, match=r"modules\.json: must hold a JSON array"):
        pooling_of(tmp_path)
    (tmp_path / "modules.json").write_text("[")
    with pytest.raises(BrokenModel, match=r"modules\.json: is not valid JSON"):
        pooling_of(tmp_path)


def test_a_text_to_embed_ends_with_eos_where_the_model_wants_it(tmp_path):
    files = resolve(str(tiny_model(tmp_path)))
    assert load_tokenizer(files).encode_closed("hi") == load_tokenizer(files).encode("hi")
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "add_eos_token": True}))
    tokenizer = load_tokenizer(files)
    assert tokenizer.encode_closed("hi") == [*tokenizer.encode("hi"), tokenizer.eos_token_ids[0]]


def test_unit_vectors():
    vector = struct.pack("<4f", 3.0, 4.0, 0.0, 12.0)
    assert unit_vector(vector).tolist() == pytest.approx([3 / 13, 4 / 13, 0, 12 / 13])
    assert unit_vector(vector, 2).tolist() == pytest.approx([0.6, 0.8])
    assert unit_vector(bytes(16)).tolist() == [0.0] * 4


FINAL_NORMS = {
    "gemma3n": "model.language_model.norm",
    "gpt2": "model.ln_f",
    "gpt_bigcode": "transformer.ln_f",
    "idefics3": "language_model.norm",
    "lille-130m": "transformer.norm",
    "phi-msft": "lm_head.ln",
    "phixtral": "lm_head.ln",
    "plamo": "model.norm",
    "plamo2": "model.norm",
    "plamo3": "model.norm",
    "smolvlm": "language_model.norm",
}
"""Where it does not end what holds the layers."""
SCALED = {"minicpm": 32 / 64, "minicpm3": 32 / 64}
"""What states are multiplied by before the head: alike for all, so that unit vectors are the same."""


@pytest.mark.parametrize("family", sorted(TINY))
def test_final_states_are_those_of_mlx_lm(family, tmp_path):
    path = tiny_model(tmp_path, family, dtype="float32")
    files = resolve(str(path))
    description = describe(files)
    stage = load_stage(files, description, range(description.num_layers), dtype="float32")
    model, logits, make_caches, _ = load_theirs(path)
    tokens = mx.array([[5, 9, 300, 7, 12, 450]], mx.int32)
    inner = at(model, family_of(family).layers.rpartition(".")[0])
    norm = FINAL_NORMS.get(family)
    want = output_of(norm, model, tokens, logits) if norm else inner(tokens, cache=make_caches(model))
    got = stage.final(stage.forward(tokens, stage.make_caches()))
    assert got.shape == (1, 6, description.hidden_size)
    if family == "gpt_neox":  # whose head is within
        got = inner.embed_out(got)
    assert mx.allclose(got, want * SCALED.get(family, 1), atol=1e-5).item()


@pytest.mark.parametrize("family", ["seed_oss", "llama4_text"])
def test_final_states_of_a_model_that_multiplies_by_its_embedding(family, tmp_path):
    path = tiny_model(tmp_path, family, dtype="float32", config={"tie_word_embeddings": True})
    files = resolve(str(path))
    description = describe(files)
    stage = load_stage(files, description, range(description.num_layers), dtype="float32")
    model, _ = load_model(path)
    tokens = mx.array([[5, 9, 300]], mx.int32)
    got = stage.final(stage.forward(tokens, stage.make_caches()))
    assert mx.allclose(got, output_of("model.norm", model, tokens), atol=1e-5).item()
    assert stage.head(stage.forward(tokens, stage.make_caches())).shape == (1, 3, description.vocab_size)


def output_of(name, model, tokens, call=None):
    """What a module gives in mlx-lm's own pass."""
    found, module = [], at(model, name)

    def noted(x):
        found.append(module(x))
        return found[-1]

    put(model, name, noted)
    (call or model)(tokens, cache=make_prompt_cache(model))
    [states] = found
    return states
