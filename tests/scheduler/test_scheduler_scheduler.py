"""The scheduler as a pure state machine: random histories, with every invariant checked after every event."""

from __future__ import annotations

import random
import struct
from collections import deque
from typing import Any

import pytest
from msgspec.structs import replace

from scheduler_invariants import check_invariants, make_limits
from tandem.errors import RequestError
from tandem.kv.index import block_hashes, disk_block_names
from tandem.protocol.control import Output, Refused
from tandem.protocol.kv_blocks import BLOCK_SIZE, Survey
from tandem.protocol.logprobs import PromptLogprobs, joined
from tandem.protocol.request import EngineRequest, SamplingParams, StructuredOutputs
from tandem.protocol.step import StepPlan, StepResult
from tandem.scheduler.micro_batch import PATIENCE
from tandem.scheduler.scheduler import Scheduler

EOS = 0


def request(name: str, prompt: int = 4, **params: object) -> EngineRequest:
    return EngineRequest(request_id=name, prompt=[1] * prompt, params=SamplingParams(**params))  # type: ignore[arg-type]


def pooled(name: str, prompt: int = 4, pooling: Any = "last") -> EngineRequest:
    return EngineRequest(request_id=name, prompt=[1] * prompt, params=SamplingParams(max_tokens=0), pooling=pooling)


def answer(scheduler: Scheduler, plan: StepPlan, token: int = 5) -> list[object]:
    return list(scheduler.update(StepResult(plan.step_id, plan.micro_batch, [token] * len(plan.sampled()))))


def drain(scheduler: Scheduler, token: int = 5) -> dict[str, list[int]]:
    """Run until nothing is left; the tokens of each request."""
    got: dict[str, list[int]] = {}
    plans: deque[StepPlan] = deque()
    for _ in range(10_000):
        while (plan := scheduler.next_plan()) is not None:
            plans.append(plan)
        if not plans:
            return got
        for message in answer(scheduler, plans.popleft(), token):
            assert isinstance(message, Output)
            got.setdefault(message.request_id, []).extend(message.tokens)
        check_invariants(scheduler)
    raise AssertionError("the scheduler does not come to rest")


def scored(first: int, count: int, k: int) -> PromptLogprobs:
    """Of the tokens `first` and those after it; the most likely ones are their positions too."""
    places = range(first, first + count)
    tops = [place for place in places for _ in range(k)]
    return PromptLogprobs(
        k,
        struct.pack(f"<{count}f", *places),
        struct.pack(f"<{count}i", *places),
        struct.pack(f"<{count * k}f", *tops),
        struct.pack(f"<{count * k}i", *tops),
    )


def check(brought: list[PromptLogprobs], length: int, k: int | None) -> None:
    """All places but the first, in their order; nothing for one that did not ask."""
    if k is None:
        assert not brought
        return
    [found] = brought
    assert [(one.logprob, one.rank) for one in found] == [(place, place) for place in range(1, length)]
    assert [one.top for one in found] == [[(place, float(place))] * k for place in range(1, length)]


