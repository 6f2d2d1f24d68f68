"""Draft heads of checkpoints: the outputs are those of plain decoding, and a head that is right is believed."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from submitted import Killer, ask, check, submitted
from tandem import LLM, SamplingParams
from tandem.engine.engine import Engine
from tandem.errors import ModelError
from tandem.models.footprint import rank_weights
from tandem.protocol.request import EngineRequest
from tandem.testing import add_mtp_head, tiny_model

MTP = {"speculative_config": '{"method": "mtp", "num_speculative_tokens": 4}'}
GREEDY = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
PARAMS = [
    GREEDY,
    SamplingParams(max_tokens=30, temperature=0.8, seed=3, ignore_eos=True, logprobs=0),
    SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, frequency_penalty=0.3),
]


@pytest.fixture(autouse=True)
def steps_that_cost_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may keep a few steps with drafts waiting, which do not pay then for hundreds of steps."""
    monkeypatch.setattr("tandem.speculation.proposers.StepCosts.ratio", lambda self, rows, width: 1.0)


def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(20, 500) for _ in range(length)] for length in (3, 70, 18, 1)]


def model(directory: Path, family: str = "glm4_moe", right: float | None = None) -> Path:
    return add_mtp_head(tiny_model(directory, family, layers=2), right=right)


def answers(llm: LLM) -> list[list[list[int]]]:
    return [[one.token_ids for one in llm.generate(prompts(), params)] for params in PARAMS]


def plain(directory: Path) -> list[list[list[int]]]:
    with LLM(str(directory), prefill_chunk=16, speculative_method="none") as llm:
        return answers(llm)


def assert_weights_as_told(llm: LLM) -> None:
    """The planner's and the ranks' estimates before loading are what the ranks hold then, the head included."""
    layout = llm.engine.layout
    held = [rank.weight_bytes for rank in ask(llm, Engine.status).ranks]
    assert held == pytest.approx([rank_weights(layout.description, spec, None, gpu=False) for spec in layout.ranks], rel=0.01)


def change(directory: Path, changed: dict[str, mx.array | None]) -> None:
    """Replace weights of a model, or remove them."""
    path = directory / "model.safetensors"
    arrays: Any = mx.load(str(path))
    mx.save_safetensors(str(path), {name: one for name, one in {**arrays, **changed}.items() if one is not None})


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
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
    directory = model(tmp_path)
    expected = plain(directory)
    with LLM(str(directory), prefill_chunk=16, kv_tokens=256, **MTP) as llm:
        assert [answers(llm) for _ in range(2)] == [expected] * 2
        check(llm)
        status = ask(llm, Engine.status)
        assert llm.engine.scheduler.batches.preemptions > 0
        assert status.draft_tokens > 0 and status.accepted_tokens < 0.1 * status.draft_tokens


def test_prefixes_from_disk_serve_a_head(tmp_path: Path) -> None:
    directory = str(model(tmp_path / "model", right=1.0))
    prompt = [prompts()[1]]
    found = []
    for _ in range(2):
        with LLM(directory, prefill_chunk=16, kv_disk=str(tmp_path / "kv"), **MTP) as llm:
            found.append(llm.generate(prompt, GREEDY)[0].token_ids)
            status = ask(llm, Engine.status)
            assert status.kv_disk == "on" and 0 < status.draft_tokens == status.accepted_tokens
    assert found[0] == found[1] and status.prefix_hits == 1


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layout"), [("glm4_moe_lite", "pipeline"), ("glm4_moe", "tensor")])
def test_layouts_give_the_tokens_of_plain_decoding_though_a_rank_dies_between_drafts(
    tmp_path: Path, family: str, layout: str
) -> None:
    directory = model(tmp_path, family, right=0.7)
    with LLM(str(directory), prefill_chunk=16, speculative_method="none") as llm:
        expected = [one.token_ids for one in llm.generate(prompts(), GREEDY)]
    with LLM(str(directory), prefill_chunk=16, **MTP, **{f"{layout}_parallel_size": 2}) as llm:
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


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"shared_head.norm": None}, "weight model.layers.2.shared_head.norm.weight of its draft head is missing"),
        ({"eh_proj": (32, 64)}, "has shape (32, 64), and the model's hidden size is 64: it is another model's"),
        ({"eh_proj": (64, 64)}, "eh_proj: Expected shape (64, 128) but received shape (64, 64)"),
        ({"eh_proj": None}, "carries no draft head (no weight model.layers.2.eh_proj.weight)"),
    ],
)
def test_heads_that_do_not_fit_are_refused(tmp_path: Path, changed: dict[str, tuple[int, int] | None], words: str) -> None:
    directory = model(tmp_path)
    assert json.loads((directory / "config.json").read_text())["hidden_size"] == 64
    arrays = {f"model.layers.2.{name}.weight": None if shape is None else mx.zeros(shape) for name, shape in changed.items()}
    change(directory, arrays)
    with pytest.raises(ModelError) as error:
        LLM(str(directory), **MTP)
    assert words in error.value.message


def test_a_head_is_refused_where_none_is_read(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="draft heads of llama are not read, those of deepseek_v3"):
        LLM(str(tiny_model(tmp_path / "a")), **MTP)
