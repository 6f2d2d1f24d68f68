"""Room for KV: by the machine that ranks share, not by its name, and less what each keeps for reuse; and what is done
when a device fills up all the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest

import engines
from engines import settings_of
from tandem.config.settings import SchedulerSettings, Settings, SpeculationSettings
from tandem.engine import sizing
from tandem.engine.build_layout import plan_layout
from tandem.engine.engine import Engine
from tandem.engine.sizing import MemoryGuard, make_limits
from tandem.errors import OutOfMemory
from tandem.executors import assembly, inline
from tandem.loading.memory import Wired
from tandem.log import Seldom
from tandem.protocol.control import Output, Ready, Stepped
from tandem.protocol.request import EngineRequest, SamplingParams
from tandem.protocol.step import RankStep
from tandem.testing import tiny_model

GIB = 2**30


def ready(rank: int, machine: str, **changes) -> Ready:
    return engines.ready(
        rank,
        **{
            "weight_bytes": 60 * GIB,
            "kv_bytes_per_token": 2**18,
            "memory_bytes": 96 * GIB,
            "gpu": True,
            "host": "Mac",
            "machine": machine,
            **changes,
        },
    )


def room(*ranks: Ready, fraction: float = 0.85, drafts: int = 0) -> int:
    layout = SimpleNamespace(
        max_context=1 << 20,
        micro_batches=1,
        ranks=[SimpleNamespace(stages=2, drafts=drafts, mtp=False)],
        description=SimpleNamespace(eos_token_ids=(), vocab_size=9, whole_pictures=False, hidden_size=8),
    )
    settings = Settings(scheduler=SchedulerSettings(memory_fraction=fraction))
    return make_limits(settings, layout, ranks, shrink=False).kv_tokens


def test_two_macs_with_one_name_have_memory_each():
    assert room(ready(0, "a"), ready(1, "b")) == int((0.85 * 96 - 60) * GIB) // 2**18


def test_two_ranks_of_one_mac_share_it_though_its_name_changed_between_their_starts():
    with pytest.raises(OutOfMemory):
        room(ready(0, "a"), ready(1, "a", host="Mac.lan"))


def test_buffers_that_are_kept_for_reuse_have_room_in_what_is_left_over():
    kept = ready(0, "a", cache_bytes=2 * GIB)
    assert room(ready(0, "a")) == room(kept)
    assert room(ready(0, "a"), fraction=0.99) - room(kept, fraction=0.99) == int((0.99 * 96 - 94) * GIB) // 2**18


@pytest.mark.parametrize(
    ("heads", "metal", "drafts"), [(32, True, 5), (64, True, 3), (128, True, 1), (256, True, None), (256, False, 5)]
)
def test_drafts_are_no_more_than_metals_fused_attention_takes(heads: int, metal: bool, drafts: int | None) -> None:
    layout = SimpleNamespace(
        max_context=64,
        micro_batches=1,
        ranks=[SimpleNamespace(stages=2, drafts=0, mtp=False)],
        description=SimpleNamespace(
            eos_token_ids=(), vocab_size=9, whole_pictures=False, num_heads=heads, num_kv_heads=8, hidden_size=64
        ),
    )
    settings = Settings(speculation=SpeculationSettings(speculative_method="ngram", num_speculative_tokens=5))
    limits = make_limits(settings, layout, [ready(0, "a", metal=metal), ready(1, "b", metal=metal)], shrink=False)
    assert (limits.speculation.drafts if limits.speculation else None) == drafts
    assert limits.prefill_doubling == (6 * 64 if metal else 0), "on CUDA each size of a chunk costs"


def test_a_stage_of_states_alone_has_room_for_as_many_bytes_of_prefixes(monkeypatch, caplog):
    layout = SimpleNamespace(
        max_context=1 << 20,
        micro_batches=1,
        ranks=[SimpleNamespace(stages=2, drafts=0, mtp=False)],
        description=SimpleNamespace(eos_token_ids=(), vocab_size=9, whole_pictures=False, hidden_size=8),
    )
    ranks = (ready(0, "a", state_bytes=2**21), ready(1, "b", state_bytes=2**22, kv_bytes_per_token=0, weight_bytes=76 * GIB))
    limits = make_limits(Settings(), layout, ranks, shrink=False)
    assert limits.prefix_extra == 2**22 // 2**18, "positions of the rank that keeps some"
    free = 0.85 * 96 * GIB - 76 * GIB - 32 * 2**22
    assert 0.99 < limits.prefix_tokens * 2**18 / free <= 1, "what the rank with least memory has room for"
    monkeypatch.setattr(sizing, "seldom", Seldom(sizing.log))
    for _ in range(2):
        make_limits(Settings(scheduler=SchedulerSettings(kv_tokens=100)), layout, ranks, shrink=False)
    [record] = caplog.records
    assert "takes the memory of at least 48 tokens of KV, and 30 are set aside" in record.getMessage()


def test_with_drafts_states_take_twice_their_memory():
    sequences = (room(ready(0, "a")) - room(ready(0, "a", state_bytes=2**28))) >> 10
    assert sequences == 33, "32 rows and a prompt"
    assert (room(ready(0, "a")) - room(ready(0, "a", state_bytes=2**28), drafts=5)) >> 10 == 2 * sequences


@pytest.mark.parametrize(("wired", "limit"), [("auto", None), ("off", 0)])
def test_weights_are_wired_once_when_they_are_there_and_before_anything_else_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wired: str, limit: int | None
) -> None:
    """On a Mac, whose part of it tests/loading/test_loading_memory.py has; here when a rank asks for it."""
    asked: list[tuple[int | None, float]] = []
    loaded: list[int] = []
    sizes: list[int] = []

    def wire(arrays: list[mx.array], wanted: int | None, share: float) -> Wired:
        asked.append((wanted, share))
        loaded.append(mx.get_active_memory())
        sizes.append(sum(array.nbytes for array in arrays))
        return Wired(4711, "macOS 14 wires no memory")

    monkeypatch.setattr(assembly, "wire_weights", wire)
    settings = settings_of(tiny_model(tmp_path / "tiny"), wired=wired, kv_tokens=4000)
    engine = Engine(settings, plan_layout(settings))
    try:
        engine.start()
        assert asked == [(limit, settings.scheduler.memory_fraction)]
        [rank] = engine.status().ranks
        assert (rank.wired_bytes, rank.wiring) == (4711, "macOS 14 wires no memory")
        assert sizes[0] >= rank.weight_bytes
        assert loaded[0] >= rank.weight_bytes
    finally:
        engine.close()


# ---- while it serves


class Device:
    """Ranks whose device is as full as a test says, on the executor that computes for real."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
        self.share = 0.1
        monkeypatch.setattr(inline, "memory_use", lambda: (0, int(self.share * self.memory)))
        settings = settings_of(model, kv_tokens=4000, prefill_chunk=64)
        self.engine = Engine(settings, plan_layout(settings))
        self.engine.start()
        self.memory = self.engine.rank_group.ready[0].memory_bytes
        self.tokens: dict[str, list[int]] = {}

    def ask(self, *names: str, length: int = 40) -> None:
        for name in names:
            self.engine.submit(
                EngineRequest(
                    request_id=name,
                    prompt=[*range(10, 10 + length), ord(name)],
                    params=SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True),
                )
            )

    def pump(self, until: Callable[[], bool]) -> None:
        for _ in range(2000):
            if until():
                return
            for message in self.engine.pump(0.1):
                assert isinstance(message, Output)
                self.tokens.setdefault(message.request_id, []).extend(message.tokens)
        raise AssertionError("it does not come about")

    def results(self, count: int) -> None:
        """Let so many tokens come."""
        wanted = sum(map(len, self.tokens.values())) + count
        self.pump(lambda: sum(map(len, self.tokens.values())) >= wanted or self.engine.idle)


