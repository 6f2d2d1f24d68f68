"""The API server process of `tandem serve`: started on the listening socket, health-checked and restarted."""

from __future__ import annotations

import logging
import socket
import time

import msgspec

from tandem.config.api_keys import ClientLimits
from tandem.config.loading import to_json
from tandem.config.settings import Settings
from tandem.config.validation import api_keys
from tandem.errors import UsageError
from tandem.protocol.events import History
from tandem.protocol.payloads import ApiPayload
from tandem.supervision.children import EXIT_FAILED, EXIT_USAGE, SupervisedChild, backoff

log = logging.getLogger("tandem.cli")

WINDOW_S = 60.0
"""Window in seconds for deaths without service in between; more than `max_restarts` in it end the server."""
SILENT_S = 15.0
"""Seconds without an answer after which the API process is replaced."""
PAUSE_S, LONGEST_PAUSE_S = 0.1, 1.0
"""Seconds added to the pause before a restart per recent death, and the maximum pause."""


class ApiProcess(SupervisedChild):
    """Supervisor of the API process and its successors. Used by one thread."""

    def __init__(self, settings: Settings, listener: socket.socket, history: History | None = None) -> None:
        """Store the collaborators; `start` starts a process. Events are recorded in `history`."""
        super().__init__()
        self._history = history or History()
        self._settings = settings
        self._fd = listener.fileno()
        self._keys: dict[str, ClientLimits] | None = None
        """API keys of the last valid key file; None before the first read."""
        self._mistakes = 0
        """Consecutive exits with `EXIT_USAGE` since the API process last served."""

    def start(self) -> None:
        """Start a process; after a failure `look` tries again later.

        Raises ConfigError when the API keys are invalid and no valid ones were read before.
        """
        payload = ApiPayload(settings=msgspec.Raw(to_json(self._settings)), keys=self._read_keys())
        seconds = backoff(self._mistakes) if self.served else 0.0
        if (
            missing := self.spawn("api", payload, str(self._fd), str(seconds), name="api", silent_s=SILENT_S, pass_fds=[self._fd])
        ) is not None:
            log.error("%s; the next try in %.0f s", missing[1], missing[0])
            self.restart_at = time.monotonic() + missing[0]

    def _read_keys(self) -> dict[str, ClientLimits]:
        """Return the configured API keys; if the key file is now invalid, return the last valid ones."""
        try:
            self._keys = api_keys(self._settings)
        except UsageError as error:
            if self._keys is None:
                raise
            log.error("%s; the next api keeps the last valid keys", error.message)
            self._history.note(
                "api_keys_kept",
                f"{error.message}; keys stay as they were",
                level="error",
                remedy="Mend the file; it is read again when an api starts.",
            )
        return self._keys

    def heard(self, pid: int) -> bool:
        """Record an answer of process `pid`. Return True if it is the current API process."""
        if self.child is None or self.child.pid != pid:
            return False
        self.health_check.heard()
        self._mistakes = 0
        self.serves()
        return True

    def look(self) -> int | None:
        """Start or replace the process if needed. Return an exit code when the server must end, else None."""
        if self.child is None:
            if time.monotonic() >= self.restart_at:
                self.start()
        elif (code := self.child.poll()) is not None:
            return self._over(code, self.child.describe_exit())
        elif (trouble := self.health_check.verdict()) is not None:
            log.error("the api %s; replacing it", trouble)
            self._history.note("api_hung", f"the api process {trouble}; it is replaced", level="error")
            self.child.kill()
        return None

    def _over(self, code: int, how: str) -> int | None:
        words = self.ended()
        now = self.count_death(WINDOW_S)
        if code == EXIT_USAGE and self.served:
            self.deaths.clear()
            self._mistakes += 1
            if self._mistakes == 1:
                self._history.note(
                    "api_waits",
                    f"the api cannot start: {words}; it is tried again and again",
                    level="error",
                    remedy="Bring back what it names: the api starts then.",
                )
            return None
        if code == EXIT_USAGE or len(self.deaths) > self._settings.scheduler.max_restarts:
            log.error("the api %s; giving up", how)
            return EXIT_USAGE if code == EXIT_USAGE else EXIT_FAILED
        log.error("the api %s; starting another", how)
        self._history.note(
            "api_lost",
            f"the api process {how}; another is started, and the model stays loaded",
            level="error",
            remedy="Send requests that were broken off again; with --journal those with a key go on by themselves.",
        )
        self.restart_at = now + min(PAUSE_S * (len(self.deaths) - 1), LONGEST_PAUSE_S)
        return None
