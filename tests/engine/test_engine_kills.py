"""Ranks that are killed from outside again and again: no request is held to have done it. The clock is not real."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from engines import ready, settings_of, stepped
from scheduler_invariants import check_invariants
from tandem.engine.build_layout import plan_layout
from tandem.engine.engine import Engine
from tandem.errors import RankFailure
from tandem.executors.executor import Executor, Progress
from tandem.protocol.control import NeedPicture, Output, PictureContent, Ready, Refused, Stepped
from tandem.protocol.pictures import EncodePicture, Picture, PictureEncoded
from tandem.protocol.request import EngineRequest, SamplingParams
from tandem.protocol.step import StepPlan
from tandem.testing import tiny_model

MINUTES = 10
CHUNK = 16


class Clock:
    """Seconds that pass when somebody waits."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Killed(Executor):
    """Two ranks that take `step_s` for a step and `start_s` to start, of which one is killed at each of `kills`, and
    whenever they work on what has come to the place of a `killer`."""

    def __init__(self, clock: Clock, step_s: float, start_s: float, kills: Sequence[float]) -> None:
        self.clock, self.step_s, self.start_s = clock, step_s, start_s
        self.kills = deque(kills)
        self.killers: set[str] = set()
        self.plans: deque[StepPlan] = deque()
        self.encoded: list[PictureEncoded] = []
        self.orders: list[StepPlan | EncodePicture] = []
        self.deaths = 0

    def _pass(self, seconds: float) -> None:
        while self.kills and self.kills[0] <= self.clock.now:
            self.kills.popleft()  # nobody was there to be killed
        if self.kills and self.clock.now + seconds >= self.kills[0]:
            self.clock.now = self.kills.popleft()
            self._die()
        self.clock.now += seconds

    def _die(self) -> None:
        self.deaths += 1
        raise RankFailure("rank 1 was killed (SIGKILL)", rank=1, cause="died", blame=bool(self.plans))

    def start(self, progress: Progress | None = None) -> list[Ready]:
        self._pass(self.start_s)
        return [ready(rank) for rank in range(2)]

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        self.orders.append(plan)

    def encode(self, order: EncodePicture) -> None:
        self.orders.append(order)
        self._pass(self.step_s)
        if order.key in self.killers:
            self.deaths += 1
            raise RankFailure("rank 0 crashed (SIGSEGV)", rank=0, cause="died")
        self.encoded.append(PictureEncoded(0, order.key))

    def collect(self, timeout_s: float) -> list[Stepped | PictureEncoded]:
        if self.encoded:
            return [self.encoded.pop()]
        if not self.plans:
            self._pass(0.1)
            return []
        self._pass(self.step_s)
        plan = self.plans[0]
        if self.killers & {*plan.decode, *(op.request_id for op in plan.prefill)}:
            self._die()
        self.plans.popleft()
        return [*stepped(plan, 2)]

    def close(self) -> None:
        self.plans.clear()
        self.encoded.clear()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), config={"max_position_embeddings": 2048})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    one = Clock()
    for module in ("engine", "recovery", "metrics"):
        monkeypatch.setattr(f"tandem.engine.{module}.time", one)
    return one


def an_engine(model: Path, executor: Killed) -> Engine:
    settings = settings_of(
        model, pipeline_parallel_size=2, self_check=False, kv_tokens=8000, prefill_chunk=CHUNK, max_restarts=20
    )
    engine = Engine(settings, plan_layout(settings), executor)
    engine.start()
    return engine


def ask(engine: Engine, name: str, prompt: int, tokens: int) -> None:
    engine.submit(EngineRequest(request_id=name, prompt=[7] * prompt, params=SamplingParams(max_tokens=tokens, ignore_eos=True)))


def serve(engine: Engine, clock: Clock, until: float, rng: random.Random) -> tuple[int, list[str]]:
    """Ten requests at any time, of which one has a prompt that takes longer than the ranks live; how many were
    answered, and which were refused."""
    asked, live, answered, refused = 0, set[str](), 0, list[str]()
    while live or clock.now < until:
        while clock.now < until and len(live) < 10:
            long = not any(name.startswith("long") for name in live)
            name = f"{'long' if long else 'r'}{asked}"
            ask(engine, name, 1500 if long else rng.randint(1, 60), rng.randint(1, 60))
            asked += 1
            live.add(name)
        for message in engine.pump(0.0):
            if isinstance(message, Refused):
                refused.append(message.request_id)
                live.discard(message.request_id)
            elif isinstance(message, Output) and message.finish_reason:
                answered += 1
                live.discard(message.request_id)
        check_invariants(engine.scheduler)
    return answered, refused


@pytest.mark.parametrize(("step_s", "start_s"), [(0.1, 0.5), (0.1, 4.0), (0.5, 2.0)])
def test_a_kill_every_six_seconds_for_ten_minutes_refuses_nobody(
    model: Path, clock: Clock, step_s: float, start_s: float
) -> None:
    first = clock.now + 10
    executor = Killed(clock, step_s, start_s, [first + 6 * i for i in range(10 * MINUTES)])
    engine = an_engine(model, executor)
    answered, refused = serve(engine, clock, first + 60 * MINUTES, random.Random(1))
    assert refused == [] and executor.deaths > 3 * MINUTES and answered > 10