@pytest.mark.parametrize("seed", range(30))
def test_random_histories_answer_every_request_and_keep_the_invariants(seed: int) -> None:
    """Log probabilities of a prompt come whole and once: each stands for its position here."""
    rng = random.Random(seed)
    scheduler = Scheduler(
        make_limits(
            micro_batches=rng.choice([1, 2, 3]),
            stages=rng.choice([1, 2, 4]),
            max_batch_size=rng.choice([1, 4, 8]),
            prefill_chunk=rng.choice([1, 5, 64]),
            kv_tokens=rng.choice([200, 400, 100_000]),
            max_context=190,
            prefix_tokens=rng.choice([0, 1000]),
        )
    )
    live: set[str] = set()
    plans: deque[StepPlan] = deque()
    asked: dict[str, EngineRequest] = {}
    brought: dict[str, list[PromptLogprobs]] = {}
    for _ in range(20_000):
        if len(asked) < 60 and rng.random() < 0.3:
            name, form = f"r{len(asked)}", rng.choice([None, None, StructuredOutputs(json_object=True)])
            scores = rng.choice([None, 0, 2])
            params = {
                "max_tokens": rng.randint(1 if scores is None else 0, 60),
                "structured_outputs": form,
                "prompt_logprobs": scores,
            }
            asked[name] = (
                request(name, rng.randint(1, 130), **params)
                if rng.random() < 0.7
                else pooled(name, rng.randint(1, 190), rng.choice(["last", "mean"]))
            )
            scheduler.submit(replace(asked[name], group=rng.choice("abc"), weight=rng.choice([1.0, 3.0])), seed=1)
            live.add(name)
            brought[name] = []
        if live and rng.random() < 0.03:
            name = rng.choice(sorted(live))
            assert scheduler.abort(name)
            live.remove(name)
        if rng.random() < 0.01:
            live -= {message.request_id for message in scheduler.restart() if isinstance(message, Refused)}
            plans.clear()
        if (compiled := scheduler.compiling) is not None and rng.random() < 0.1:
            compiled.awaits_grammar = False
        plan = scheduler.next_plan()
        if plan:
            plans.append(plan)
            assert not any(scheduler.sequences[one].awaits_grammar for one in plan.sampled())
        elif plans:
            plan = plans.popleft()
            tokens = [rng.choice([EOS] + [5] * 30) for _ in plan.sampled()]
            vectors = dict.fromkeys(plan.ended(), b"1234")
            found = {
                op.request_id: scored(
                    op.start + 1, min(op.count, len(asked[op.request_id].prompt) - 1 - op.start), op.prompt_logprobs
                )
                for op in plan.prefill
                if op.prompt_logprobs is not None
            }
            for message in scheduler.update(
                StepResult(plan.step_id, plan.micro_batch, tokens, vectors=vectors, prompt_logprobs=found)
            ):
                assert isinstance(message, Output) and message.request_id in live
                if message.prompt_logprobs is not None:
                    brought[message.request_id].append(message.prompt_logprobs)
                if message.finish_reason:
                    live.remove(message.request_id)
                    one = asked[message.request_id]
                    check(brought[message.request_id], len(one.prompt), one.params.prompt_logprobs)
        check_invariants(scheduler)
        if len(asked) == 60 and not live and scheduler.idle:
            assert not scheduler.fair_queue._groups, "no account is left"
            return
    raise AssertionError(f"never done: {live}")


def test_plans_go_out_before_results_are_back_but_only_two_of_them() -> None:
    scheduler = Scheduler(make_limits())
    scheduler.submit(request("a", max_tokens=10), seed=1)
    first, second = scheduler.next_plan(), scheduler.next_plan()
    assert first and first.sampled() == ["a"] and first.prefill[0].last
    assert second and second.decode == ["a"]
    assert scheduler.next_plan() is None


def test_a_sequence_that_stops_is_removed_a_step_late_and_its_surplus_token_dropped() -> None:
    scheduler = Scheduler(make_limits())
    scheduler.submit(request("a", max_tokens=10), seed=1)
    first, second = scheduler.next_plan(), scheduler.next_plan()
    assert first and second
    [message] = answer(scheduler, first, EOS)
    assert isinstance(message, Output) and message.finish_reason == "stop" and message.stop_token
    third = scheduler.next_plan()
    assert third and third.removes == ["a"] and not third.decode
    assert answer(scheduler, second, 7) == []
    assert answer(scheduler, third) == []
    assert scheduler.idle


def test_no_step_is_spent_beyond_max_tokens() -> None:
    scheduler = Scheduler(make_limits())
    scheduler.submit(request("a", max_tokens=2), seed=1)
    first, second, third = (scheduler.next_plan() for _ in range(3))
    assert first and second and third is None
    answer(scheduler, first)
    last = scheduler.next_plan()
    assert last and last.removes == ["a"] and not last.sampled()


