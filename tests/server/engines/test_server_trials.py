"""Requests under which engines were lost are sent one at a time, so that the one to blame is found."""

from __future__ import annotations

import pytest

from tandem.protocol.control import Output
from tandem.protocol.request import EngineRequest, SamplingParams
from tandem.server.engines.flight import CLEAR, Flight
from tandem.server.engines.trials import Trials


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
            flight.lose(0.0, died=True)
            if self.trials.guilty(flight):
                self.refused.append(flight.request_id)
                self.trials.look(flight, over=True)
            else:
                self.send(flight)

    @property
    def names(self):
        return [flight.request_id for flight in self.here]


@pytest.fixture
def engine():
    return Engine()


def flight(engine, name):
    return Flight(EngineRequest(request_id=name, prompt=[1], params=SamplingParams(max_tokens=99)), None, engine)


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
    assert a.wire_request().strikes == 2
    tokens(a, CLEAR + 1)
    assert engine.names == ["a", "killer"], "it is past the point; the next one's turn"
    engine.die()
    assert engine.refused == ["killer"]
    assert a.strikes == 1, "it had got further"
    assert engine.names == ["a", "b"]
    tokens(b, CLEAR + 1, end=True)
    tokens(a, 5, end=True)
    assert engine.names == []


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
    assert (one.losses, one.strikes, engine.refused) == (20, 1, [])


def test_a_replica_that_leaves_in_good_order_is_no_strike(engine):
    one = flight(engine, "a")
    for _ in range(5):
        one.lose(0.0, died=False)
    assert (one.losses, one.strikes) == (0, 0)
