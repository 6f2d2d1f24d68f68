"""Requests under which engines were lost are sent one at a time, so that the one to blame is found."""

from __future__ import annotations

import pytest

from tandem.protocol.control import Output
from tandem.protocol.quarantine import CLEAR
from tandem.protocol.request import EngineRequest, SamplingParams
from tandem.server.engines.inflight import InflightRequest, IsolatedRetries


class Engine:
    """The replicas' part: sends in-flight requests unless they must wait, and loses all that it has at once."""

    def __init__(self):
        self.trials = IsolatedRetries(self.send)
        self.here = []
        self.refused = []

    def send(self, inflight):
        if not self.trials.must_wait(inflight):
            self.here.append(inflight)

    def arrived(self, inflight, output):
        if output.finish_reason:
            self.here.remove(inflight)
        self.trials.look(inflight, over=output.finish_reason is not None)

    def failed(self, inflight, error):
        raise AssertionError(error)

    def die(self):
        lost, self.here = self.here, []
        for inflight in lost:
            inflight.replica = 0
        self.trials.judge(0, [*lost, *self.trials._waiting])
        for inflight in lost:
            inflight.lose(100.0, died=True)
            if inflight.quarantine_record.guilty:
                self.refused.append(inflight.request_id)
                self.trials.look(inflight, over=True)
            else:
                inflight.depart()
                self.send(inflight)

    @property
    def names(self):
        return [inflight.request_id for inflight in self.here]


@pytest.fixture
def engine():
    return Engine()


def inflight(engine, name):
    return InflightRequest(EngineRequest(request_id=name, prompt=[1], params=SamplingParams(max_tokens=99)), None, engine)


def tried(one, *, resting=False):
    """Its engine says so."""
    one.tried(resting=resting)


def tokens(one, count, *, end=False):
    one.push(Output(one.request_id, [5] * count, finish_reason="length" if end else None))


def test_the_killer_is_refused_and_the_innocent_are_served(engine):
    a, killer, b = (inflight(engine, name) for name in ("a", "killer", "b"))
    for one in (a, killer, b):
        engine.send(one)
    engine.die()
    assert engine.names == ["a", "killer", "b"], "once more together"
    engine.die()
    assert engine.names == ["a"], "then alone"
    assert a.depart().quarantine_record.company == 2
    tried(a)
    tokens(a, CLEAR + 1)
    assert engine.names == ["a", "killer"], "it is past the point; the next one's turn"
    tried(killer)
    engine.die()
    assert not engine.refused and killer.quarantine_record.rests, "nothing is to run for a while"
    assert (a.quarantine_record.company, a.losses) == (0, 3), "it only waited there"
    tried(killer, resting=True)
    tried(killer)
    engine.die()
    assert engine.refused == ["killer"]
    assert engine.names == ["a", "b"]
    tried(b)
    tokens(b, CLEAR + 1, end=True)
    tokens(a, 5, end=True)
    assert engine.names == []


def test_an_engine_that_dies_while_nothing_runs_clears_all_suspects(engine):
    a, b = inflight(engine, "a"), inflight(engine, "b")
    for one in (a, b):
        engine.send(one)
    engine.die()
    engine.die()
    tried(a)
    engine.die()
    assert engine.names == ["a"] and a.quarantine_record.alone == 1
    tried(a, resting=True)
    engine.die()
    assert sorted(engine.names) == ["a", "b"] and not (a.quarantine_record.suspect or b.quarantine_record.suspect)


def test_one_that_waits_where_another_is_tried_is_not_blamed(engine):
    suspect, new = inflight(engine, "suspect"), inflight(engine, "new")
    engine.send(suspect)
    engine.die()
    engine.die()
    engine.send(new)
    tried(suspect)
    engine.die()
    assert (new.losses, new.quarantine_record.company) == (1, 0)


def test_one_that_ends_or_is_given_up_makes_room(engine):
    a, b, c = (inflight(engine, name) for name in "abc")
    for one in (a, b, c):
        engine.send(one)
    engine.die()
    engine.die()
    assert engine.names == ["a"]
    engine.trials.look(b, over=True)  # its client has left while it waited
    tokens(a, 1, end=True)
    assert engine.names == ["c"]


def test_losses_with_progress_between_them_are_nobodys_fault(engine):
    one = inflight(engine, "a")
    engine.send(one)
    for _ in range(20):
        tokens(one, CLEAR + 1)
        engine.die()
    assert (one.losses, one.quarantine_record.company, engine.refused) == (20, 1, [])


def test_a_replica_that_leaves_in_good_order_is_no_strike(engine):
    one = inflight(engine, "a")
    for _ in range(5):
        one.lose(0.0, died=False)
    assert (one.losses, one.quarantine_record.company) == (0, 0)
