"""Result collector: a step counts once all ranks have reported it and their digests agree.

When a rank or link is lost, MLX may return unfinished sums from its buffers. It raises the error once, for one waiter of the
step, or never if the step ended before (`Error::check` and `array::is_available` in MLX 0.32). A rank may then send on a
wrong sum, and the last stage samples from it. But a lost rank does not report the step, and the other ranks hold different
partial sums. So the input of a stage must equal the previous output bit for bit. All ranks of a stage must hold equal
activations.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from tandem.errors import RankFailure
from tandem.executors.executor import Executor
from tandem.protocol.control import Output, Refused, Stepped
from tandem.protocol.layout import StageSpec
from tandem.protocol.logprobs import TokenLogprob
from tandem.protocol.request import EngineRequest
from tandem.protocol.step import GrammarReady, RankStep
from tandem.scheduler.limits import Limits
from tandem.scheduler.scheduler import Scheduler

POLL_S = 0.1


class Disagreement(RankFailure):
    """Ranks hold different activations in one step."""

    def __init__(self, difference: str) -> None:
        super().__init__(f"what was computed does not count: {difference}; see to the links (`tandem doctor`)", cause="link")
        self.difference = difference


class ResultCollector:
    """Collector of ranks' reports, which holds back a step's result until every rank has reported it."""

    def __init__(self) -> None:
        self._reports: dict[int, dict[int, Stepped]] = {}
        """Reports by step id and rank."""

    def complete(self, report: Stepped, ranks: Sequence[StageSpec]) -> Stepped | None:
        """Add a report. With the last one of a step return the report that has the result, with the compute seconds of the
        slowest rank; else None. Raises Disagreement."""
        step_id = report.step.step_id
        reports = self._reports.setdefault(step_id, {})
        reports[report.step.rank] = report
        if len(reports) < len(ranks):
            return None
        del self._reports[step_id]
        if difference := _difference(step_id, {rank: stepped.step for rank, stepped in reports.items()}, ranks):
            raise Disagreement(difference)
        whole = next(stepped for stepped in reports.values() if stepped.result is not None)
        slowest = max(stepped.step.busy_s for stepped in reports.values())
        return whole if slowest == whole.step.busy_s else replace(whole, step=replace(whole.step, busy_s=slowest))

    def forget(self) -> None:
        """Drop all reports, as the ranks are lost and their unfinished steps do not count."""
        self._reports.clear()


def _difference(step_id: int, reports: Mapping[int, RankStep], ranks: Sequence[StageSpec]) -> str:
    """Describe how a step's digests differ between ranks of a stage, or between a stage's input and the previous output.
    Empty if they agree."""
    arrived: tuple[int, int] | None = None
    leader: tuple[int, int] | None = None
    for spec in ranks:
        digest = reports[spec.rank].digest
        if digest is None:  # not requested, or a step that only removes sequences
            continue
        if spec.tp_rank == 0:
            if spec.stage and arrived is not None and digest[0] != arrived[1]:
                return (
                    f"the activations that stage {spec.stage} sent in step {step_id} (digest {arrived[1]:08x}) are "
                    f"not those that stage {spec.stage + 1} received ({digest[0]:08x})"
                )
            arrived = leader = digest
        elif leader is not None and digest != leader:
            return (
                f"rank {spec.rank} holds other activations in step {step_id} (digests {digest[0]:08x} "
                f"{digest[1]:08x}) than rank {spec.rank - spec.tp_rank}, the leader of its stage ({leader[0]:08x} "
                f"{leader[1]:08x})"
            )
    return ""


@dataclass
class OfflineResult:
    """Output of one request of an offline run."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """One entry per token, if requested."""


@dataclass
class OfflineRun:
    """Outcome of `run_offline`."""

    answers: dict[str, OfflineResult]
    next_step: int
    """Step id of the next plan for these ranks."""
    prefill_s: list[float] = field(default_factory=list)
    """Compute seconds of the slowest rank, for each step with prompt tokens."""


def run_offline(
    executor: Executor,
    limits: Limits,
    requests: Sequence[EngineRequest],
    ranks: Sequence[StageSpec],
    *,
    first_step: int = 0,
    until: float | None = None,
) -> OfflineRun:
    """Run `requests` to completion on the started `ranks`, without an engine; all sequences are removed at the end.

    Uses its own scheduler, with step ids from `first_step`, without prefixes, and without drafts that are not forced. `until`:
    time (`time.monotonic`) at which the rest is aborted; refusals are then ignored. Calls the executor's `on_wait` while it
    runs. Raises RequestError; raises RankFailure also for non-finite logits or disagreeing ranks.
    """
    count = len(requests)
    speculation = limits.speculation if limits.speculation and limits.speculation.forced else None
    limits = dataclasses.replace(limits, prefix_tokens=0, speculation=speculation, max_queued_requests=count)
    limits = dataclasses.replace(limits, max_queue_tokens=limits.kv_tokens * count)
    scheduler, collector = Scheduler(limits, first_step=first_step), ResultCollector()
    answers = {request.request_id: OfflineResult() for request in requests}
    run, prompts = OfflineRun(answers, first_step), set[int]()
    for request in requests:
        scheduler.submit(request, seed=0)
    while not scheduler.idle:
        if until is not None and time.monotonic() > until:
            for request in requests:
                scheduler.abort(request.request_id)
        while (plan := scheduler.next_plan()) is not None:
            if plan.prefill:
                prompts.add(plan.step_id)
            executor.submit(plan)
        executor.on_wait()
        for report in executor.collect(POLL_S):
            if isinstance(report, GrammarReady):
                scheduler.compiled(report.request_id)
            whole = collector.complete(report, ranks) if isinstance(report, Stepped) else None
            if whole is not None and whole.result is not None:
                if whole.step.step_id in prompts:
                    run.prefill_s.append(whole.step.busy_s)
                for message in scheduler.update(whole.result):
                    if until is None or not isinstance(message, Refused):
                        _take(answers, message)
    run.next_step = scheduler.next_step
    return run


def _take(answers: dict[str, OfflineResult], message: object) -> None:
    if isinstance(message, Refused):
        raise RankFailure(message.message)
    if isinstance(message, Output):
        answer = answers[message.request_id]
        answer.tokens += message.tokens
        answer.logprobs += message.logprobs