def test_a_long_prompt_stalls_running_streams_for_one_chunk_at_most() -> None:
    scheduler = Scheduler(make_limits(prefill_chunk=16))
    scheduler.submit(request("stream", max_tokens=100), seed=1)
    plan = scheduler.next_plan()
    assert plan
    answer(scheduler, plan)
    scheduler.submit(request("long", 300, max_tokens=1), seed=1)
    chunks = []
    while not chunks or not chunks[-1].last:
        plan = scheduler.next_plan()
        assert plan and plan.decode == ["stream"], "every step advances the stream"
        assert sum(op.count for op in plan.prefill) <= 16
        chunks += plan.prefill
        answer(scheduler, plan)
    assert [chunk.start for chunk in chunks] == list(range(0, 300, 16))


def test_the_chunks_of_one_prompt_fill_all_stages() -> None:
    scheduler = Scheduler(make_limits(prefill_chunk=16, micro_batches=3, stages=3))
    scheduler.submit(request("long", 300, max_tokens=1), seed=1)
    plans = _sent(scheduler)
    assert [plan.prefill[0].start for plan in plans] == [0, 16, 32, 48], "one more than there are stages"
    answer(scheduler, plans[0])
    assert [plan.prefill[0].start for plan in _sent(scheduler)] == [64]


def test_streams_decode_between_the_chunks_that_fill_the_stages_as_soon_as_their_token_is_back() -> None:
    scheduler = Scheduler(make_limits(prefill_chunk=16, micro_batches=1, stages=2))
    scheduler.submit(request("stream", max_tokens=100), seed=1)
    answer(scheduler, _sent(scheduler)[0])
    while scheduler.under_way:
        answer(scheduler, scheduler._under_way[min(scheduler._under_way)])
    scheduler.submit(request("long", 300, max_tokens=1), seed=1)
    under_way, decoded, chunks = deque(_sent(scheduler)), 0, 0
    while not any(op.last for plan in under_way for op in plan.prefill):
        assert sum(bool(plan.prefill) for plan in under_way) == 3
        assert sum(bool(plan.decode) for plan in under_way) == 1, "its token is known to one plan at most"
        plan = under_way.popleft()
        assert plan.pause == (not plan.decode)
        decoded, chunks = decoded + bool(plan.decode), chunks + bool(plan.prefill)
        answer(scheduler, plan)
        under_way += _sent(scheduler)
    assert decoded >= chunks // 3 > 0


def _sent(scheduler: Scheduler) -> list[StepPlan]:
    """All plans that can be sent now."""
    plans = []
    while (plan := scheduler.next_plan()) is not None:
        plans.append(plan)
    return plans


def test_short_prompts_overtake_a_long_one_but_not_for_ever() -> None:
    scheduler = Scheduler(make_limits(prefill_chunk=16, max_batch_size=100))
    scheduler.submit(request("long", 320, max_tokens=1), seed=1)
    first = scheduler.next_plan()
    assert first
    answer(scheduler, first)
    waits = longest = 0
    for i in range(40):
        scheduler.submit(request(f"s{i}", 16, max_tokens=1), seed=1)
        plan = scheduler.next_plan()
        assert plan
        if i == 0:
            assert [op.request_id for op in plan.prefill] == ["s0"]
        waits = 0 if any(op.request_id == "long" for op in plan.prefill) else waits + 1
        longest = max(longest, waits)
        answer(scheduler, plan)
    assert 0 < longest <= PATIENCE


def test_micro_batches_share_the_requests_and_take_turns() -> None:
    scheduler = Scheduler(make_limits(micro_batches=2))
    for i in range(4):
        scheduler.submit(request(f"r{i}", max_tokens=5), seed=1)
    plans = [scheduler.next_plan() for _ in range(4)]
    micro_batches = [plan.micro_batch for plan in plans if plan]
    assert set(micro_batches) == {0, 1} and len(micro_batches) == 3
    assert [len(micro_batch.members) for micro_batch in scheduler.batches.micro_batches] == [2, 2]


