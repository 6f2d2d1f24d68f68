"""The api process of `tandem serve`: started on the listening socket, watched, started again."""

from __future__ import annotations

import logging
import socket
import time

import msgspec

from tandem.config.keys import ClientLimits
from tandem.config.loading import to_json
from tandem.config.settings import Settings
from tandem.config.validation import api_keys
from tandem.errors import UsageError
from tandem.protocol.events import History
from tandem.protocol.payloads import ApiPayload
from tandem.supervision.children import EXIT_FAILED, EXIT_USAGE, SupervisedChild, backoff

log = logging.getLogger("tandem.cli")

WINDOW_S = 60.0
"""An api that dies more than `max_restarts` times within so long, and never served between, is not started again."""
SERVES_S = 1.0
"""Seconds between two answers after which it is held to serve."""
SILENT_S = 15.0
"""Seconds without a sign of life after which it is replaced."""
PAUSE_S, LONGEST_PAUSE_S = 0.1, 1.0
"""Seconds until it is started again for each time that it has died lately, and the most."""


class ApiProcess(SupervisedChild):
    """One api after the other. Used by one thread."""

    def __init__(self, settings: Settings, listener: socket.socket, history: History | None = None) -> None:
        """Nothing is started. What happens goes into `history`."""
        self._history = history or History()
        self._settings = settings
        self._fd = listener.fileno()
        self._deaths: list[float] = []
        self._first_heard_at: float | None = None
        self._start_at = 0.0
        self._served = False
        """One has answered: what a later one finds amiss (code 2) was in order before, and is waited for."""
        self._keys: dict[str, ClientLimits] | None = None
        """As they were last in order."""
        self._mistakes = 0
        """Times in a row that one has ended with code 2 since."""

    def start(self) -> None:
        """Start it; if no process can be had now, `look` does so later. Raises ConfigError for keys of the first one
        that are not in order."""
        payload = ApiPayload(settings=msgspec.Raw(to_json(self._settings)), keys=self._read_keys())
        seconds = backoff(self._mistakes) if self._served else 0.0
        if (missing := self.spawn("api", payload, str(self._fd), str(seconds), name="api", silent_s=SILENT_S,
                                  pass_fds=[self._fd])) is not None:
            log.error("%s; the next try in %.0f s", missing[1], missing[0])
            self._start_at = time.monotonic() + missing[0]
            return
        self._first_heard_at = None

    def _read_keys(self) -> dict[str, ClientLimits]:
        """The API keys as their file has them now; where it is not in order, as they were."""
        try:
            self._keys = api_keys(self._settings)
        except UsageError as error:
            if self._keys is None:
                raise
            log.error("%s; the next api takes the keys as they were", error.message)
            self._history.note("api_keys_kept", f"{error.message}; keys stay as they were", level="error",
                               remedy="Mend the file; it is read again when an api starts.")
        return self._keys

    def heard(self, pid: int) -> bool:
        """A process that says that it is the api has answered; True if it is."""
        if self.child is None or self.child.pid != pid:
            return False
        self.vigil.heard()
        self._served, self._mistakes = True, 0
        now = time.monotonic()
        if self._first_heard_at is None:
            self._first_heard_at = now
        elif now - self._first_heard_at >= SERVES_S:
            self._deaths.clear()
        return True

    def look(self) -> int | None:
        """See to the process; an exit code when the server cannot go on."""
        if self.child is None:
            if time.monotonic() >= self._start_at:
                self.start()
        elif (code := self.child.poll()) is not None:
            return self._over(code, self.child.describe_exit())
        elif (trouble := self.vigil.verdict()) is not None:
            log.error("the api %s; replacing it", trouble)
            self._history.note("api_hung", f"the api process {trouble}; it is replaced", level="error")
            self.child.kill()
        return None

    def _over(self, code: int, how: str) -> int | None:
        words = self.ended()
        now = time.monotonic()
        self._deaths = [at for at in self._deaths if now - at < WINDOW_S] + [now]
        if code == EXIT_USAGE and self._served:
            self._deaths.clear()
            self._mistakes += 1
            if self._mistakes == 1:
                self._history.note("api_waits", f"the api cannot start: {words}; it is tried again and again",
                                   level="error", remedy="Bring back what it names: the api starts then.")
            return None
        if code == EXIT_USAGE or len(self._deaths) > self._settings.scheduler.max_restarts:
            log.error("the api %s; giving up", how)
            return EXIT_USAGE if code == EXIT_USAGE else EXIT_FAILED
        log.error("the api %s; starting another", how)
        self._history.note("api_lost", f"the api process {how}; another is started, and the model "
                           "stays loaded", level="error", remedy="Send requests that were broken off again; with "
                           "--journal those with a key go on by themselves.")
        self._start_at = now + min(PAUSE_S * (len(self._deaths) - 1), LONGEST_PAUSE_S)
        return None
