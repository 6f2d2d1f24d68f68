"""Conversion of Tandem's StepResult to vLLM's ModelRunnerOutput, and timing of steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
from vllm.v1.outputs import AsyncModelRunnerOutput, DraftTokenIds, LogprobsLists, ModelRunnerOutput

from tandem.errors import RankFailure
from tandem.protocol.logprobs import TokenLogprob
from tandem.protocol.step import StepPlan, StepResult, accepted
from tandem.speculation.ngram import NgramIndex

if TYPE_CHECKING:
    from tandem.runner.runner import PendingStep


def model_output(scheduled: Sequence[str], plan: StepPlan, result: StepResult) -> ModelRunnerOutput:
    """Return one entry per scheduled request, empty during its prefill. Raises RankFailure for logits that are not finite."""
    tokens: dict[str, list[int]] = {request_id: [] for request_id in scheduled}
    for request_id, token in zip(plan.sampled(), result.tokens, strict=True):
        tokens[request_id].append(token)
    for row in plan.spec_decode_plan.rows if plan.spec_decode_plan else ():
        sampled = tokens[row.request_id]
        del sampled[accepted(row.tokens, sampled) + 1 :]
    for request_id, sampled in tokens.items():
        if any(token < 0 for token in sampled):
            raise RankFailure(
                f"the model produced logits that are not finite numbers for {request_id}; check its weights and dtype", rank=0
            )
    return ModelRunnerOutput(
        req_ids=list(scheduled),
        req_id_to_index={request_id: i for i, request_id in enumerate(scheduled)},
        sampled_token_ids=list(tokens.values()),
        logprobs=_logprobs(tokens, result.logprobs) if result.logprobs else None,
    )


def _logprobs(tokens: dict[str, list[int]], logprobs: dict[str, list[TokenLogprob]]) -> LogprobsLists:
    """Return vLLM's table: a row per token of each request; columns are the chosen token, then the most likely ones.

    Rows of requests without logprobs are padding.
    """
    width = 1 + max(len(entry.top) for entries in logprobs.values() for entry in entries)
    starts = list(accumulate((len(sampled) for sampled in tokens.values()), initial=0))
    ids = np.zeros((starts[-1], width), dtype=np.int32)
    values = np.full((starts[-1], width), -np.inf, dtype=np.float32)
    ranks = np.zeros(starts[-1], dtype=np.int32)
    for start, (request_id, sampled) in zip(starts, tokens.items(), strict=False):
        for row, entry in enumerate(logprobs.get(request_id, [])[: len(sampled)], start=start):
            ids[row, 0], values[row, 0] = entry.token, entry.logprob
            for column, (token, value) in enumerate(entry.top, start=1):
                ids[row, column], values[row, column] = token, value
            ranks[row] = 1 + sum(value > entry.logprob for _, value in entry.top)
    return LogprobsLists(ids, values, ranks, starts)


@dataclass
class StepTimes:
    """Accumulated seconds by phase, over all steps with tokens."""

    steps: int = 0
    adapter: float = 0.0
    """Conversion of vLLM's outputs to plans."""
    results: float = 0.0
    """Conversion of tokens to vLLM's outputs."""
    busy: float = 0.0
    """Time with at least one step in the runner."""
    began: float = 0.0
    ended: float = 0.0

    def summary(self) -> str:
        """Return one line of milliseconds per step: runner, adapter, results, and the rest (vLLM and idle time)."""
        rest = self.ended - self.began - self.busy
        parts = {"runner": self.busy, "adapter": self.adapter, "results": self.results, "rest": rest}
        each = ", ".join(f"{name} {seconds / max(self.steps, 1) * 1e3:.2f} ms" for name, seconds in parts.items())
        return f"{self.steps} steps: {each}"


class StepUnderWay(AsyncModelRunnerOutput):
    """A step in progress. With asynchronous scheduling vLLM awaits its tokens in a separate thread."""

    def __init__(
        self,
        scheduled: list[str],
        plan: StepPlan,
        step: Future[PendingStep],
        profile: StepTimes,
        tell: Callable[[ModelRunnerOutput], None],
    ) -> None:
        self._scheduled, self._plan, self._step, self._profile = scheduled, plan, step, profile
        self._tell = tell
        self._started = time.perf_counter()

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the step and return its tokens. Raises the step's exception."""
        result = self._step.result().finish()
        done = time.perf_counter()
        output = model_output(self._scheduled, self._plan, result)
        self._tell(output)
        profile = self._profile
        profile.busy += done - max(self._started, profile.ended)
        profile.began = profile.began or self._started
        profile.ended = done
        profile.results += time.perf_counter() - done
        profile.steps += 1
        return output


class NgramDrafter:
    """Drafts tokens from n-grams of each sequence."""

    def __init__(self, *, most: int, shortest: int, longest: int) -> None:
        """Store the limits: `most` drafts per sequence and step; n-gram lengths `shortest` to `longest`, as in `NgramIndex`."""
        self._most, self._shortest, self._longest = most, shortest, longest
        self._indexes: dict[str, NgramIndex] = {}
        self._drafts: dict[str, list[int]] = {}

    def follow(self, plan: StepPlan) -> None:
        """Apply a plan's removals and insertions. Sequences with penalties get no drafts: their tokens depend on all before."""
        for request_id in plan.removes:
            self._indexes.pop(request_id, None)
        for op in plan.inserts:
            if not op.params.penalised:
                self._indexes[op.request_id] = index = NgramIndex(self._shortest, self._longest)
                index.extend(op.tokens)

    def read(self, output: ModelRunnerOutput) -> None:
        """Add a step's tokens and draft the next ones."""
        self._drafts = {}
        for request_id, tokens in zip(output.req_ids, output.sampled_token_ids, strict=True):
            index = self._indexes.get(request_id)
            if index is not None and tokens:
                index.extend(tokens)
                self._drafts[request_id] = index.drafts(self._most)

    def take(self) -> DraftTokenIds:
        """Return the drafts for the last step's sequences, and forget them."""
        drafts, self._drafts = self._drafts, {}
        return DraftTokenIds(list(drafts), list(drafts.values()))
