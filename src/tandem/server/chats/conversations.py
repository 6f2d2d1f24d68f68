"""Conversations by their `conversation_id`, kept in memory for a while: the next request with it goes on from there.

Off unless `keep_conversations` says for how long; the profile `ring` turns it on, as clients of the ring project know
conversations by their ids.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

MOST = 1000
"""Conversations that are kept at once, of all clients."""
MOST_BYTES = 64 * 2**20
"""What they may take together, as JSON."""
_OVERHEAD = 400
"""Bytes of an entry besides its messages and its name."""
Name = tuple[str, str]
"""Whose conversation it is, and its id."""


@dataclass
class _Remembered:
    messages: bytes
    """A JSON list."""
    until: float
    carried: bool
    """A client has sent its id; else it was made up here, and may never be used."""


class Conversations:
    """The conversations of all clients. Belongs to one event loop."""

    def __init__(self, keep_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._keep_s, self._clock = keep_s, clock
        self._kept: OrderedDict[Name, _Remembered] = OrderedDict()  # the one used least lately first

    def get(self, name: Name) -> bytes | None:
        """The messages of a conversation as a JSON list; None when it is not kept (any more)."""
        self._expire()
        kept = self._kept.get(name)
        return None if kept is None else kept.messages

    def put(self, name: Name, messages: bytes, *, carried: bool) -> None:
        """Keep a conversation from now on; it replaces what there was under its name."""
        self._expire()
        self._kept.pop(name, None)
        self._kept[name] = _Remembered(messages, self._clock() + self._keep_s, carried)
        self._bound(MOST, lambda name, kept: 1)
        self._bound(MOST_BYTES, _size)

    def _bound(self, most: int, weigh: Callable[[Name, _Remembered], int]) -> None:
        """Drop conversations until those that are left weigh no more than `most` together."""
        had: Counter[str] = Counter()
        for name, kept in self._kept.items():
            had[name[0]] += weigh(name, kept)
        while had.total() > most:
            name = self._least(had)
            had[name[0]] -= weigh(name, self._kept.pop(name))

    def _least(self, had: Counter[str]) -> Name:
        """What to drop: of the client that has most, a conversation whose id nobody has sent, else the one used least
        lately."""
        [(owner, _)] = had.most_common(1)
        mine = [(kept.carried, place, name) for place, (name, kept) in enumerate(self._kept.items()) if name[0] == owner]
        return min(mine)[2]

    def _expire(self) -> None:
        now = self._clock()
        while self._kept and next(iter(self._kept.values())).until <= now:
            self._kept.popitem(last=False)


def _size(name: Name, kept: _Remembered) -> int:
    return len(kept.messages) + sum(map(len, name)) + _OVERHEAD