@pytest.mark.parametrize("seed", range(2))
def test_kills_at_random_times_less_than_ten_seconds_apart_refuse_nobody(model: Path, clock: Clock, seed: int) -> None:
    rng = random.Random(seed)
    times = [clock.now + 10]
    while times[-1] < clock.now + 60 * MINUTES:
        times.append(times[-1] + rng.uniform(1, 10))
    executor = Killed(clock, 0.05, 1.0, times)
    engine = an_engine(model, executor)
    _, refused = serve(engine, clock, times[-1] + 20, rng)
    assert refused == [] and executor.deaths > len(times) / 3


def test_a_killer_is_found_and_only_it(model: Path, clock: Clock) -> None:
    executor = Killed(clock, 0.05, 1.0, [])
    executor.killers = {"killer"}
    engine = an_engine(model, executor)
    begun = clock.now
    for i in range(5):
        ask(engine, f"r{i}", 20, 40)
    ask(engine, "killer", 20, 40)
    refused = []
    while not engine.idle:
        refused += [one.request_id for one in engine.pump(0.0) if isinstance(one, Refused)]
    assert refused == ["killer"] and executor.deaths == 4
    assert clock.now - begun < 60, "looking whether ranks die without it takes seconds"


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    vision = {"vision_config": {"model_type": "siglip_vision_model"}}
    return tiny_model(tmp_path_factory.mktemp("seeing"), "gemma3", config=vision)


def show(engine: Engine, name: str, keys: str, size: int = 0) -> None:
    pictures = tuple(Picture(key * 64, 2 + 5 * at, 4, inputs=b"", size=size) for at, key in enumerate(keys))
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    engine.submit(EngineRequest(request_id=name, prompt=[7] * (15 + 5 * len(keys)), params=params, pictures=pictures))


def test_running_sequences_wait_for_one_picture_at_a_time(seeing: Path, clock: Clock) -> None:
    engine = an_engine(seeing, executor := Killed(clock, 0.05, 1.0, []))
    ask(engine, "text", 20, 40)
    while not any(isinstance(one, Output) for one in engine.pump(0.0)):
        pass
    executor.orders.clear()
    for key in "0123":
        show(engine, key, key)
    while not engine.idle:
        engine.pump(0.0)
    pictures = [isinstance(one, EncodePicture) for one in executor.orders]
    assert sum(pictures) == 4 and not any(one and other for one, other in pairwise(pictures))


def test_a_picture_that_kills_the_encoder_is_refused_alone(seeing: Path, clock: Clock) -> None:
    executor = Killed(clock, 0.05, 1.0, [])
    executor.killers = {"f" * 64}
    engine = an_engine(seeing, executor)
    for name, key in (("r0", "0"), ("killer", "f"), ("r1", "1"), ("r2", "f")):
        show(engine, name, key)
    ask(engine, "text", 20, 40)
    ended = {}
    while not engine.idle:
        for one in engine.pump(0.0):
            if isinstance(one, Refused) or (isinstance(one, Output) and one.finish_reason):
                ended[one.request_id] = getattr(one, "code", None)
        check_invariants(engine.scheduler)
    assert ended == {"r0": None, "r1": None, "text": None, "killer": "rank_failure", "r2": "rank_failure"}
    assert executor.deaths <= 6


@pytest.mark.parametrize("seed", range(4))
def test_chunks_have_the_features_of_their_pictures(
    seeing: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Requests with more pictures than ranks may hold, while ranks are killed and sequences preempted. Apis have the inputs,
    which come late, in any order, and not at all where a request is aborted."""
    rng, room = random.Random(seed), 3
    executor = Killed(clock, 0.05, 1.0, [clock.now + 4 + 9 * i for i in range(4)])
    engine = an_engine(seeing, executor)
    monkeypatch.setattr("tandem.engine.pictures.FEATURE_BYTES", room * engine.pictures._bytes(4))
    asked = {str(i): "".join(rng.choices("0123456789abcdef", k=rng.choice((0, 1, 2, 7, 12)))) for i in range(16)}
    for name, keys in asked.items():
        show(engine, name, keys, size=64)
    held, answered, start = set[str](), list[str](), executor.start
    questions, aborted = list[NeedPicture](), set[str]()

    def follow() -> None:
        for order in executor.orders:
            if isinstance(order, EncodePicture):
                assert order.inputs == order.key.encode()
                held.difference_update(order.evicts)
                held.add(order.key)
                assert len(held) <= room
                continue
            for op in order.prefill:
                spans = [(2 + 5 * at, key * 64) for at, key in enumerate(asked[op.request_id])]
                assert {key for at, key in spans if at < op.start + op.count and op.start < at + 4} <= held
        executor.orders.clear()

    def restart(progress: Progress | None = None) -> list[Ready]:
        follow()
        held.clear()
        return start(progress)

    monkeypatch.setattr(executor, "start", restart)
    while not engine.idle:
        messages = engine.pump(0.0)
        answered += [one.request_id for one in messages if isinstance(one, Output) and one.finish_reason]
        questions += [one for one in messages if isinstance(one, NeedPicture)]
        follow()
        check_invariants(engine.scheduler)
        if rng.random() < 0.1:
            engine.scheduler.batches.relieve()
        if questions and len(aborted) < 3 and rng.random() < 0.02:
            aborted.add(questions[-1].request_id)
            engine.abort(questions[-1].request_id)
        if questions and rng.random() < 0.5:
            question = questions.pop(rng.randrange(len(questions)))
            if question.request_id not in aborted:
                engine.pictures.give(PictureContent(question.key, question.key.encode()))
    assert sorted(answered) == sorted(asked.keys() - aborted) and executor.deaths and aborted
