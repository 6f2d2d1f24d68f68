"""While a grammar is compiled, its request waits alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engines import settings_of
from scheduler_invariants import check_invariants
from tandem.engine import engine
from tandem.engine.build_layout import plan_layout
from tandem.engine.engine import Engine
from tandem.guided.vocabulary import Vocabulary
from tandem.protocol.control import Output, Refused
from tandem.protocol.request import EngineRequest, SamplingParams, StructuredOutputs

SLOW, QUICK = StructuredOutputs(regex="[ab]{30}"), StructuredOutputs(regex="[cd]{20}")


class Served:
    """An engine that computes for real, whose rank compiles `SLOW` when the test lets it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
        self.compiled = threading.Event()
        real = Vocabulary._matcher

        def compiled(vocabulary: Vocabulary, form: StructuredOutputs, produced: list[int]) -> Any:
            if form == SLOW and not self.compiled.wait(240):
                raise TimeoutError
            return real(vocabulary, form, produced)

        monkeypatch.setattr(Vocabulary, "_matcher", compiled)
        settings = settings_of(model, kv_tokens=4000, prefill_chunk=16)
        self.engine = Engine(settings, plan_layout(settings))
        self.engine.start()
        self.tokens: dict[str, list[int]] = {}
        self.refused: dict[str, Refused] = {}
        self.ended: set[str] = set()

    def ask(self, name: str, form: StructuredOutputs | None = None, length: int = 40, tokens: int = 40) -> None:
        """Submit a request."""
        self.engine.submit(
            EngineRequest(
                request_id=name,
                prompt=[*range(10, 10 + length)],
                params=SamplingParams(
                    max_tokens=tokens, temperature=1.0, seed=3, structured_outputs=form, ignore_eos=form is None
                ),
            )
        )

    def until_ended(self, *names: str) -> None:
        """Let the engine work until these have ended."""
        for _ in range(2000):
            if self.ended.issuperset(names):
                return
            for message in self.engine.pump(0.1):
                assert isinstance(message, Output | Refused)
                if isinstance(message, Refused):
                    self.refused[message.request_id] = message
                    self.ended.add(message.request_id)
                    continue
                self.tokens.setdefault(message.request_id, []).extend(message.tokens)
                if message.finish_reason:
                    self.ended.add(message.request_id)
            check_invariants(self.engine.scheduler)
        raise AssertionError("it does not come about")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, model: Path) -> Iterator[Served]:
    one = Served(monkeypatch, model)
    yield one
    one.compiled.set()
    one.engine.close()


@pytest.mark.parametrize("length", [5, 40], ids=["one chunk", "three chunks"])
def test_others_get_their_tokens_while_a_grammar_is_compiled(served: Served, length: int) -> None:
    served.ask("running", tokens=100)
    served.ask("slow", SLOW, length)
    served.ask("plain")
    served.ask("quick", QUICK)
    served.until_ended("running", "plain", "quick")
    assert "slow" not in served.tokens
    served.compiled.set()
    served.until_ended("slow")
    served.ask("again", SLOW, length)
    served.until_ended("again")
    assert len(served.tokens["slow"]) > 20 and served.tokens["slow"] == served.tokens["again"]


def test_a_grammar_that_takes_too_long_ends_its_own_request(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "GRAMMAR_S", 0.5)
    served.ask("slow", SLOW)
    served.ask("plain", tokens=200)
    served.until_ended("slow", "plain")
    assert (served.refused["slow"].status, served.refused["slow"].code) == (503, "grammar_unavailable")
    assert len(served.tokens["plain"]) == 200
    served.ask("quick", QUICK)
    served.until_ended("quick")
    assert served.tokens["quick"]


def test_a_request_that_is_aborted_while_its_grammar_is_compiled_leaves_nothing(served: Served) -> None:
    served.ask("slow", SLOW)
    served.engine.pump(0.1)
    assert served.engine.abort("slow")
    served.ask("plain")
    served.until_ended("plain")
    assert served.engine.scheduler.compiling is None
    served.compiled.set()
    served.ask("slow", SLOW)
    served.until_ended("slow")
    assert served.tokens["slow"]


def test_a_grammar_that_cannot_be_compiled_ends_its_own_request(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError("no such file")

    monkeypatch.setattr(Vocabulary, "_matcher", broken)
    served.ask("broken", QUICK)
    served.ask("plain")
    served.until_ended("broken", "plain")
    assert (served.refused["broken"].status, served.refused["broken"].code) == (503, "grammar_unavailable")