def test_when_the_kv_cache_is_full_the_youngest_starts_again_and_nothing_is_lost() -> None:
    scheduler = Scheduler(make_limits(kv_tokens=160, max_context=110))
    for i in range(3):
        scheduler.submit(request(f"r{i}", 8, max_tokens=90), seed=1)
    got = drain(scheduler)
    assert scheduler.batches.preemptions > 0
    assert {name: len(tokens) for name, tokens in got.items()} == {"r0": 90, "r1": 90, "r2": 90}


def test_prefixes_do_not_give_way_to_a_request_that_has_no_room_all_the_same() -> None:
    scheduler = Scheduler(make_limits(kv_tokens=2000, max_context=2000, prefix_tokens=600, prefill_chunk=512))
    scheduler.submit(request("first", 256, max_tokens=1), seed=1)
    drain(scheduler)
    scheduler.submit(request("runs", 1000, max_tokens=500), seed=1)
    for _ in range(4):
        assert (plan := scheduler.next_plan()) is not None
        answer(scheduler, plan)
    kept = scheduler.prefixes.positions
    scheduler.submit(request("large", 1200, max_tokens=100), seed=1)
    plan = scheduler.next_plan()
    assert plan and not plan.inserts and not plan.evicts and scheduler.prefixes.positions == kept > 0


@pytest.mark.parametrize("shared", [True, False])
def test_prompts_that_begin_alike_find_their_beginning_although_the_kv_cache_is_full(shared: bool) -> None:
    """Where they do not, nothing is set aside."""
    rng = random.Random(0)
    starts = [[rng.randrange(50) for _ in range(256)] for _ in range(3)]
    scheduler = Scheduler(make_limits(kv_tokens=6000, prefix_tokens=1800, prefill_chunk=512, max_batch_size=64))
    for i in range(120):
        start = rng.choice(starts) if shared else [rng.randrange(50) for _ in range(256)]
        prompt = start + [rng.randrange(50) for _ in range(rng.randrange(10, 70))]
        params = SamplingParams(max_tokens=rng.randrange(10, 70), ignore_eos=True)
        scheduler.submit(EngineRequest(request_id=f"r{i}", prompt=prompt, params=params), seed=1)
    most = 0
    while (plan := scheduler.next_plan()) is not None:
        most = max(most, scheduler.batches.running)
        answer(scheduler, plan)
    assert scheduler.prefixes.hits >= 50 if shared else scheduler.prefixes.spared == 0
    assert most >= (14 if shared else 16)


