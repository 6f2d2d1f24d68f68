"""Our StepResult to vLLM's ModelRunnerOutput, and what steps took."""

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
    """One entry for each scheduled request, empty where its prompt goes on. Raises RankFailure for broken logits."""
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
    """vLLM's columns: the chosen token, then the most likely ones; a row for each token of each request.

    Rows of requests that did not ask are not read.
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
    """Seconds by what they went to, over all steps with tokens."""

    steps: int = 0
    adapter: float = 0.0
    """From vLLM's output to a plan."""
    results: float = 0.0
    """From tokens to vLLM's output."""
    busy: float = 0.0
    """At least one step was under way in the runner."""
    began: float = 0.0
    ended: float = 0.0

    def summary(self) -> str:
        """Return one line of milliseconds per step: busy, ours, and the rest, which is vLLM's and waiting for requests."""
        rest = self.ended - self.began - self.busy
        parts = {"runner": self.busy, "adapter": self.adapter, "results": self.results, "rest": rest}
        each = ", ".join(f"{name} {seconds / max(self.steps, 1) * 1e3:.2f} ms" for name, seconds in parts.items())
        return f"{self.steps} steps: {each}"


class StepUnderWay(AsyncModelRunnerOutput):
    """A step under way; vLLM asks for its tokens in a thread of its own where it schedules ahead."""

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
        """Wait for the tokens. Raises what the step raised."""
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
    """Drafts tokens from n-grams, following plans and results."""

    def __init__(self, *, most: int, shortest: int, longest: int) -> None:
        """`most` drafts of a sequence in a step; `shortest` and `longest` as `NgramIndex` has them."""
        self._most, self._shortest, self._longest = most, shortest, longest
        self._indexes: dict[str, NgramIndex] = {}
        self._drafts: dict[str, list[int]] = {}

    def follow(self, plan: StepPlan) -> None:
        """Follow removals and insertions. With penalties a token depends on all before it: none is drafted."""
        for request_id in plan.removes:
            self._indexes.pop(request_id, None)
        for op in plan.inserts:
            if not op.params.penalised:
                self._indexes[op.request_id] = index = NgramIndex(self._shortest, self._longest)
                index.extend(op.tokens)

    def read(self, output: ModelRunnerOutput) -> None:
        """Read a step's tokens and draft the next ones."""
        self._drafts = {}
        for request_id, tokens in zip(output.req_ids, output.sampled_token_ids, strict=True):
            index = self._indexes.get(request_id)
            if index is not None and tokens:
                index.extend(tokens)
                self._drafts[request_id] = index.drafts(self._most)

    def take(self) -> DraftTokenIds:
        """The drafts of the last step's sequences; each is handed out once."""
        drafts, self._drafts = self._drafts, {}
        return DraftTokenIds(list(drafts), list(drafts.values()))
