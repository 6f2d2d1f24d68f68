"""Events of a job as they come, for any number of followers."""

from __future__ import annotations

import asyncio


class EventLog:
    """Whole server-sent events, the first has the number 0. Belongs to one event loop."""

    def __init__(self) -> None:
        self.events: list[bytes] = []
        self._change = asyncio.Event()

    def restart(self, events: bytes) -> None:
        """The job begins (again)."""
        self.events.clear()
        self.add(events)

    def add(self, events: bytes) -> None:
        """What has come: any number of events."""
        self.events += [event + b"\n\n" for event in events.split(b"\n\n")[:-1]]
        self.wake()

    def wake(self) -> None:
        """Have all followers look."""
        self._change.set()
        self._change = asyncio.Event()

    async def changed(self, timeout_s: float) -> bool:
        """Wait for the next change; False if there is none within `timeout_s` seconds."""
        try:
            await asyncio.wait_for(self._change.wait(), timeout_s)
        except TimeoutError:
            return False
        return True
