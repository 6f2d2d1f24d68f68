"""Watchdog of a rank group's progress, from ranks' reports, ping answers and the clock. Pure: no I/O.

A step that does not end has one of four causes:

- suspended process (SIGSTOP, a debugger): its process state shows it, or it answers no ping;
- unreachable rank: it answers no ping, and its process state is unknown;
- broken link: a rank answers pings and waits for another stage's output;
- stuck step, most often a collective: ranks answer pings inside the step, and none waits for a stage.

A rank that is slow but makes progress is kept, with a warning. Deadlines follow the work in the step and the slowest recent
pace, times `FACTOR`.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from tandem.errors import RankFailure
from tandem.protocol.control import Pong, Stepped
from tandem.protocol.layout import StageSpec
from tandem.protocol.pictures import PictureEncoded
from tandem.protocol.step import GrammarReady, StepPlan

log = logging.getLogger(__name__)

PASS = 16.0
"""Fixed cost of a forward pass (reading all weights), in units of one token's matrix products."""
CONTEXT = 4096.0
"""Context positions that cost about as much as one token's matrix products."""
LEARNT = 16
"""Reports needed before a pace is considered known."""
KEEP = 0.999
"""Factor by which the slowest pace decays with each report."""
DOWN, UP, RECENT = 0.05, 0.002, 0.2
"""Smoothing factors: of the usual pace for quicker reports and for slower ones, and of the recent pace."""
FLOOR_S, GPU_FLOOR_S = 5.0, 20.0
"""Minimum timeout of a step in seconds, on CPU and GPU. The first use of a GPU kernel compiles it."""
FACTOR = 10.0
"""Deadline of a step as a multiple of the slowest recent pace, added to the minimum."""
PING_S, IDLE_PING_S = 0.5, 2.0
SILENT_S, LOADING_SILENT_S = 3.0, 60.0
"""Seconds without a ping answer before a rank counts as not running. MLX holds the interpreter lock for up to 31 s while
connecting a group."""
ROUND_TRIPS = 5.0
"""Timeout of a ping answer as a multiple of the rank's longest recent answer time."""
DOUBT_S = 1.5
"""Seconds without a ping answer after which a rank with an unfinished step counts as silent."""
STOPPED_S = 1.0
"""Seconds that a process may stay suspended."""
PAUSE_S = 1.0
"""Gap in seconds between two calls that counts as a pause of the engine itself."""
SLOW, SLOW_S, AGAIN_S = 5.0, 3.0, 600.0
"""Slowdown that is reported, seconds that it must last, and minimum seconds between reports."""
IDLE_S = 1.0
"""Seconds without a step, fewer than `SLOW_S`, after which slow steps that were not reported are forgotten."""


class Workload:
    """Counter of the units of work in a rank group's plans; one unit is about one token's matrix products."""

    def __init__(self) -> None:
        self._lengths: dict[str, int] = {}
        self._read: dict[str, int] = {}
        """Tokens that the draft model has received, by request id."""

    def count(self, plan: StepPlan) -> float:
        """Return the units of work in the next plan, at least 1."""
        lengths = self._lengths
        for request_id in plan.removes:
            lengths.pop(request_id, None)
            self._read.pop(request_id, None)
        for insert in plan.inserts:
            lengths[insert.request_id] = len(insert.tokens)
        work = 1.0
        if plan.decode:
            for request_id in plan.decode:
                lengths[request_id] = lengths.get(request_id, 0) + 1
            if plan.spec_decode_plan is not None:
                lengths.update((row.request_id, row.length + 1) for row in plan.spec_decode_plan.rows)
            work += PASS + len(plan.decode) * plan.width + sum(lengths[one] for one in plan.decode) / CONTEXT
        for op in plan.prefill:
            # Logits, needed only for some positions, may cost as much as a stage's layers.
            work += PASS + op.count * (1 + (op.start + op.count / 2) / CONTEXT + (op.prompt_logprobs is not None))
        if plan.spec_decode_plan is not None and plan.spec_decode_plan.ask:
            work += self._guesses(plan, plan.spec_decode_plan.ask)
        return work

    def _guesses(self, plan: StepPlan, ask: int) -> float:
        """Return the work of the draft model, assumed as large as the model: unread tokens and drafts."""
        work = 0.0
        for request_id in set(plan.sampled()):
            length = self._lengths.get(request_id, 0)
            work += max(length - self._read.get(request_id, 0), 0) + ask
            self._read[request_id] = length
        return work + PASS * (1 + ask)


