"""Prompts and answers by which tests compare an engine that drafts with one that does not."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from submitted import Killer, ask, submitted
from tandem import LLM, SamplingParams
from tandem.checkpoints.resolve import resolve
from tandem.engine.engine import Engine
from tandem.models.draft_heads import describe_draft
from tandem.models.footprint import rank_position, rank_weights
from tandem.protocol.request import EngineRequest
from tandem.runner.drafter import Drafted, Drafter

GREEDY = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
PARAMS = [
    GREEDY,
    SamplingParams(max_tokens=30, temperature=0.8, seed=3, ignore_eos=True, logprobs=0),
    SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, frequency_penalty=0.3),
]


def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(20, 500) for _ in range(length)] for length in (3, 70, 18, 1)]


def answers(llm: LLM) -> list[list[list[int]]]:
    return [[one.token_ids for one in llm.generate(prompts(), params)] for params in PARAMS]


def plain(directory: Path) -> list[list[list[int]]]:
    with LLM(str(directory), prefill_chunk=16, speculative_method="none") as llm:
        return answers(llm)


def answers_amid_a_kill(llm: LLM) -> list[list[int]]:
    """Greedy answers to the prompts, of which a rank is killed once 20 drafts have been accepted."""
    requests = [EngineRequest(request_id=str(i), prompt=prompt, params=GREEDY) for i, prompt in enumerate(prompts())]
    tokens: dict[str, list[int]] = {one.request_id: [] for one in requests}
    for message in submitted(llm, requests, Killer(llm, lambda _: llm.engine.status().accepted_tokens > 20)):
        tokens[message.request_id].extend(message.tokens)
    assert llm.engine.restarts == 1
    return list(tokens.values())


def drafting(method: str, head: Path) -> dict[str, Any]:
    return {"speculative_config": json.dumps({"method": method, "model": str(head), "num_speculative_tokens": 4})}


def assert_weights_as_told(llm: LLM, head: Path) -> None:
    """The estimates before loading are what the ranks hold then, the head included."""
    layout = llm.engine.layout
    drafts = [describe_draft(resolve(str(head)), spec, layout.description) if spec.samples else None for spec in layout.ranks]
    expected = [
        rank_weights(layout.description, spec, draft, gpu=False) for spec, draft in zip(layout.ranks, drafts, strict=True)
    ]
    assert [rank.weight_bytes for rank in ask(llm, Engine.status).ranks] == pytest.approx(expected, rel=0.01)
    assert sum(ready.kv_bytes_per_token for ready in llm.engine.rank_group.ready) == sum(
        rank_position(layout.description, spec, draft, gpu=False) for spec, draft in zip(layout.ranks, drafts, strict=True)
    )


def change(path: Path, *, config: dict[str, Any] | None = None, **weights: Any) -> None:
    """Replace entries of a directory's config.json and weights; None removes a weight."""
    known = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(known | (config or {})))
    arrays: Any = mx.load(str(path / "model.safetensors"))
    arrays |= {name.replace("__", "."): array for name, array in weights.items()}
    kept = {
        name: array if array.dtype == mx.int64 or name == "t2d" else array.astype(mx.bfloat16)
        for name, array in arrays.items()
        if array is not None
    }
    mx.save_safetensors(str(path / "model.safetensors"), kept, {"format": "mlx"})


def drafts_after(
    monkeypatch: pytest.MonkeyPatch, directory: Path, layouts: list[dict[str, Any]], **drafting: Any
) -> list[dict[int, list[int]]]:
    """Drafts of a head in each step of an answer, by the tokens known: one server after another, with one directory of KV.

    Asserts that the first server's second answer had a prefix hit, and each later server's only one.
    """
    drafted: dict[int, list[int]] = {}
    found: list[dict[int, list[int]]] = []
    whole = Drafter.draft

    def noted(drafter: Drafter, *args: Any) -> Drafted | None:
        made = whole(drafter, *args)
        drafted.update({len(drafter._known[one].tokens): tokens for one, tokens in (made.values() if made else {}).items()})
        return made

    monkeypatch.setattr(Drafter, "draft", noted)
    monkeypatch.setattr("tandem.speculation.proposers.ModelProposer.hits", 1.0)  # it is asked in each step
    monkeypatch.setattr("tandem.speculation.proposers.ModelProposer.trial", False)
    texts = set()
    for number, layout in enumerate(layouts):
        with LLM(str(directory), prefill_chunk=16, kv_disk=str(directory.parent / "kv"), **{**drafting, **layout}) as llm:
            for _ in range(2 - (number > 0)):
                texts.add(tuple(llm.generate([prompts()[1]], GREEDY)[0].token_ids))
                found.append(dict(drafted))
                drafted.clear()
            assert ask(llm, Engine.status).prefix_hits == 1
    assert len(texts) == 1
    return found
