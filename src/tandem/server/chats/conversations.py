"""Conversations by `conversation_id`, kept in memory so that the next request with the id continues them.

Off unless `keep_conversations` is set (seconds). The profile `ring` sets it, as clients of the ring project refer to
conversations by id.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

MOST = 1000
"""Most conversations kept, over all clients."""
MOST_BYTES = 64 * 2**20
"""Most bytes of all kept conversations, as JSON."""
_OVERHEAD = 400
"""Bytes of an entry besides its messages and name."""
Name = tuple[str, str]
"""Client group and conversation id."""


@dataclass
class _Remembered:
    messages: bytes
    """A JSON list."""
    until: float
    carried: bool
    """True if a client has sent the id; a generated id may never be used."""


class Conversations:
    """Conversations of all clients. Not thread-safe: use on one event loop."""

    def __init__(self, keep_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._keep_s, self._clock = keep_s, clock
        self._kept: OrderedDict[Name, _Remembered] = OrderedDict()  # least recently used first

    def get(self, name: Name) -> bytes | None:
        """Return the messages of a conversation as a JSON list; None if unknown or expired."""
        self._expire()
        kept = self._kept.get(name)
        return None if kept is None else kept.messages

    def put(self, name: Name, messages: bytes, *, carried: bool) -> None:
        """Store a conversation, replacing an earlier one of that name. `carried`: a client sent the id."""
        self._expire()
        self._kept.pop(name, None)
        self._kept[name] = _Remembered(messages, self._clock() + self._keep_s, carried)
        self._bound(MOST, lambda name, kept: 1)
        self._bound(MOST_BYTES, _size)

    def _bound(self, most: int, weigh: Callable[[Name, _Remembered], int]) -> None:
        """Drop conversations until the sum of `weigh` over the rest is at most `most`."""
        had: Counter[str] = Counter()
        for name, kept in self._kept.items():
            had[name[0]] += weigh(name, kept)
        while had.total() > most:
            name = self._least(had)
            had[name[0]] -= weigh(name, self._kept.pop(name))

    def _least(self, had: Counter[str]) -> Name:
        """Return the name to drop, of the group with the largest total in `had`.

        Conversations whose id no client has sent come first, then the least recently used.
        """
        [(owner, _)] = had.most_common(1)
        mine = [(kept.carried, place, name) for place, (name, kept) in enumerate(self._kept.items()) if name[0] == owner]
        return min(mine)[2]

    def _expire(self) -> None:
        now = self._clock()
        while self._kept and next(iter(self._kept.values())).until <= now:
            self._kept.popitem(last=False)


def _size(name: Name, kept: _Remembered) -> int:
    return len(kept.messages) + sum(map(len, name)) + _OVERHEAD
