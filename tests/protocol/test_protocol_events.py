"""A history is bounded, counts up, and takes each event of another one once."""

from __future__ import annotations

from tandem.protocol.events import MOST_TEXT, History


def test_it_is_bounded_and_numbers_go_on() -> None:
    history = History(3)
    for number in range(5):
        history.note("rank_lost", f"event {number}" + "x" * 2000)
    assert [one.number for one in history.after()] == [3, 4, 5]
    assert [one.number for one in history.after(4)] == [5]
    assert len(history.after()[0].text) == MOST_TEXT


def test_what_another_one_has_is_taken_once_also_of_a_process_that_counts_anew() -> None:
    kept, engine, replaced = History(), History(), History()
    kept.note("server_ready", "ready")
    engine.note("rank_lost", "rank 1 was killed (SIGKILL)", rank=1, level="error")
    kept.take(engine.after(), replica=2, model="m")
    kept.take(engine.after(), replica=2, model="m")
    engine.note("ranks_replaced", "back")
    kept.take(engine.after(), replica=2, model="m")
    replaced.note("rank_slow", "slow")
    kept.take(replaced.after(), replica=2, model="m")
    assert [(one.number, one.kind, one.replica, one.model) for one in kept.after()] == [
        (1, "server_ready", None, ""),
        (2, "rank_lost", 2, "m"),
        (3, "ranks_replaced", 2, "m"),
        (4, "rank_slow", 2, "m"),
    ]
    assert kept.after()[1].rank == 1 and kept.after()[1].level == "error"
