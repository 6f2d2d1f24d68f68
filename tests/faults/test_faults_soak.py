"""The storm of `benchmarks/soak.py`: what its schedule promises, and two rounds of it."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from itertools import combinations, islice
from pathlib import Path

import pytest

from tandem import LLM, SamplingParams
from tandem.testing import tiny_model

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def benchmarks():
    """Modules beside `soak.py`, by name."""
    sys.path.insert(0, str(BENCHMARKS))
    yield import_module
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def schedule(benchmarks):
    return benchmarks("soak_schedule")


class TestSchedule:
    """Pure: nothing is started."""

    def test_a_seed_makes_the_same_rounds(self, schedule):
        first, again = (list(islice(schedule.rounds(7, 45.0, 9.0), 12)) for _ in range(2))
        assert first == again
        assert schedule.chosen(7, 45.0, 9.0, [12, 3]) == [first[2], first[11]]
        assert first != list(islice(schedule.rounds(8, 45.0, 9.0), 12))

    @pytest.mark.parametrize("seed", [0, 1, 1_763_956_800])
    def test_every_pair_that_is_allowed_meets_within_a_day(self, schedule, seed):
        needed = schedule.rounds_to_meet(seed)
        met = set().union(*(made.pairs() for made in islice(schedule.rounds(seed, 60.0, 10.0), needed)))
        assert met == schedule.allowed_pairs()
        assert needed <= 40, "a round takes a minute and a half: an hour"

    def test_pairs_that_are_left_out_are_those_that_cannot_be(self, schedule):
        parts = sorted((kind, name) for kind, names in schedule.PARTS.items() for name in names)
        every = set(combinations(parts, 2))
        left = {pair for pair in every - schedule.allowed_pairs() if {kind for kind, _ in pair} != {"layout"}}
        names = {frozenset(name for _, name in pair) for pair in left}
        assert names == {
            frozenset(pair)
            for pair in [
                *((part, layout) for part in ("roles", "replica") for layout in ("pp", "tp", "2,1")),
                ("standby", "dp"),
                ("rank", "dp"),
                ("replica", "models"),
                ("replica", "adapters"),
            ]
        }

    def test_a_round_has_what_its_parts_need(self, schedule):
        for made in islice(schedule.rounds(3, 60.0, 10.0), 60):
            assert len(made.names("layout")) == 1
            assert len(made.names("feature")) >= 2
            assert len(made.names("neighbour")) >= schedule.NEIGHBOURS
            assert all(schedule.NEEDS[part] in made.parts for part in made.parts & schedule.NEEDS.keys())
            assert all(made.layout in schedule.ONLY[part] for part in made.parts & schedule.ONLY.keys())

    def test_faults_come_in_time_and_of_each_kind(self, schedule):
        for made in islice(schedule.rounds(3, 40.0, 8.0), 30):
            seconds = [fault.second for fault in made.faults]
            assert len(seconds) == 5
            assert seconds == sorted(seconds)
            assert 0 < seconds[0] < seconds[-1] < 40
            assert {fault.target for fault in made.faults} == set(made.names("fault"))


class TestTally:
    """What the storm makes of an answer."""

    @pytest.mark.parametrize(
        ("kind", "answer", "excused", "counted"),
        [
            ("answered", {"text 0": "a sea"}, False, "identical"),
            ("answered", {"text 0": "a see"}, False, "wrong"),
            ("answered", {"text 0": "a sea"[:3]}, False, "wrong"),
            ("answered", {"text 0": "a sea a sea"}, False, "twice"),
            ("failed", {}, True, "lost"),
            ("broken", {}, False, "lost"),
            ("broken", {}, True, "broken"),
            ("hung", {}, True, "hung"),
            ("refused", {}, False, "refused"),
        ],
    )
    def test_an_end_of_a_request_is_counted(self, benchmarks, tmp_path, kind, answer, excused, counted):
        tally, requests = benchmarks("soak_tally"), benchmarks("soak_requests")
        counts = tally.Tally(tmp_path)
        if excused:
            counts.excuse()
        counts.note(requests.Outcome(kind, "503 why", answer), requests.Request("/v1/completions", {}), {"text 0": "a sea"})
        assert counts.counts == {counted: 1}
        assert counts.refused == ({"503 why": 1} if kind == "refused" else {})
        assert [path.name for path in tmp_path.iterdir()] == ([f"{counted}-1.json"] if counted in tally.BAD else [])

    def test_answers_that_part_at_a_tie_are_told_from_wrong_ones(self, benchmarks, tmp_path, monkeypatch):
        ties, model = benchmarks("soak_ties"), tiny_model(tmp_path / "model")
        body = {"model": "default", "prompt": [5, 6, 7], "max_tokens": 1, "temperature": 1.0, "seed": 3}
        with LLM(str(model)) as llm:
            [answer] = llm.generate([body["prompt"]], SamplingParams(max_tokens=1, temperature=1.0, seed=3))
        tied = lambda text: ties.tied(model, body, {"text 0": text}, {"text 0": answer.text})  # noqa: E731
        assert tied(answer.text)
        monkeypatch.setattr(ties, "MOST", 100)
        monkeypatch.setattr(ties, "NOISE", 0.5)  # as if logits were rounded that coarsely
        params = SamplingParams(max_tokens=1, temperature=1.0, seed=3)
        near = next(iter(ties._texts(*ties._loaded(model), body["prompt"], params) - {answer.text}))
        assert tied(near)
        monkeypatch.setattr(ties, "NOISE", 1e-5)
        assert not tied(near)

    @pytest.mark.parametrize(
        ("events", "twice"),
        [
            ([{"role": "assistant"}, {"content": "a"}, "done"], False),
            ([{"role": "assistant"}, {"content": "a"}, {"role": "assistant"}, "done"], True),
            ([{"role": "assistant"}, "done", {"content": "a"}], True),
        ],
    )
    def test_what_a_stream_says_again_is_seen(self, benchmarks, events, twice):
        read = benchmarks("soak_requests")
        lines = [{"done": True} if one == "done" else {"choices": [{"index": 0, "delta": one}]} for one in events]
        got = read._stream("/v1/chat/completions", iter(lines))
        assert (got.kind, got.twice) == ("answered", twice)


@pytest.mark.slow
def test_two_rounds_of_a_storm(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(BENCHMARKS / "soak.py"),
        "--evidence",
        str(tmp_path),
        "--seed",
        "372",
        "--round",
        "1",
        "2",
        "--storm",
        "20",
        "--every",
        "6",
        "--clients",
        "3",
        "--pause",
        "0.5",
        "--requests",
        "14",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-4000:]
    assert "all is well" in done.stdout
