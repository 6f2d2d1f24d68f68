"""Requests run to their end over an executor without an engine: for the canary and the parity tool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.errors import RankFailure
from tandem.executors.base import Executor
from tandem.protocol.control import Output, Refused, Stepped
from tandem.protocol.logprobs import TokenLogprob
from tandem.protocol.request import EngineRequest
from tandem.protocol.step import GrammarReady, RankStep
from tandem.scheduler.limits import Limits
from tandem.scheduler.scheduler import Scheduler

POLL_S = 0.1


@dataclass
class Driven:
    """What one request produced."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """One for each token, if the request asked for them."""


@dataclass
class Drive:
    """The outcome of `drive`."""

    answers: dict[str, Driven]
    steps: dict[int, dict[int, RankStep]]
    """By step and rank, what each rank reported."""
    next_step: int
    """Number that the next plan for these ranks must have."""


def drive(executor: Executor, limits: Limits, requests: Sequence[EngineRequest], *, ranks: int,
          first_step: int = 0) -> Drive:
    """Run `requests` to their end on a started executor of `ranks` ranks that report, and leave nothing behind there.

    A scheduler of its own makes the plans, numbered from `first_step`. Raises RankFailure, also when the logits of a
    request are not finite, and RequestError. Calls the executor's `on_wait` as long as it runs.
    """
    scheduler = Scheduler(limits, first_step=first_step)
    run = Drive({request.request_id: Driven() for request in requests}, {}, first_step)
    for request in requests:
        scheduler.submit(request, seed=0)
    while not (scheduler.idle and all(len(reports) == ranks for reports in run.steps.values())):
        while (plan := scheduler.next_plan()) is not None:
            run.steps[plan.step_id] = {}
            executor.submit(plan)
        executor.on_wait()
        for report in executor.collect(POLL_S):
            if isinstance(report, GrammarReady):
                scheduler.compiled(report.request_id)
            if not isinstance(report, Stepped):
                continue
            run.steps[report.step.step_id][report.step.rank] = report.step
            for message in scheduler.update(report.result) if report.result is not None else []:
                _take(run, message)
    run.next_step = scheduler.next_step
    return run


def _take(run: Drive, message: object) -> None:
    if isinstance(message, Refused):
        raise RankFailure(message.message)
    if isinstance(message, Output):
        answer = run.answers[message.request_id]
        answer.tokens += message.tokens
        answer.logprobs += message.logprobs
