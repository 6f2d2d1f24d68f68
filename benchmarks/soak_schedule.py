"""Schedule of a storm, made wholly from its seed: layout, features, bad neighbours and faults of every round.

Rounds are drawn greedily, so that every pair of parts that can meet does so after few rounds; then it begins anew.
Pure: nothing here starts a process or looks at a clock.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import combinations, islice
from typing import Any

LAYOUTS: dict[str, dict[str, Any]] = {
    "pp": {"pipeline_parallel_size": 2},
    "tp": {"tensor_parallel_size": 2},
    "2,1": {"parallel": "2,1"},
    "dp": {"data_parallel_size": 2},
    "dpxpp": {"data_parallel_size": 2, "pipeline_parallel_size": 2},
}
REPLICATED = ("dp", "dpxpp")
RANKS = ("pp", "tp", "2,1", "dpxpp")
"""Layouts whose ranks are processes of their own."""

PARTS = {
    "layout": tuple(LAYOUTS),
    "feature": ("journal", "disk", "roles", "standby", "batches", "models", "adapters", "speculation"),
    "neighbour": ("heavy", "slow", "drip", "leave", "half", "bombs", "idle", "garbage"),
    "fault": ("rank", "engine", "api", "worker", "server", "files", "replica"),
}
NEEDS = {
    ("feature", "roles"): ("feature", "disk"),
    ("feature", "batches"): ("feature", "journal"),
    ("fault", "files"): ("feature", "disk"),
}
"""Parts that bring another one along."""
ONLY = {
    ("feature", "roles"): REPLICATED,
    ("feature", "standby"): RANKS,
    ("fault", "rank"): RANKS,
    ("fault", "replica"): REPLICATED,
}
"""Layouts of those parts that do not go with all."""
NEVER = frozenset({(("fault", "replica"), ("feature", name)) for name in ("models", "adapters")})
"""Pairs that a server refuses: replicas are neither added nor drained where there are several models."""
NEIGHBOURS, FAULTS = 2, 3
"""Kinds of each in a round, at the least."""
SIZES = (2, 2, 3, 4)
"""Features of a round, at the least; drawn."""
CANDIDATES = 40
"""Rounds that are tried for each place; the one with the most new pairs is taken."""
SIGNALS = ("SIGKILL", "SIGSTOP")

Part = tuple[str, str]
Pair = tuple[Part, Part]


@dataclass(frozen=True)
class Fault:
    """One disturbance of a round."""

    second: float
    """Since the round's storm began."""
    target: str
    """One of `PARTS["fault"]`."""
    signal: str
    """Of those that hit one process."""

    def __str__(self) -> str:
        return f"{self.second:.0f} s {self.target}{f' {self.signal}' if self.one_process else ''}"

    @property
    def one_process(self) -> bool:
        """Whether it hits a process, in place of all of them, of files or of a replica."""
        return self.target in ("rank", "engine", "api", "worker")


@dataclass(frozen=True)
class Round:
    """Everything that is decided about one round before it begins."""

    number: int
    parts: frozenset[Part]
    faults: tuple[Fault, ...]

    def names(self, kind: str) -> tuple[str, ...]:
        """Its parts of one kind, in their usual order."""
        return tuple(name for name in PARTS[kind] if (kind, name) in self.parts)

    @property
    def layout(self) -> str:
        """The one layout."""
        return self.names("layout")[0]

    def pairs(self) -> set[Pair]:
        """Pairs of parts that meet in it."""
        return set(combinations(sorted(self.parts), 2))

    def __str__(self) -> str:
        return f"{self.layout} | {' '.join(self.names('feature'))} | {' '.join(self.names('neighbour'))}"


def rounds(seed: int, storm_s: float, every_s: float) -> Iterator[Round]:
    """Rounds without end, the same for the same arguments: storms of `storm_s` with a fault about every `every_s`."""
    unmet: set[Pair] = set()
    number = 0
    while True:
        unmet = unmet or set(allowed_pairs())
        number += 1
        rng = random.Random(f"{seed}/{number}")
        size, order = rng.choice(SIZES), sorted(unmet)
        tried = [_candidate(rng, rng.choice(order), size) for _ in range(CANDIDATES)]
        parts = max(tried, key=lambda parts: len(unmet & set(combinations(sorted(parts), 2))))
        made = Round(number, parts, _faults(rng, sorted(name for kind, name in parts if kind == "fault"), storm_s, every_s))
        unmet -= made.pairs()
        yield made


def rounds_to_meet(seed: int) -> int:
    """Rounds after which every pair that is allowed has met."""
    unmet = set(allowed_pairs())
    for made in rounds(seed, 60.0, 10.0):
        unmet -= made.pairs()
        if not unmet:
            return made.number
    raise AssertionError("rounds have no end")


def chosen(seed: int, storm_s: float, every_s: float, numbers: Iterable[int]) -> list[Round]:
    """Rounds of these numbers, to play them again."""
    wanted = sorted(set(numbers))
    made = list(islice(rounds(seed, storm_s, every_s), wanted[-1]))
    return [made[number - 1] for number in wanted]


@cache
def allowed_pairs() -> frozenset[Pair]:
    """Every pair of parts that some round can have."""
    every = [(kind, name) for kind, names in PARTS.items() for name in names]
    return frozenset(pair for pair in combinations(sorted(every), 2) if _possible(_whole(pair)))


def _whole(parts: Iterable[Part]) -> frozenset[Part]:
    """With all that they bring along."""
    found = set(parts)
    while more := {NEEDS[part] for part in found if part in NEEDS} - found:
        found |= more
    return frozenset(found)


def _possible(parts: frozenset[Part]) -> bool:
    """Whether at most one layout is among them, there is one for all of them, and no two exclude one another."""
    layouts = [name for kind, name in parts if kind == "layout"] or list(LAYOUTS)
    fitting = [name for name in layouts if all(name in ONLY.get(part, LAYOUTS) for part in parts)]
    return bool(fitting) and len(layouts) in (1, len(LAYOUTS)) and not any(set(pair) <= parts for pair in NEVER)


def _candidate(rng: random.Random, pair: Pair, features: int) -> frozenset[Part]:
    """A round's parts, of which two are given."""
    parts = _whole(pair)
    for kind, count in (("layout", 1), ("feature", features), ("neighbour", NEIGHBOURS), ("fault", FAULTS)):
        for name in rng.sample(PARTS[kind], len(PARTS[kind])):
            wider = _whole(parts | {(kind, name)})
            if sum(one == kind for one, _ in parts) < count and _possible(wider):
                parts = wider
    return parts


def _faults(rng: random.Random, targets: list[str], storm_s: float, every_s: float) -> tuple[Fault, ...]:
    """One at every so many seconds, a little earlier or later, each target at least once."""
    count = max(len(targets), int(storm_s / every_s))
    order = [*rng.sample(targets, len(targets)), *(rng.choice(targets) for _ in range(count - len(targets)))]
    gap = storm_s / count
    return tuple(
        Fault(round((place + 0.25 + rng.random() / 2) * gap, 1), target, rng.choice(SIGNALS))
        for place, target in enumerate(order)
    )
