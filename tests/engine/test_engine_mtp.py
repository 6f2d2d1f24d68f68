"""Draft heads of checkpoints: the outputs are those of plain decoding, and a head that is right is believed."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from drafting import GREEDY, answers, drafts_after, plain, prompts
from planted_head import add_mtp_head
from submitted import Killer, ask, check, submitted
from tandem import LLM
from tandem.checkpoints.resolve import resolve
from tandem.engine.engine import Engine
from tandem.errors import ConfigError, ModelError
from tandem.loading.stage import load_stage
from tandem.models.description import describe
from tandem.models.footprint import rank_position, rank_weights
from tandem.protocol.request import EngineRequest
from tandem.runner.heads.mtp import load_mtp_head
from tandem.testing import tiny_config, tiny_model

pytestmark = pytest.mark.usefixtures("steps_that_cost_alike")
MTP = {"speculative_config": '{"method": "mtp", "num_speculative_tokens": 4}'}
NEMOTRON = {
    "hybrid_override_pattern": ["M", "E", "*", "E"], "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 64, "n_group": 1, "topk_group": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 1.5, "mtp_hybrid_override_pattern": "*E", "num_nextn_predict_layers": 1,
}  # fmt: skip


def model(directory: Path, family: str = "glm4_moe", right: float | None = None, **options: Any) -> Path:
    known: dict[str, Any] = {"layers": 4, "config": NEMOTRON} if family == "nemotron_h" else {"layers": 2}
    return add_mtp_head(tiny_model(directory, family, **known, **options), right=right)


def assert_weights_as_told(llm: LLM) -> None:
    """The planner's and the ranks' estimates before loading are what the ranks hold then, the head included."""
    layout = llm.engine.layout
    held = [rank.weight_bytes for rank in ask(llm, Engine.status).ranks]
    assert held == pytest.approx([rank_weights(layout.description, spec, None, gpu=False) for spec in layout.ranks], rel=0.01)
    position = sum(ready.kv_bytes_per_token for ready in llm.engine.rank_group.ready)
    assert position == sum(rank_position(layout.description, spec, None, gpu=False) for spec in layout.ranks)


def change(directory: Path, changed: dict[str, mx.array | None]) -> None:
    """Replace weights of a model, or remove them."""
    path = directory / "model.safetensors"
    arrays: Any = mx.load(str(path))
    mx.save_safetensors(str(path), {name: one for name, one in {**arrays, **changed}.items() if one is not None})


@pytest.mark.parametrize("family", ["deepseek_v3", "glm_moe_dsa", "qwen3_next", "nemotron_h"])
def test_a_head_that_is_right_is_always_accepted_after_prefix_hits_too(tmp_path: Path, family: str) -> None:
    directory = model(tmp_path, family, right=1.0)
    expected = plain(directory)
    with LLM(str(directory), prefill_chunk=16, **MTP) as llm:
        assert answers(llm) == expected
        status = ask(llm, Engine.status)
        assert status.speculation == "mtp" and status.prefix_hits > 0
        assert_weights_as_told(llm)
        assert 150 < status.draft_tokens == status.accepted_tokens


def test_a_head_that_is_never_right_changes_nothing_when_preempted_nor_with_positions_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.speculation.proposers.TRY_AGAIN", 8)
    monkeypatch.setattr("tandem.runner.drafter.MOST_STATES", 5)  # asked again, it lacks positions
    directory = add_mtp_head(tiny_model(tmp_path, "qwen3_5", layers=2, config={"tie_word_embeddings": True}))
    expected = plain(directory)
    with LLM(str(directory), prefill_chunk=16, kv_tokens=256, **MTP) as llm:
        assert [answers(llm) for _ in range(2)] == [expected] * 2
        check(llm)
        status = ask(llm, Engine.status)
        assert llm.engine.scheduler.batches.preemptions > 0
        assert status.draft_tokens > 0 and status.accepted_tokens < 0.1 * status.draft_tokens


@pytest.mark.parametrize("family", ["glm_moe_dsa", "qwen3_5", "nemotron_h"])
def test_drafts_after_a_restart_are_those_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    first, *others = drafts_after(monkeypatch, model(tmp_path / "model", family), [{}, {}], **MTP)
    assert first and others == [first] * 2


def test_a_head_whose_kv_on_disk_is_damaged_starts_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory, found, damaged = str(model(tmp_path / "model", right=1.0)), [], list[Path]()
    for _ in range(2):
        with LLM(directory, prefill_chunk=16, kv_disk=str(tmp_path / "kv"), **MTP) as llm:
            found.append(llm.generate([prompts()[1]], GREEDY)[0].token_ids)
            status = ask(llm, Engine.status)
            assert 0 < status.draft_tokens == status.accepted_tokens
        for part in (tmp_path / "kv").rglob("*.2-3.0-1.kv"):
            part.write_bytes(part.read_bytes()[:-1])
            damaged.append(part)
    assert not damaged[0].exists() and len(damaged) == 1
    assert f"KV of the draft head on disk cannot be used: {damaged[0].name} is damaged" in caplog.text
    assert found[0] == found[1] and status.prefix_hits == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layout", "size"),
    [("glm4_moe_lite", "pipeline", 2), ("nemotron_h", "pipeline", 3), ("qwen3_5_moe", "tensor", 2), ("nemotron_h", "tensor", 2)],
)
def test_layouts_give_the_tokens_of_plain_decoding_though_a_rank_dies_between_drafts(
    tmp_path: Path, family: str, layout: str, size: int
) -> None:
    directory = model(tmp_path, family, right=0.7)
    with LLM(str(directory), prefill_chunk=16, speculative_method="none") as llm:
        expected = [one.token_ids for one in llm.generate(prompts(), GREEDY)]
    with LLM(str(directory), prefill_chunk=16, **MTP, **{f"{layout}_parallel_size": size}) as llm:
        requests = [EngineRequest(request_id=str(i), prompt=prompt, params=GREEDY) for i, prompt in enumerate(prompts())]
        tokens: dict[str, list[int]] = {}
        for message in submitted(llm, requests, Killer(llm, lambda _: llm.engine.status().accepted_tokens > 20)):
            tokens.setdefault(message.request_id, []).extend(message.tokens)
        assert llm.engine.restarts == 1
        assert_weights_as_told(llm)
        assert [tokens[str(i)] for i in range(len(expected))] == expected
        assert 0.4 < llm.engine.status().accepted_tokens / llm.engine.status().draft_tokens < 1


def test_auto_takes_a_head_that_can_be_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = model(tmp_path, right=1.0)
    with LLM(str(directory)) as llm:
        assert ask(llm, Engine.status).speculation == "mtp"
    change(directory, {"model.layers.2.shared_head.norm.weight": None})
    with caplog.at_level(logging.WARNING), LLM(str(directory)) as llm:
        assert ask(llm, Engine.status).speculation == "off"
    assert "The draft head is not used; tokens are decoded without guesses" in caplog.text


def test_auto_leaves_out_a_head_that_alone_is_quantised_where_config_json_has_no_settings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory, name = model(tmp_path), "model.layers.2.eh_proj"
    arrays: Any = mx.load(str(directory / "model.safetensors"))
    packed, scales, biases = mx.quantize(arrays[f"{name}.weight"], 32, 8)
    change(directory, {f"{name}.weight": packed, f"{name}.scales": scales, f"{name}.biases": biases})
    with caplog.at_level(logging.WARNING), LLM(str(directory)) as llm:
        assert ask(llm, Engine.status).speculation == "off"
    words = f"has {name}.scales, so its draft head is quantised, but config.json has no 'quantization'; add it"
    assert words in caplog.text
    with pytest.raises(ModelError, match=words):
        LLM(str(directory), **MTP)


def as_published(directory: Path) -> dict[str, mx.array]:
    """Store a model of `tiny_model` as its authors store it: norms around zero, experts of the head one by one."""
    norms = ("layernorm.weight", "q_norm.weight", "k_norm.weight", "model.norm.weight")
    arrays: dict[str, mx.array] = {}
    for name, array in mx.load(str(directory / "model.safetensors")).items():  # type: ignore[union-attr]
        head = name.startswith("mtp.")
        if name.endswith(norms) or (head and array.ndim == 1):
            array = array - 1
        before, found, projection = name.partition("switch_mlp.")
        if head and found:
            arrays |= {f"{before}experts.{i}.{projection}": one for i, one in enumerate(array)}
        else:
            arrays[name] = array.moveaxis(2, 1) if "conv1d" in name else array
    mx.save_safetensors(str(directory / "model.safetensors"), arrays)
    return arrays


def test_a_nemotron_head_is_read_as_published_and_drafts_what_mlx_vlm_drafts(tmp_path: Path) -> None:
    theirs = pytest.importorskip("mlx_vlm.speculative.drafters.nemotron_h_mtp.nemotron_h_mtp")
    directory = model(tmp_path, "nemotron_h", dtype="float32")
    arrays: dict[str, mx.array] = {}
    for name, array in mx.load(str(directory / "model.safetensors")).items():  # type: ignore[union-attr]
        before, found, projection = name.partition("switch_mlp.")
        kept = {"fc1.weight": "up_proj.weight", "fc2.weight": "down_proj.weight"}.get(projection)
        arrays |= {f"{before}experts.{i}.{kept}": one for i, one in enumerate(array)} if found else {name: array}
    mx.save_safetensors(str(directory / "model.safetensors"), arrays)
    files = resolve(str(directory))
    stage = load_stage(files, describe(files), range(4), dtype="float32")
    head = load_mtp_head(files, describe(files), stage, dequantize=False)

    config = json.loads((directory / "config.json").read_text())
    drafter = theirs.NemotronHMTPDraftModel(theirs.NemotronHMTPConfig(text_config=config))
    own = {name.removeprefix("mtp."): array for name, array in arrays.items() if name.startswith("mtp.")}
    drafter.load_weights(list(drafter.sanitize(own).items()), strict=True)
    drafter._input_embed, drafter._lm_head_fn = (stage.modules[path] for path in ("backbone.embeddings", "lm_head"))
    drafter._cache = drafter.make_cache()
    states = mx.random.normal((1, 5, config["hidden_size"]), key=mx.random.key(1))
    drafter.prefill_from_target_hidden(mx.array([[7, 8, 9, 300, 4]]), states, 12, None, greedy=True)
    expected = drafter.draft_block(12, states, None, 9, None, greedy=True)[0].tolist()
    caches, found = head.make_caches(), list[int]()
    hidden = head.join(mx.array([[8, 9, 300, 4, 12]]), states, caches)[:, -1:]
    while len(found) < 8:
        found.append(int(mx.argmax(head.head(hidden)).item()))
        hidden = head.join(mx.array([found[-1:]]), hidden, caches)
    assert found == expected and len(set(found)) > 2


def test_a_head_is_read_as_published_and_computes_what_mlx_vlm_computes(tmp_path: Path) -> None:
    theirs = pytest.importorskip("mlx_vlm.speculative.drafters.qwen3_5_mtp.qwen3_5_mtp")
    rope = {"type": "default", "mrope_section": [2, 1, 1], "rope_theta": 100000, "partial_rotary_factor": 0.5}
    text = tiny_config("qwen3_5_moe", layers=2)["text_config"] | {"rope_parameters": rope}
    config = tiny_config("qwen3_5_moe", layers=2) | {"text_config": text}
    directory = add_mtp_head(tiny_model(tmp_path, settings=config, dtype="float32"))
    arrays, files = as_published(directory), resolve(str(directory))
    stage = load_stage(files, describe(files), range(2), dtype="float32")
    head = load_mtp_head(files, describe(files), stage, dequantize=False)

    drafter = theirs.Qwen3_5MTPDraftModel(theirs.Qwen3_5MTPConfig(text_config={"model_type": "qwen3_5_moe_text", **text}))
    own = drafter.sanitize({name: array for name, array in arrays.items() if name.startswith("mtp.")})
    drafter.load_weights(list(own.items()), strict=True)
    tokens, states = mx.array([[7, 8, 9, 300, 4]]), mx.random.normal((1, 5, text["hidden_size"]), key=mx.random.key(1))
    embedded = arrays["language_model.model.embed_tokens.weight"][tokens]
    expected = drafter._forward_hidden(embedded, states, drafter.make_cache(), mx.arange(5)[None])
    found = head.join(tokens, states, head.make_caches())
    assert mx.allclose(found, expected, atol=1e-5).item()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"mtp.layers.1.final_layernorm": None}, "weight mtp.layers.1.final_layernorm.weight of its draft head is missing"),
        ({"shared_head.norm": None}, "weight model.layers.2.shared_head.norm.weight of its draft head is missing"),
        ({"eh_proj": (32, 64)}, "has shape (32, 64), and the model's hidden size is 64: it is another model's"),
        ({"eh_proj": (64, 64)}, "eh_proj: Expected shape (64, 128) but received shape (64, 64)"),
        ({"eh_proj": None}, "carries no draft head (no weight model.layers.2.eh_proj.weight)"),
    ],
)
def test_heads_that_do_not_fit_are_refused(tmp_path: Path, changed: dict[str, tuple[int, int] | None], words: str) -> None:
    beside = any(name.startswith("mtp.") for name in changed)
    directory = model(tmp_path, "nemotron_h" if beside else "glm4_moe")
    assert json.loads((directory / "config.json").read_text())["hidden_size"] == 64
    arrays = {f"{name}.weight": None if shape is None else mx.zeros(shape) for name, shape in changed.items()}
    change(directory, {name if beside else f"model.layers.2.{name}": array for name, array in arrays.items()})
    with pytest.raises(ModelError) as error:
        LLM(str(directory), **MTP)
    assert words in error.value.message


def test_a_head_is_refused_where_none_is_read(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="draft heads of llama are not read, .* leave it out, or name a small model with"):
        LLM(str(tiny_model(tmp_path / "a")), **MTP)
    with pytest.raises(ModelError, match="^--speculative-config model /nowhere/x: no such directory"):
        LLM(str(tmp_path / "a"), speculative_config='{"model": "/nowhere/x"}')
    with pytest.raises(ConfigError, match="--kv-disk .*config.json: is not a directory"):
        LLM(str(tmp_path / "a"), kv_disk=str(tmp_path / "a" / "config.json"))
    (assistant := tmp_path / "assistant").mkdir()
    (assistant / "config.json").write_text('{"model_type": "gemma4_assistant", "backbone_hidden_size": 64}')
    mx.save_safetensors(str(assistant / "model.safetensors"), {"pre_projection.weight": mx.zeros((32, 128))})
    with pytest.raises(ConfigError, match="is a draft head; add --speculative-method mtp"):
        LLM(str(tiny_model(tmp_path / "b", "gemma4")), draft_model=str(assistant))