@pytest.mark.parametrize("trimmable", [True, False])
def test_the_blocks_of_a_prompt_are_hashed_once_and_beside_its_chunks(trimmable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []

    def count(tokens: list[int], salt: bytes) -> list[bytes]:
        hashed.append(len(tokens) // BLOCK_SIZE * BLOCK_SIZE)
        return block_hashes(tokens, salt)

    monkeypatch.setattr("tandem.scheduler.sequence.block_hashes", count)
    limits = {"vocab_size": 9000, "kv_tokens": 40_000, "max_context": 9000, "prefix_tokens": 20_000, "prefill_chunk": 512}
    scheduler = Scheduler(make_limits(**limits, prefix_trimmable=trimmable))
    prompt = list(range(8200))
    scheduler.submit(EngineRequest(request_id="first", prompt=prompt, params=SamplingParams(max_tokens=3)), 1)
    drain(scheduler)
    assert sum(hashed) == 8192 and max(hashed) == 2048
    hashed.clear()
    scheduler.submit(EngineRequest(request_id="again", prompt=prompt, params=SamplingParams(max_tokens=3)), 1)
    drain(scheduler)
    assert sum(hashed) == 8192 and scheduler.prefixes.hits == 1 and scheduler.prefixes.hit_tokens == 8192
    hashed.clear()
    scheduler.disk.begin([[]], [], scheduler.prefixes)
    scheduler.submit(EngineRequest(request_id="disk", prompt=prompt, params=SamplingParams(max_tokens=3)), 1)
    drain(scheduler)
    assert sum(hashed) == 8192, "looking on disk, in memory, and for save points takes one list"


def test_replay_sends_prompt_and_tokens_so_far() -> None:
    scheduler = Scheduler(make_limits())
    scheduler.submit(request("a", 3, max_tokens=10), seed=77)
    for token in (11, 12):
        plan = scheduler.next_plan()
        assert plan
        answer(scheduler, plan, token)
    assert scheduler.restart() == []
    plan = scheduler.next_plan()
    assert plan and plan.inserts[0].tokens == [1, 1, 1, 11, 12] and plan.inserts[0].prompt_len == 3
    assert plan.sampling_seeds == {"a": 77}


def test_min_tokens_and_ignore_eos_outlast_the_end_of_sequence() -> None:
    scheduler = Scheduler(make_limits())
    scheduler.submit(request("a", max_tokens=5, min_tokens=3), seed=1)
    scheduler.submit(request("b", max_tokens=5, ignore_eos=True), seed=1)
    got = drain(scheduler, EOS)
    assert len(got["a"]) == 4 and len(got["b"]) == 5


@pytest.mark.parametrize(
    ("token", "status", "code"),
    [(-1, 500, "not_finite"), (-2, 400, "structured_output_failed"), (-3, 503, "grammar_unavailable")],
)
def test_a_row_without_a_token_fails_its_request_alone(token: int, status: int, code: str) -> None:
    scheduler = Scheduler(make_limits())
    scheduler.submit(request("a", max_tokens=5), seed=1)
    plan = scheduler.next_plan()
    assert plan
    [message] = answer(scheduler, plan, token)
    assert isinstance(message, Refused) and (message.status, message.code) == (status, code)


@pytest.mark.parametrize("token", [-1, -2])
def test_a_prompt_whose_logits_are_not_finite_leaves_no_prefix(token: int) -> None:
    """A fault of a device that is over by now would be handed on to all who share it."""
    scheduler = Scheduler(make_limits(prefix_tokens=1000))
    scheduler.disk.begin([[]], [], scheduler.prefixes)
    scheduler.submit(request("b", 300, max_tokens=2), seed=1)
    for _ in range(30):
        if (plan := scheduler.next_plan()) is None:
            break
        answer(scheduler, plan, token if "b" in plan.sampled() else 5)
    names = disk_block_names(block_hashes([1] * 300))
    orders = [order for order in scheduler.disk.orders if isinstance(order, Survey)]
    if token == -1:
        assert scheduler.prefixes.positions == 0
        assert [(order.drop, order.soon, order.wanted) for order in orders] == [(True, False, names)]
    else:
        assert scheduler.prefixes.positions == 288 and not orders, "its grammar is to blame"


@pytest.mark.parametrize(
    ("bad", "param"),
    [
        ({"prompt": 0}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"logit_bias": {50: 1.0}}, "logit_bias"),
        ({"stop_token_ids": (99,)}, "stop_token_ids"),
        ({"prompt": 600, "max_tokens": 1}, "messages"),
        ({"max_tokens": 600}, "messages"),
    ],
)
def test_bad_requests_are_refused_by_name(bad: dict[str, object], param: str) -> None:
    scheduler = Scheduler(make_limits())
    with pytest.raises(RequestError) as caught:
        scheduler.submit(request("a", **bad), seed=1)  # type: ignore[arg-type]
    assert caught.value.param == param
    assert scheduler.idle


def test_a_live_id_cannot_be_used_again() -> None:
    scheduler = Scheduler(make_limits())
    scheduler.submit(request("a"), seed=1)
    with pytest.raises(RequestError):
        scheduler.submit(request("a"), seed=1)
    assert not scheduler.abort("unknown")


def test_a_pooled_prompt_takes_no_token_and_is_gone_after_its_last_chunk() -> None:
    scheduler = Scheduler(make_limits(prefill_chunk=5, kv_tokens=20, max_context=20))
    scheduler.submit(pooled("v", 20), seed=1)
    plans: deque[StepPlan] = deque()
    messages: list[object] = []
    counts = []
    while not scheduler.idle:
        while (plan := scheduler.next_plan()) is not None:
            assert not plan.sampled()
            counts += [op.count for op in plan.prefill]
            plans.append(plan)
        plan = plans.popleft()
        vectors = dict.fromkeys(plan.ended(), b"")
        messages += scheduler.update(StepResult(plan.step_id, 0, vectors=vectors))
        check_invariants(scheduler)
    assert counts == [5, 5, 5, 5]
    [message] = messages
    assert isinstance(message, Refused) and message.code == "not_finite"


def test_a_text_to_embed_that_a_later_step_can_take_whole_is_not_divided() -> None:
    scheduler = Scheduler(make_limits(prefill_chunk=8, kv_tokens=60, max_context=20))
    for name, tokens in (("a", 3), ("b", 3), ("c", 3), ("long", 12)):
        scheduler.submit(pooled(name, tokens), seed=1)
    chunks = []
    while not scheduler.idle and (plan := scheduler.next_plan()) is not None:
        chunks.append([(op.request_id, op.count) for op in plan.prefill])
        scheduler.update(StepResult(plan.step_id, 0, vectors=dict.fromkeys(plan.ended(), b"1234")))
    assert chunks[:3] == [[("a", 3), ("b", 3), ("long", 2)], [("c", 3), ("long", 5)], [("long", 5)]]


def test_texts_to_embed_begin_with_kept_prefixes_unless_a_mean_needs_all_and_leave_none() -> None:
    scheduler = Scheduler(make_limits(prefill_chunk=64, prefix_tokens=1000))
    for name, pooling, expected in (("a", "last", 64), ("b", None, 64), ("c", "mean", 64), ("d", "last", 32)):
        scheduler.submit(pooled(name, 64, pooling) if pooling else request(name, 64, max_tokens=1), seed=1)
        plan = scheduler.next_plan()
        assert plan and sum(op.count for op in plan.prefill) == expected
        scheduler.update(StepResult(plan.step_id, 0, [5] * len(plan.sampled()), vectors={name: b"1234"}))


def test_a_pooled_request_asks_for_no_tokens() -> None:
    asks = EngineRequest(request_id="v", prompt=[1], params=SamplingParams(max_tokens=1), pooling="last")
    with pytest.raises(RequestError, match="must be 0 with pooling"):
        Scheduler(make_limits()).submit(asks, seed=1)


def continued(produced: list[int], **params: object) -> EngineRequest:
    """A request of which another replica has sent some tokens."""
    return EngineRequest(request_id="a", prompt=[1, 2, 3], produced=produced, params=SamplingParams(**params))  # type: ignore[arg-type]


def test_what_is_out_counts_as_output_and_is_not_sent_again() -> None:
    one = Scheduler(make_limits())
    one.submit(continued([7, 8], max_tokens=4, min_tokens=4), seed=9)
    got: list[int] = []
    while (plan := one.next_plan()) is not None:
        if plan.inserts:
            [op] = plan.inserts
            assert (op.tokens, op.prompt_len, plan.sampling_seeds) == ([1, 2, 3, 7, 8], 3, {"a": 9})
        for message in one.update(StepResult(plan.step_id, plan.micro_batch, [0] * len(plan.sampled()))):
            assert isinstance(message, Output)
            got += message.tokens
            last = message
    assert got == [0, 0] and last.finish_reason == "length", "min_tokens counts what is out"


def test_nonsense_that_is_out_already_is_refused() -> None:
    for produced, word in (([7] * 4, "4 tokens are out"), ([50], "token ids")):
        with pytest.raises(RequestError, match=word):
            Scheduler(make_limits()).submit(continued(produced, max_tokens=4), seed=1)


def test_parts_can_be_cut_and_joined() -> None:
    whole = scored(1, 9, 2)
    assert joined([scored(1, 4, 2), scored(5, 5, 2)]) == whole and whole.after(4) == scored(5, 5, 2)
    assert len(whole.after(20)) == 0 and len(joined([])) == 0 and joined([]).finite
    assert whole.finite and not PromptLogprobs(0, struct.pack("<2f", 0.0, float("nan")), bytes(8)).finite
