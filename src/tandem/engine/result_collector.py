"""A step counts once all ranks have reported it, and agree on what they computed.

When a rank or a link is lost, MLX hands out whatever stands in the buffers of sums that were under way: its error is
raised for one of those who wait for the step, once, and for none where the step was over before they looked
(`Error::check` and `array::is_available` in MLX 0.32). A rank may so send on what is no sum, and the last stage samples
from that. But a rank that was lost has not reported the step, and those that were left alone with their own parts of a
sum do not hold the same bits: what leaves a stage must reach the next one bit for bit, and all ranks of a stage must
hold the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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
    """Keeps the results of steps back until every rank has done them."""

    def __init__(self) -> None:
        self._reports: dict[int, dict[int, Stepped]] = {}
        """By step and rank."""

    def complete(self, report: Stepped, ranks: Sequence[StageSpec]) -> Stepped | None:
        """Return the report that has the result, with the last report of a step. Raises Disagreement."""
        step_id = report.step.step_id
        reports = self._reports.setdefault(step_id, {})
        reports[report.step.rank] = report
        if len(reports) < len(ranks):
            return None
        del self._reports[step_id]
        if difference := _difference(step_id, {rank: stepped.step for rank, stepped in reports.items()}, ranks):
            raise Disagreement(difference)
        return next(stepped for stepped in reports.values() if stepped.result is not None)

    def forget(self) -> None:
        """Drop the reports of ranks that are gone: what they have not finished together does not count."""
        self._reports.clear()


def _difference(step_id: int, reports: Mapping[int, RankStep], ranks: Sequence[StageSpec]) -> str:
    """Describe how a step's digests differ, if they do: between the ranks of a stage, or between a stage's input and
    the output of the stage before."""
    arrived: tuple[int, int] | None = None
    leader: tuple[int, int] | None = None
    for spec in ranks:
        digest = reports[spec.rank].digest
        if digest is None:  # not asked for, or a step that only removes sequences
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
    """One for each token, if the request asked for them."""


@dataclass
class OfflineRun:
    """Outcome of `run_offline`."""

    answers: dict[str, OfflineResult]
    next_step: int
    """Number that the next plan for these ranks must have."""


def run_offline(
    executor: Executor, limits: Limits, requests: Sequence[EngineRequest], ranks: Sequence[StageSpec], *, first_step: int = 0
) -> OfflineRun:
    """Run `requests` to their end on the started `ranks`, without an engine, and leave nothing behind there.

    A scheduler of its own makes the plans, numbered from `first_step`. Raises RankFailure, also when the logits of a
    request are not finite or ranks disagree, and RequestError. Calls the executor's `on_wait` as long as it runs.
    """
    scheduler, collector = Scheduler(limits, first_step=first_step), ResultCollector()
    answers = {request.request_id: OfflineResult() for request in requests}
    for request in requests:
        scheduler.submit(request, seed=0)
    while not scheduler.idle:
        while (plan := scheduler.next_plan()) is not None:
            executor.submit(plan)
        executor.on_wait()
        for report in executor.collect(POLL_S):
            if isinstance(report, GrammarReady):
                scheduler.compiled(report.request_id)
            whole = collector.complete(report, ranks) if isinstance(report, Stepped) else None
            if whole is not None and whole.result is not None:
                for message in scheduler.update(whole.result):
                    _take(answers, message)
    return OfflineRun(answers, scheduler.next_step)


def _take(answers: dict[str, OfflineResult], message: object) -> None:
    if isinstance(message, Refused):
        raise RankFailure(message.message)
    if isinstance(message, Output):
        answer = answers[message.request_id]
        answer.tokens += message.tokens
        answer.logprobs += message.logprobs