def test_a_device_that_fills_up_is_relieved_and_every_answer_is_as_if_it_had_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    device = Device(monkeypatch, tiny_model(tmp_path / "tiny"))
    engine, scheduler = device.engine, device.engine.scheduler
    try:
        device.ask("a", "b", "c", "d")
        device.pump(lambda: engine.idle)
        calm, device.tokens = device.tokens, {}
        assert not scheduler.batches.pressed and scheduler.prefixes.positions > 0

        device.ask("a", "b")
        device.results(4)
        device.share = 0.9
        device.results(4)
        device.ask("c", "d")
        device.results(6)
        assert scheduler.batches.pressed and scheduler.prefixes.positions == 0
        assert scheduler.batches.running == 2 and len(scheduler.waiting) == 2 and scheduler.batches.preemptions == 0

        device.share = 0.96
        device.pump(lambda: scheduler.batches.preemptions == 1)
        device.results(6)
        assert scheduler.batches.running == 1 and scheduler.batches.preemptions == 1, "one alone goes on"

        device.share = 0.86  # below what a full KV cache may take, but only just
        device.results(4)
        assert scheduler.batches.pressed
        device.share = 0.5
        device.pump(lambda: engine.idle)
        assert device.tokens == calm and not scheduler.batches.pressed
        assert "90 % full: dropping cached prefixes and buffers" in caplog.text
        assert "96 % full: preempting a request" in caplog.text
        assert [rank.used_bytes for rank in engine.status().ranks] == [int(0.5 * device.memory)]
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("fraction", "share", "pressed"),
    [(0.85, 0.87, False), (0.85, 0.881, True), (0.5, 0.84, False), (0.5, 0.851, True), (1.0, 0.94, False), (1.0, 0.951, True)],
)
def test_what_the_kv_cache_may_take_is_no_trouble(fraction: float, share: float, pressed: bool) -> None:
    scheduler = SimpleNamespace(batches=SimpleNamespace(pressed=False, relieve=lambda: False))
    guard = MemoryGuard(fraction)
    ranks = [ready(0, "a"), ready(1, "a"), ready(2, "b")]  # two of them share a device
    for rank, used in enumerate((share / 2, share / 2, 0.4)):
        guard.watch(ranks, Stepped(RankStep(rank, 1, 0.0, 0), used_bytes=round(used * 96 * GIB)), scheduler)
    assert scheduler.batches.pressed is pressed


def test_what_a_request_leaves_is_waited_for_before_another_has_to_leave() -> None:
    left: list[int] = []
    batches = SimpleNamespace(pressed=False, relieve=lambda: left.append(step) or True)
    scheduler = SimpleNamespace(batches=batches, next_step=5, limits=SimpleNamespace(micro_batches=2))
    guard, ranks = MemoryGuard(0.85), [ready(0, "a")]
    for step in range(4, 8):
        guard.watch(ranks, Stepped(RankStep(0, step, 0.0, 0), used_bytes=96 * GIB), scheduler)
    assert left == [4, 7], "two micro-batches' steps were under way"