class Pace:
    """Seconds per unit of work: slowest, usual and recent."""

    def __init__(self) -> None:
        self.slowest = 0.0
        """Slowest recent pace, decaying by `KEEP` per report."""
        self.usual = 0.0
        self.recent = 0.0
        self._reports = 0

    @property
    def known(self) -> bool:
        """True once `LEARNT` reports were recorded."""
        return self._reports >= LEARNT

    @property
    def slowdown(self) -> float:
        """Recent pace over usual pace; 1 while unknown."""
        return self.recent / self.usual if self.known and self.usual > 0 else 1.0

    def note(self, seconds: float, work: float) -> None:
        """Record that `work` units took `seconds`."""
        rate = seconds / work
        self._reports += 1
        self.slowest = max(rate, self.slowest * KEEP)
        if self._reports <= LEARNT:
            self.usual = self.recent = self.recent + (rate - self.recent) / self._reports
            return
        self.recent += (rate - self.recent) * RECENT
        self.usual += (rate - self.usual) * (DOWN if rate < self.usual else UP)


@dataclass
class Slowness:
    """Detector of a lasting slowdown: reports when it starts and when it ends."""

    told: bool = False
    """True from the report of a slowdown until it ends."""
    since: float | None = None
    """Time since which the state differs from the reported one; None if it does not."""
    told_at: float = -math.inf

    def turned(self, slowdown: float, now: float) -> bool:
        """Return True when a slowdown starts or ends; `told` has which. `slowdown` is a multiple of the usual time."""
        if slowdown >= SLOW / 2 if self.told else slowdown < SLOW or now - self.told_at < AGAIN_S:
            self.since = None
            return False
        self.since = now if self.since is None else self.since
        if now - self.since <= SLOW_S:
            return False
        self.told, self.since = not self.told, None
        self.told_at = now if self.told else self.told_at
        return True


@dataclass
class _Tempo:
    """A pace with a detector of slowness."""

    pace: Pace = field(default_factory=Pace)
    slowness: Slowness = field(default_factory=Slowness)

    def turned(self, now: float, *, idle: bool) -> bool:
        """Return True when a slowdown starts or ends. `idle`: slow steps that were not reported are forgotten."""
        if idle and not self.slowness.told:
            self.pace.recent = self.pace.usual
        return self.slowness.turned(self.pace.slowdown, now)


@dataclass
class _Rank:
    asked_at: float | None = None
    """Send time of the oldest unanswered ping; None without any."""
    stopped_at: float | None = None
    """Time since which its process is suspended; None while it runs."""
    round_trip: float = 0.0
    """Longest recent answer time in seconds."""
    begun: int = -1
    waiting: bool = False
    tempo: _Tempo = field(default_factory=_Tempo)


@dataclass
class _Step:
    step_id: int
    work: float
    missing: set[int]
    """Ranks that have not reported the step."""


