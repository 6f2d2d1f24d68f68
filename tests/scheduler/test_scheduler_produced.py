"""A request that another engine has begun goes on here."""

from __future__ import annotations

import pytest

from tandem.errors import RequestError
from tandem.protocol.control import Output
from tandem.protocol.request import EngineRequest, SamplingParams
from tandem.protocol.step import StepResult
from tandem.scheduler.limits import Limits
from tandem.scheduler.scheduler import Scheduler


def scheduler() -> Scheduler:
    return Scheduler(Limits(lanes=1, max_batch_size=4, prefill_chunk=16, kv_tokens=1000, max_context=100, max_queue=10,
                            max_queue_tokens=1000, eos_token_ids=frozenset([0]), vocab_size=50))


def request(produced: list[int], **params: object) -> EngineRequest:
    return EngineRequest(request_id="a", prompt=[1, 2, 3], produced=produced,
                         params=SamplingParams(**params))  # type: ignore[arg-type]


def test_what_is_out_counts_as_output_and_is_not_sent_again() -> None:
    one = scheduler()
    one.submit(request([7, 8], max_tokens=4, min_tokens=4), seed=9)
    got: list[int] = []
    while (plan := one.next_plan()) is not None:
        if plan.inserts:
            [op] = plan.inserts
            assert (op.tokens, op.prompt_len, plan.sampling_seeds) == ([1, 2, 3, 7, 8], 3, {"a": 9})
        for message in one.update(StepResult(plan.step_id, plan.lane, [0] * len(plan.sampled()))):
            assert isinstance(message, Output)
            got += message.tokens
            last = message
    assert got == [0, 0] and last.finish_reason == "length", "min_tokens counts what is out"


def test_nonsense_is_refused() -> None:
    for produced, word in (([7] * 4, "4 tokens are out"), ([50], "token ids")):
        with pytest.raises(RequestError, match=word):
            scheduler().submit(request(produced, max_tokens=4), seed=1)
