"""Ranks that cannot be replaced at once: what is waited for, what is served meanwhile, and when the engine gives up."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from engines import ready, settings_of, stepped
from scheduler_invariants import check_invariants
from served import wait_until
from tandem.engine import degrade, recovery
from tandem.engine.build_layout import plan_layout
from tandem.engine.engine import Engine
from tandem.engine.engine_process import EngineService
from tandem.errors import BrokenModel, LayoutError, OutOfMemory, RankFailure, TandemError, UnavailableError, UsageError
from tandem.executors.executor import Executor, Progress
from tandem.executors.failure_cause import rank_failure
from tandem.protocol.control import EngineMessage, LoadProgress, Output, Ready, Refused, Stepped
from tandem.protocol.layout import StageSpec
from tandem.protocol.request import EngineRequest, SamplingParams
from tandem.protocol.step import StepPlan
from tandem.scheduler.limits import Limits
from tandem.testing import tiny_model


def missing(rank: int) -> UsageError:
    error = BrokenModel(f"rank {rank}: config.json cannot be read")
    error.rank = rank
    return error


class Machines(Executor):
    """Ranks that answer every step with token 5, on machines that come, go, and cannot start when a test says so."""

    def __init__(self, specs: Sequence[StageSpec]) -> None:
        self.whole = self.laid = list(specs)
        self.places: list[int] | None = None
        self.slots = list(range(len(specs)))
        self.broken: Callable[[list[int]], TandemError | None] = lambda slots: None
        """What goes wrong with ranks in these places."""
        self.starts: list[list[int]] = []
        """The places of every rank group that was to start."""
        self.plans: deque[StepPlan] = deque()
        self.failure: RankFailure | None = None
        self.torn: set[int] = set()
        """Steps in which a rank dies: the others sum what is not there, and sample from that."""

    def start(self, progress: Progress | None = None) -> list[Ready]:
        self.starts.append(self.slots)
        self.plans.clear()
        if self.places is not None and not set(self.slots) <= set(self.places):
            raise RankFailure("machines are missing", cause="host")
        if (error := self.broken(self.slots)) is not None:
            raise error
        return [ready(rank, host=f"host{slot}") for rank, slot in enumerate(self.slots)]

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)

    def collect(self, timeout_s: float) -> list[Stepped]:
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure
        if not self.plans:
            return []
        plan = self.plans.popleft()
        ranks = len(self.slots)
        return stepped(plan, ranks - 1, 6) if plan.step_id in self.torn else stepped(plan, ranks)

    def present(self) -> list[int] | None:
        return self.places

    def relay(self, specs: Sequence[StageSpec], slots: Sequence[int] | None) -> None:
        self.laid, self.slots = list(specs), list(range(len(self.whole)) if slots is None else slots)

    def close(self) -> None:
        self.plans.clear()


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "BACKOFF_S", 0.001)
    monkeypatch.setattr(recovery, "WAIT_S", 0.001)
    monkeypatch.setattr(degrade, "SEEK_S", 0.0)
    monkeypatch.setattr(degrade, "AGAIN_S", 0.0)


def an_engine(model: Path, ranks: int = 3, max_restarts: int = 5) -> tuple[Engine, Machines]:
    settings = settings_of(model, pipeline_parallel_size=ranks, self_check=False, max_restarts=max_restarts, kv_tokens=2000)
    layout = plan_layout(settings)
    machines = Machines(layout.ranks)
    engine = Engine(settings, layout, machines)
    engine.start()
    return engine, machines


def ask(engine: Engine, tokens: int = 20) -> None:
    engine.submit(EngineRequest(request_id="a", prompt=[7, 8], params=SamplingParams(max_tokens=tokens, ignore_eos=True)))


def finish(engine: Engine) -> list[int]:
    produced: list[int] = []
    for _ in range(1000):
        for message in engine.pump(0.0):
            assert isinstance(message, Output), message
            produced += message.tokens
        if engine.idle:
            return produced
    raise AssertionError("it does not end")


def die(rank: int = 1) -> RankFailure:
    return RankFailure(f"rank {rank} was killed (SIGKILL)", rank=rank, cause="died")


def test_what_comes_of_a_step_in_which_a_rank_died_does_not_count(model: Path) -> None:
    engine, machines = an_engine(model)
    ask(engine)
    machines.torn = {3, 4}
    for _ in range(12):
        engine.pump(0.0)
    assert engine.scheduler.sequences["a"].produced == 3
    machines.failure = die()
    assert finish(engine)[-17:] == [5] * 17
    assert engine.restarts == 1


@pytest.mark.parametrize(
    "error",
    [missing(1), OutOfMemory("too little memory"), LayoutError("no cable"), UsageError("the disk is full")],
    ids=lambda error: type(error).__name__,
)
def test_a_mistake_that_ranks_find_once_they_have_served_is_waited_for(model: Path, error: UsageError) -> None:
    engine, machines = an_engine(model)
    ask(engine)
    left = [error, error, None]
    machines.broken = lambda slots: left.pop(0)
    said: list[tuple[str, str]] = []
    engine.rank_group.on_wait = lambda: said.append((engine.state, engine.rank_group.detail))
    machines.failure = die()
    assert finish(engine) == [5] * 20
    assert len(machines.starts) == 4 and engine.state == "ready" and engine.restarts == 3
    waiting = [detail for state, detail in said if "next try in" in detail]
    assert waiting and error.message in waiting[-1] and "failure 3 in a row, max_restarts is 5" in waiting[-1]
    assert {state for state, _ in said} == {"recovering"}


def test_no_token_is_lost_while_the_files_are_away(model: Path) -> None:
    engine, machines = an_engine(model)
    ask(engine, 40)
    produced: list[int] = []
    timed: list[int] = []
    left: list[UsageError | None] = [missing(0), missing(2), None]
    machines.broken = lambda slots: left.pop(0)
    for step in range(200):
        if step == 7:
            machines.failure = die()
        for message in engine.pump(0.0):
            assert isinstance(message, Output)
            if message.timing is not None:
                timed.append(len(produced))
            produced += message.tokens
    assert produced == [5] * 40
    assert len(timed) == 2 and timed[0] == 0 < timed[1], "the api hears of the first wait, and of the replay"


def test_limits_that_were_halved_for_a_full_memory_grow_back(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, machines = an_engine(model)
    whole = engine.scheduler.limits
    ask(engine, 400)

    def full() -> None:
        machines.failure = RankFailure("rank 1: Insufficient Memory", rank=1, cause="memory")
        while machines.failure is not None:
            engine.pump(0.0)

    clock, passed = time.monotonic, 0.0
    monkeypatch.setattr(time, "monotonic", lambda: clock() + passed)
    full()
    full()
    assert engine.scheduler.limits.kv_tokens == whole.kv_tokens // 4
    passed += degrade.WIDEN_S + 1
    engine.pump(0.0)
    assert engine.scheduler.limits.kv_tokens == whole.kv_tokens // 4, "it was full again: later"
    passed += degrade.WIDEN_S
    engine.pump(0.0)
    assert engine.scheduler.limits.kv_tokens == whole.kv_tokens // 2
    passed += 2 * degrade.WIDEN_S
    engine.pump(0.0)
    assert engine.scheduler.limits == whole
    check_invariants(engine.scheduler)
    passed += 10 * degrade.WIDEN_S
    engine.pump(0.0)
    full()
    assert engine.scheduler.limits.kv_tokens == whole.kv_tokens // 2
    finish(engine)


def test_at_the_first_start_it_is_final(model: Path) -> None:
    settings = settings_of(model, pipeline_parallel_size=2, self_check=False)
    layout = plan_layout(settings)
    machines = Machines(layout.ranks)
    machines.broken = lambda slots: missing(1)
    with pytest.raises(BrokenModel):
        Engine(settings, layout, machines).start()
    assert len(machines.starts) == 1


def test_what_does_not_come_back_ends_the_engine_after_max_restarts_and_clients_are_told(model: Path) -> None:
    engine, machines = an_engine(model, max_restarts=3)
    ask(engine)
    engine.pump(0.0)
    machines.broken = lambda slots: missing(1)
    machines.failure = die()
    with pytest.raises(RankFailure, match="gave up after 4 failures in a row.*config.json cannot be read") as gave_up:
        finish(engine)
    assert len(machines.starts) == 1 + 3 and engine.state == "failed"
    messages = engine.failures(gave_up.value)
    assert [one.status for one in messages if isinstance(one, Refused)] == [503]
    with pytest.raises(UnavailableError):
        ask(engine)


def test_an_engine_that_loses_a_rank_while_it_drains_goes_on_draining(model: Path) -> None:
    engine, machines = an_engine(model)
    ask(engine)
    engine.drain()
    machines.failure = die()
    assert finish(engine) == [5] * 20
    assert (engine.state, engine.restarts) == ("draining", 1)
    with pytest.raises(UnavailableError, match="draining"):
        ask(engine)


def test_a_rank_group_that_loses_a_rank_while_it_starts_for_the_first_time_stays_starting(model: Path) -> None:
    """`recovering` would mean that requests are queued."""
    settings = settings_of(model, pipeline_parallel_size=2, self_check=False)
    layout = plan_layout(settings)
    machines = Machines(layout.ranks)
    left: list[TandemError | None] = [die(0), None]
    machines.broken = lambda slots: left.pop(0)
    engine = Engine(settings, layout, machines)
    states: list[str] = []
    engine.rank_group.on_wait = lambda: states.append(engine.state)
    engine.start()
    assert states == ["starting"] and engine.state == "ready"


def test_a_machine_whose_rank_cannot_start_is_done_without_and_tried_again(model: Path) -> None:
    """It has rejoined after a reboot, before the disk with the model was mounted."""
    engine, machines = an_engine(model)
    machines.places = [0, 1, 2]
    ask(engine, 60)
    machines.broken = lambda slots: missing(1) if 1 in slots else None
    machines.failure = die()
    produced: list[int] = []
    for _ in range(10):
        produced += [token for one in engine.pump(0.0) if isinstance(one, Output) for token in one.tokens]
    assert engine.rank_group.degraded.endswith("rank 1: config.json cannot be read")
    assert machines.starts[1:3] == [[0, 1, 2]] * 2 and 1 not in machines.starts[3]
    assert [0, 1, 2] in machines.starts[4:], "all of them are tried again"
    assert engine.state == "ready" and 1 not in machines.slots, "and it serves as before when they cannot start"
    machines.broken = lambda slots: None
    produced += finish(engine)
    assert machines.slots == [0, 1, 2] and engine.rank_group.degraded == ""
    assert produced == [5] * 60


def test_a_machine_whose_gpu_does_not_answer_is_lost_until_it_has_been_away(model: Path) -> None:
    """Its processes run and its node agent answers: nothing but a restart frees the GPU."""
    engine, machines = an_engine(model)
    ask(engine, 60)
    engine.pump(0.0)
    machines.places = [0, 1, 2]
    machines.broken = lambda slots: (
        rank_failure(slots.index(1), "GpuSilent", "its GPU does not answer; restart that machine") if 1 in slots else None
    )
    machines.failure = die()
    for _ in range(10):
        engine.pump(0.0)
    assert "of 3 ranks: rank 1: its GPU does not answer; restart that machine" in engine.rank_group.degraded
    assert 1 not in machines.starts[-1]
    tries = len(machines.starts)
    for _ in range(10):
        engine.pump(0.0)
    assert len(machines.starts) == tries  # nobody asks that GPU again
    machines.places = [0, 2]
    engine.pump(0.0)
    machines.places, machines.broken = [0, 1, 2], lambda slots: None
    assert finish(engine)
    assert machines.starts[-1] == [0, 1, 2] and not engine.rank_group.degraded
    assert engine.metrics.failures.labels("gpu")._value.get() == 1


def test_requests_come_and_go_while_the_planner_looks_for_a_layout(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, machines = an_engine(model)
    ask(engine)
    begun, heard, plan = threading.Event(), threading.Event(), degrade.plan

    def slow(*given: Any) -> Any:
        begun.set()
        assert heard.wait(240), "the engine heard nothing meanwhile"
        return plan(*given)

    monkeypatch.setattr(degrade, "plan", slow)
    engine.rank_group.on_wait = lambda: heard.set() if begun.is_set() else None
    machines.places = [0, 2]
    machines.failure = RankFailure("machines are missing", cause="host")
    assert finish(engine) == [5] * 20
    assert begun.is_set() and engine.rank_group.degraded


def test_another_of_the_smaller_layouts_is_tried_when_one_cannot_start(model: Path) -> None:
    engine, machines = an_engine(model)
    ask(engine)
    machines.places = [0, 2]
    refused: list[tuple[tuple[int, ...], ...]] = []

    def broken(slots: list[int]) -> TandemError | None:
        shape = tuple(spec.layers for spec in machines.laid)
        if not refused:
            refused.append(shape)
            return OutOfMemory("no room for the draft model")
        return OutOfMemory("no room for the draft model") if shape in refused else None

    machines.failure = RankFailure("machines are missing", cause="host")
    machines.broken = broken
    assert finish(engine) == [5] * 20
    assert engine.rank_group.degraded.endswith("machines are missing"), "not: no room for the draft model"
    assert tuple(spec.layers for spec in machines.laid) not in refused


@pytest.mark.parametrize(("answered", "counted"), [(True, "request_success_total"), (False, "request_aborted_total")])
def test_a_stop_string_is_no_client_who_gives_up(model: Path, answered: bool, counted: str) -> None:
    engine, _ = an_engine(model, ranks=2)
    ask(engine)
    engine.pump(0.0)
    assert engine.abort("a", answered=answered) and not engine.abort("a", answered=answered)
    lines = [line for line in engine.metrics.text().decode().splitlines() if line.endswith(" 1.0")]
    counters = [line.partition("{")[0].split()[0] for line in lines if line.startswith("tandem_request_")]
    assert [name for name in counters if name.endswith("_total")] == [f"tandem_{counted}"]


def test_refusals_reach_whoever_takes_messages_while_ranks_are_replaced(tmp_path: Path) -> None:
    engine, machines = an_engine(tiny_model(tmp_path, config={"max_position_embeddings": 4096}), ranks=2)
    ask(engine, 1500)
    taken: list[EngineMessage] = []
    engine.rank_group.on_wait = lambda: taken.extend(engine.take_messages())
    # Half of the KV cache is left after this.
    machines.failure = RankFailure("its GPU's memory is full", rank=1, cause="memory")
    taken += engine.pump(0.0)
    assert [one.code for one in taken if isinstance(one, Refused)] == ["degraded"]
    assert engine.idle


def test_a_whole_layout_that_fails_its_self_check_leaves_the_limits_of_the_smaller_one(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, machines = an_engine(model)
    machines.places = [0, 2]
    machines.failure = RankFailure("machines are missing", cause="host")
    engine.pump(0.0)
    smaller = engine.scheduler.limits
    assert smaller.micro_batches < 3

    def self_check(limits: Limits, first_step: int) -> int:
        if limits.micro_batches == 3:
            raise die()
        return first_step

    monkeypatch.setattr(engine.rank_group, "_self_check", self_check)
    machines.places = [0, 1, 2]
    engine.pump(0.0)
    assert machines.starts[-2:] == [[0, 1, 2], machines.slots] and engine.rank_group.degraded
    assert engine.scheduler.limits == smaller


def test_an_engine_that_is_told_to_end_does_not_wait_for_what_is_away(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "BACKOFF_S", 100.0)
    settings = settings_of(model, pipeline_parallel_size=2, self_check=False, engine_socket=str(tmp_path / "engine.sock"))
    service = EngineService(settings)
    machines = Machines(service._engine.layout.ranks)
    service._engine.rank_group.executor = machines
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(service.run(lambda message: None)))
    thread.start()
    try:
        wait_until(lambda: service._engine.state == "ready")
        machines.broken = lambda slots: missing(1)
        machines.failure = die()
        wait_until(lambda: "next try in" in service._ipc_server.status.detail)
        assert service._ipc_server.status.state == "recovering"
    finally:
        service.stop()
        thread.join(240)
    assert codes == [0] and not thread.is_alive()


def test_how_far_ranks_have_loaded_is_in_the_status_until_they_serve(model: Path, tmp_path: Path) -> None:
    service = EngineService(settings_of(model, engine_socket=str(tmp_path / "engine.sock")))
    try:
        service._loading(0, 2, 8, "load")
        assert service._ipc_server.status.loading == [LoadProgress(0, 2, 8, "load")]
        service.serving = True
        service._publish()
        assert service._ipc_server.status.loading == []
    finally:
        service._engine.close()
        service._ipc_server.close()


def test_the_history_tells_of_lost_ranks_and_fewer_machines(model: Path) -> None:
    engine, machines = an_engine(model)
    ask(engine)
    lost: list[list[str]] = []
    engine.rank_group.on_wait = lambda: lost.append([rank.state for rank in engine.status().ranks])
    machines.places, machines.slots = [0, 2], machines.slots
    machines.failure = RankFailure("host1 is not in the network", rank=1, cause="host")
    assert finish(engine) == [5] * 20
    assert ["waiting", "lost", "waiting"] in lost
    kinds = [one.kind for one in engine.status().events]
    assert kinds[:1] == ["rank_lost"] and kinds[-2:] == ["layout_degraded", "ranks_replaced"], kinds
    [first, *_] = engine.status().events
    assert first.rank == 1 and "host1 is not in the network" in first.text and "taken in again" in first.remedy
    machines.places = [0, 1, 2]
    ask(engine, 5)
    finish(engine)
    assert [one.kind for one in engine.status().events][-2:] == ["layout_restored", "ranks_replaced"]
    assert {rank.state for rank in engine.status().ranks} == {"ready"}