class Watchdog:
    """Watchdog of successive rank groups of an engine. The pace that deadlines follow is kept until it causes a failure.

    All times are seconds of one monotonic clock.
    """

    def __init__(self, ranks: int, step_timeout_s: float) -> None:
        """Watch `ranks` ranks. `step_timeout_s`: maximum seconds without progress."""
        self._step_timeout = step_timeout_s
        self._ranks = [_Rank() for _ in range(ranks)]
        self._pace = Pace()
        """Pace between two reports of any rank, for the work in progress."""
        self._tempo = _Tempo()
        """Pace from the end of one step to the end of the next."""
        self._floor = FLOOR_S
        self._loaded = False
        self._level = logging.WARNING
        """Log level of messages about slowness."""
        self._workload = Workload()
        self._steps: deque[_Step] = deque()
        self._compiling: set[str] = set()
        """Requests whose grammars are being compiled."""
        self._encoding: set[int] = set()
        """Ranks that encode a picture."""
        self._progress_at = self._done_at = self._awake_at = self._pinged_at = 0.0
        self._number = 0

    def begin(self, now: float) -> None:
        """Reset for a new rank group, which starts loading at `now`."""
        self._ranks = [_Rank(tempo=_Tempo(slowness=rank.tempo.slowness)) for rank in self._ranks]
        self._workload = Workload()
        self._steps.clear()
        self._compiling.clear()
        self._encoding.clear()
        self._loaded = False
        self._progress_at = self._awake_at = now
        self._pinged_at = now - IDLE_PING_S

    def loaded(self, now: float, *, gpu: bool, hosts: int = 2) -> None:
        """Start watching steps, as all ranks on `hosts` hosts are ready. On one host slowness is logged at INFO, as other
        programs usually cause it."""
        self._loaded = True
        self._level = logging.WARNING if hosts > 1 else logging.INFO
        self._floor = GPU_FLOOR_S if gpu else FLOOR_S
        self._progress_at = now

    @property
    def slowdowns(self) -> list[float]:
        """Slowdown of each rank: recent over usual time per unit of work."""
        return [rank.tempo.pace.slowdown for rank in self._ranks]

    def slowness(self, rank: int) -> tuple[float, bool]:
        """Return the slowdown of a rank, and whether it has lasted and was logged; (1, False) for a rank of an earlier layout."""
        tempo = self._ranks[rank].tempo if rank < len(self._ranks) else _Tempo()
        return tempo.pace.slowdown, tempo.slowness.told

    @property
    def busy(self) -> bool:
        """True while steps are in progress."""
        return bool(self._steps)

    def works(self, rank: int) -> bool:
        """Return True if the rank has an unfinished step or picture, or a grammar is being compiled."""
        return bool(self._compiling) or rank in self._encoding or any(rank in step.missing for step in self._steps)

    # --- events ---

    def planned(self, plan: StepPlan, now: float) -> None:
        """Record that a plan was sent to all ranks."""
        self._wake(now)
        self._compiling.difference_update(plan.removes)
        self._compiling.update(op.request_id for op in plan.inserts if op.params.structured_outputs is not None)
        if not self._steps:
            self._progress_at = self._done_at = now
        self._steps.append(_Step(plan.step_id, self._workload.count(plan), set(range(len(self._ranks)))))

    def take(self, report: object, now: float) -> None:
        """Record a rank's report, of any kind."""
        if isinstance(report, Stepped):
            self.reported(report, now)
        elif isinstance(report, GrammarReady):
            self._compiling.discard(report.request_id)
        elif isinstance(report, PictureEncoded):
            self._wake(now)
            self._encoding.discard(report.rank)
            self._progress_at = now

    def reported(self, report: Stepped, now: float) -> None:
        """Record a rank's report of a finished step."""
        self._wake(now)
        rank = self._ranks[report.step.rank]
        rank.asked_at = None
        step = next((one for one in self._steps if one.step_id == report.step.step_id), None)
        if step is None:
            return
        step.missing.discard(report.step.rank)
        rank.tempo.pace.note(report.step.busy_s, step.work)
        self._pace.note(max(now - self._progress_at, 0.0), max(one.work for one in self._steps))
        self._progress_at = now
        while self._steps and not self._steps[0].missing:
            self._tempo.pace.note(max(now - self._done_at, 0.0), self._steps.popleft().work)
            self._done_at = now

    def encodes(self, ranks: Iterable[StageSpec], now: float) -> None:
        """Record that these ranks encode a picture, where they do so themselves. It takes longer than steps, so the deadline is
        the whole `step_timeout`."""
        self._wake(now)
        if encoding := {spec.rank for spec in ranks if not spec.encoder_seconds}:
            self._encoding, self._progress_at = encoding, now

    def answered(self, pong: Pong, now: float) -> None:
        """Record a rank's answer to a ping."""
        self._wake(now)
        rank = self._ranks[pong.rank]
        if rank.asked_at is not None:
            rank.round_trip = max(now - rank.asked_at, 0.9 * rank.round_trip) if self._loaded else 0.0
            rank.asked_at = None
        rank.begun, rank.waiting = pong.step_id, pong.waiting

    def ping(self, now: float) -> int | None:
        """Return the number of a ping to send to all ranks; None if none is due."""
        if now - self._pinged_at < (IDLE_PING_S if self._loaded and not self._steps else PING_S):
            return None
        self._pinged_at = now
        self._number += 1
        for rank in self._ranks:
            rank.asked_at = now if rank.asked_at is None else rank.asked_at
        return self._number

    # --- verdict ---

    def look(self, now: float, stopped: Callable[[int], bool]) -> None:
        """Raise RankFailure if a rank or step is stuck. `stopped(rank)`: True if the rank's process is suspended."""
        self._wake(now)
        for number, rank in enumerate(self._ranks):
            self._check_stopped(number, rank, now, stopped(number))
            self._check_silence(number, rank, now)
        if self._loaded:
            self._check_pace(now)
        self._check_progress(now)

    def _wake(self, now: float) -> None:
        """Shift all timers by the engine's own pause (suspended, or busy elsewhere), if it exceeds `PAUSE_S`."""
        gap, self._awake_at = now - self._awake_at, now
        if gap <= PAUSE_S:
            return
        self._progress_at += gap
        self._done_at += gap
        for rank in self._ranks:
            rank.asked_at = None if rank.asked_at is None else rank.asked_at + gap
            rank.stopped_at = None if rank.stopped_at is None else rank.stopped_at + gap

    def _check_stopped(self, number: int, rank: _Rank, now: float, stopped: bool) -> None:
        if not stopped:
            rank.stopped_at = None
        elif rank.stopped_at is None:
            rank.stopped_at = now
        elif now - rank.stopped_at > STOPPED_S:
            raise RankFailure(
                f"rank {number} stands still: its process is stopped (SIGSTOP, or a debugger)", rank=number, cause="stopped"
            )

    def _check_silence(self, number: int, rank: _Rank, now: float) -> None:
        limit = max(SILENT_S, ROUND_TRIPS * rank.round_trip) if self._loaded else LOADING_SILENT_S
        if rank.asked_at is not None and now - rank.asked_at > min(limit, self._step_timeout):
            raise RankFailure(
                f"rank {number} has not answered for {now - rank.asked_at:.1f} s: its process does not "
                "run, or its machine cannot be reached",
                rank=number,
                cause="silent",
            )

    def _check_pace(self, now: float) -> None:
        """Log when ranks become slow and when they recover."""
        idle = not self._steps and now - self._done_at > IDLE_S
        for number, rank in enumerate(self._ranks):
            if rank.tempo.turned(now, idle=idle):
                if rank.tempo.slowness.told:
                    log.log(
                        self._level,
                        "rank %d is slow: steps take %.1f times the usual time; no action is taken while it makes progress",
                        number,
                        rank.tempo.pace.slowdown,
                    )
                else:
                    log.log(self._level, "rank %d is at its usual pace again", number)
        if (self._tempo.slowness.told or max(self.slowdowns) < SLOW / 2) and self._tempo.turned(now, idle=idle):
            if self._tempo.slowness.told:
                log.log(
                    self._level,
                    "steps take %.1f times the usual time, while ranks compute at their usual pace: a "
                    "link between them is slow; no action is taken while something moves",
                    self._tempo.pace.slowdown,
                )
            else:
                log.log(self._level, "steps take their usual time again")

    def deadline_s(self) -> float:
        """Return the maximum seconds without progress for the steps in progress."""
        if self._encoding or not self._pace.known or not self._steps:
            return self._step_timeout
        work = max(step.work for step in self._steps)
        return min(self._floor + FACTOR * self._pace.slowest * work, self._step_timeout)

    def _check_progress(self, now: float) -> None:
        still = now - self._progress_at
        if not (self._steps or self._encoding) or still <= self.deadline_s():
            return
        if self._encoding:
            why = f"{_names(sorted(self._encoding))} did not encode a picture in {still:.1f} s (step_timeout)"
            raise RankFailure(why, rank=min(self._encoding), cause="stuck")
        step, limit = self._steps[0], self.deadline_s()
        self._pace = Pace()  # relearn the pace, so that a false alarm does not repeat
        words, cause, ranks = self._explain(step, now)
        why = f"step {step.step_id} made no progress for {still:.1f} s (deadline {limit:.1f} s): {words}"
        raise RankFailure(why, rank=ranks[0], cause=cause)

    def _explain(self, step: _Step, now: float) -> tuple[str, str, list[int]]:
        """Return why a step does not end, in words and as a cause, and the ranks that are probably responsible."""
        missing = sorted(step.missing)
        silent = [rank for rank in missing if (asked := self._ranks[rank].asked_at) is not None and now - asked > DOUBT_S]
        if silent:
            words = f"{_names(silent)} do{'es' if len(silent) == 1 else ''} not answer either: not running, or not to be reached"
            return words, "silent", silent
        inside = [rank for rank in missing if self._ranks[rank].begun >= step.step_id]
        computing = [rank for rank in inside if not self._ranks[rank].waiting]
        if inside and not computing:
            words = f"{_names(inside)} answer{_s(inside)}, and wait{_s(inside)} for another stage: the link to it brings nothing"
            return words, "link", inside
        if len(computing) > 1:
            words = "answer, are inside it, and do not move: a collective is stuck, or the link between them is cut"
            return f"{_names(computing)} {words}", "stuck", computing
        idle = computing or missing
        return f"{_names(idle)} answer{_s(idle)}, but do{'es' if len(idle) == 1 else ''} not move", "stuck", idle


def _names(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))


def _s(ranks: Sequence[int]) -> str:
    return "s" if len(ranks) == 1 else ""
