"""Requests under which engines were lost are sent one at a time, so that the one to blame is found."""

from __future__ import annotations

import pytest

from tandem.protocol.control import Output
from tandem.protocol.request import EngineRequest, SamplingParams
from tandem.protocol.suspicion import CLEAR
from tandem.server.engines.inflight import Flight, Trials


class Engine:
    """The replicas' part: sends flights unless they must wait, and loses all that it has at once."""

    def __init__(self):
        self.trials = Trials(self.send)
        self.here = []
        self.refused = []

    def send(self, flight):
        if not self.trials.must_wait(flight):
            self.here.append(flight)

    def arrived(self, flight, output):
        if output.finish_reason:
            self.here.remove(flight)
        self.trials.look(flight, over=output.finish_reason is not None)

    def failed(self, flight, error):
        raise AssertionError(error)

    def die(self):
        lost, self.here = self.here, []
        for flight in lost:
            flight.replica = 0
        self.trials.judge(0, [*lost, *self.trials._waiting])
        for flight in lost:
            flight.lose(100.0, died=True)
            if flight.suspicion.guilty:
                self.refused.append(flight.request_id)
                self.trials.look(flight, over=True)
            else:
                flight.depart()
                self.send(flight)

    @property
    def names(self):
        return [flight.request_id for flight in self.here]


@pytest.fixture
def engine():
    return Engine()


def flight(engine, name):
    return Flight(EngineRequest(request_id=name, prompt=[1], params=SamplingParams(max_tokens=99)), None, engine)


def tried(one, *, resting=False):
    """Its engine says so."""
    one.tried(resting=resting)


def tokens(one, count, *, end=False):
    one.push(Output(one.request_id, [5] * count, finish_reason="length" if end else None))


def test_the_killer_is_refused_and_the_innocent_are_served(engine):
    a, killer, b = (flight(engine, name) for name in ("a", "killer", "b"))
    for one in (a, killer, b):
        engine.send(one)
    engine.die()
    assert engine.names == ["a", "killer", "b"], "once more together"
    engine.die()
    assert engine.names == ["a"], "then alone"
    assert a.depart().suspicion.company == 2
    tried(a)
    tokens(a, CLEAR + 1)
    assert engine.names == ["a", "killer"], "it is past the point; the next one's turn"
    tried(killer)
    engine.die()
    assert not engine.refused and killer.suspicion.rests, "nothing is to run for a while"
    assert (a.suspicion.company, a.losses) == (0, 3), "it only waited there"
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
    a, b = flight(engine, "a"), flight(engine, "b")
    for one in (a, b):
        engine.send(one)
    engine.die()
    engine.die()
    tried(a)
    engine.die()
    assert engine.names == ["a"] and a.suspicion.alone == 1
    tried(a, resting=True)
    engine.die()
    assert sorted(engine.names) == ["a", "b"] and not (a.suspicion.suspect or b.suspicion.suspect)


def test_one_that_waits_where_another_is_tried_is_not_blamed(engine):
    suspect, new = flight(engine, "suspect"), flight(engine, "new")
    engine.send(suspect)
    engine.die()
    engine.die()
    engine.send(new)
    tried(suspect)
    engine.die()
    assert (new.losses, new.suspicion.company) == (1, 0)


def test_one_that_ends_or_is_given_up_makes_room(engine):
    a, b, c = (flight(engine, name) for name in "abc")
    for one in (a, b, c):
        engine.send(one)
    engine.die()
    engine.die()
    assert engine.names == ["a"]
    engine.trials.look(b, over=True)  # its client has left while it waited
    tokens(a, 1, end=True)
    assert engine.names == ["c"]


def test_losses_with_progress_between_them_are_nobodys_fault(engine):
    one = flight(engine, "a")
    engine.send(one)
    for _ in range(20):
        tokens(one, CLEAR + 1)
        engine.die()
    assert (one.losses, one.suspicion.company, engine.refused) == (20, 1, [])


def test_a_replica_that_leaves_in_good_order_is_no_strike(engine):
    one = flight(engine, "a")
    for _ in range(5):
        one.lose(0.0, died=False)
    assert (one.losses, one.suspicion.company) == (0, 0)
