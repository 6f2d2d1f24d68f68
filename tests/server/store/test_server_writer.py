"""The journal's thread: calls that come together share a transaction, keep their order, and harm no other."""

from __future__ import annotations

import asyncio
import sqlite3
import threading

import pytest

from tandem.errors import UnavailableError
from tandem.server.store.journal import Entry, Journal, JournalError
from tandem.server.store.writer import Writer


def entry(number, key=None):
    return Entry(0, f"r{number}", "g", key or f"k{number}", b"d", "/v1/completions", 1.0, 0)


class Held:
    """A journal with its writer, whose thread is busy until `go`."""

    def __init__(self, directory):
        self.journal = Journal(directory)
        self.errors, self.statements = [], []
        self.journal._database.set_trace_callback(self.statements.append)
        self.writer = Writer(self.journal, lambda: self.errors.append(1))
        self.go = threading.Event()

    def accept(self, one):
        return self.writer.run(self.journal.accept, one, b"{}", everybody=False, refusal=None)

    async def together(self, *calls):
        """The outcomes of calls that wait for the thread at the same time."""
        begun = threading.Event()

        def busy():
            begun.set()
            assert self.go.wait(240)

        first = asyncio.create_task(self.writer.run(busy))
        await asyncio.to_thread(begun.wait)
        waiting = [asyncio.create_task(call) for call in calls]
        await asyncio.sleep(0)
        self.statements.clear()
        self.go.set()
        await first
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        await self.writer.close()
        return outcomes


@pytest.fixture
def held(tmp_path):
    return Held(tmp_path / "j")


def test_what_comes_together_is_synced_once_and_answered_in_order(held, tmp_path):
    order = []

    async def noted(number):
        await held.accept(entry(number))
        order.append(number)

    asyncio.run(held.together(*map(noted, range(20))))
    assert held.statements.count("COMMIT") == 2, "that of the busy call, and one"
    assert order == list(range(20))
    again = Journal(tmp_path / "j")
    assert len(again.pending()) == 20
    again.close()


def test_a_key_that_comes_twice_at_once_is_accepted_once(held):
    first, second = asyncio.run(held.together(held.accept(entry(1, "same")), held.accept(entry(2, "same"))))
    assert first == second and first.id == "r1"


def test_one_that_fails_harms_no_other_and_is_said_once(held, tmp_path, caplog):
    def full():
        raise sqlite3.OperationalError("full")

    def broken():
        raise ValueError("a fault of ours")

    outcomes = asyncio.run(
        held.together(
            held.accept(entry(1)),
            held.writer.run(full),
            held.accept(entry(2)),
            held.writer.run(broken),
            held.writer.run(full),
            held.accept(entry(3)),
        )
    )
    assert [type(one) for one in outcomes] == [Entry, JournalError, Entry, ValueError, JournalError, Entry]
    assert len(held.errors) >= 2 and len(caplog.records) == 1
    again = Journal(tmp_path / "j")
    assert [one.id for one in again.pending()] == ["r1", "r2", "r3"]
    again.close()


def test_a_refusal_costs_the_others_no_transaction_of_their_own(held):
    refused = held.writer.run(held.journal.accept, entry(1), b"", everybody=False, refusal=UnavailableError("no"))
    outcomes = asyncio.run(held.together(refused, held.accept(entry(2))))
    assert [type(one) for one in outcomes] == [UnavailableError, Entry]
    assert held.statements.count("COMMIT") == 2


def test_who_leaves_disturbs_nobody_and_after_the_end_nothing_is_taken(held):
    async def leave():
        leaving = asyncio.create_task(held.accept(entry(1)))
        await asyncio.sleep(0)
        leaving.cancel()
        await leaving

    left, kept = asyncio.run(held.together(leave(), held.accept(entry(2))))
    assert isinstance(left, asyncio.CancelledError) and kept.id == "r2"
    with pytest.raises(UnavailableError, match="shutting down"):
        asyncio.run(held.accept(entry(3)))


def test_a_turn_of_tidying_that_fails_is_said_and_ends_nothing(held, caplog):
    async def tidy():
        held.journal._database.execute("PRAGMA query_only = ON")
        held.journal._clock = lambda: 1e9
        await held.writer.tidy(1.0)
        held.journal._database.execute("PRAGMA query_only = OFF")
        await held.writer.tidy(1.0)

    async def whole():
        answered = await held.accept(entry(1))
        await held.writer.run(held.journal.answer, answered, 200, b"x")
        await tidy()
        return await held.writer.run(held.journal.find, "g", "k1", everybody=True)

    [found] = asyncio.run(held.together(whole()))
    assert found is None
    [said] = caplog.records
    assert "it cannot be written to" in said.getMessage()
