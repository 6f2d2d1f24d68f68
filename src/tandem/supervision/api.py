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
from tandem.processes.child import ChildProcess
from tandem.protocol.events import History
from tandem.protocol.payloads import ApiPayload
from tandem.supervision.children import EXIT_FAILED, EXIT_USAGE, HealthCheck, SupervisedChild, backoff

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
        self.settings = settings
        self._fd = listener.fileno()
        self._keys: dict[str, ClientLimits] | None = None
        """API keys of the last valid key file; None before the first read."""
        self._mistakes = 0
        """Consecutive exits with `EXIT_USAGE` since the API process last served."""
        self.replacing = False
        """True while a successor is about to take over."""
        self._former: tuple[ChildProcess, Settings] | None = None
        """Process that serves until its successor is ready, and its settings."""
        self._former_until = 0.0
        self._retired: list[ChildProcess] = []
        """Processes that finish their last requests."""

    def start(self) -> None:
        """Start a process; after a failure `look` tries again later.

        Raises ConfigError when the API keys are invalid and no valid ones were read before.
        """
        payload = ApiPayload(settings=msgspec.Raw(to_json(self.settings)), keys=self._read_keys(), succeeds=self.replacing)
        seconds = backoff(self._mistakes) if self.served else 0.0
        if (
            missing := self.spawn("api", payload, str(self._fd), str(seconds), name="api", silent_s=SILENT_S, pass_fds=[self._fd])
        ) is not None:
            log.error("%s; the next try in %.0f s", missing[1], missing[0])
            self.restart_at = time.monotonic() + missing[0]

    def _read_keys(self) -> dict[str, ClientLimits]:
        """Return the configured API keys; if the key file is now invalid, return the last valid ones."""
        try:
            self._keys = api_keys(self.settings)
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

    def replace(self, settings: Settings) -> None:
        """Start a successor with `settings`. The process goes on serving until it is ready, and then finishes its requests.

        Only one process can have a journal open: with one, the successor starts when the process has ended. Raises
        UsageError.
        """
        if self.child is None or self.serving_since is None or self.replacing:
            raise UsageError("the api is just being started; try again in a moment")
        self._keys = api_keys(settings)
        self._former = self.child, self.settings
        self._former_until = time.monotonic() + settings.scheduler.start_timeout
        self.settings, self.replacing = settings, True
        self.last_words()  # closes its pipe
        self.child = None
        if settings.server.journal is not None:
            self._retire()

    def take_over(self) -> None:
        """Let the predecessor finish, as the process is ready."""
        self._retire()
        self.replacing = False

    def _retire(self) -> None:
        if self._former is not None:
            self._former[0].retire()
            self._retired.append(self._former[0])
            self._former = None

    def _go_back(self) -> None:
        """Serve with the predecessor again, as its successor does not start."""
        assert self._former is not None
        words = self.ended()
        self._history.note(
            "rolling_failed",
            f"the new api did not start ({words}); the old one goes on",
            level="error",
            remedy="Mend what is named, and restart again.",
        )
        (self.child, self.settings), self._former, self.replacing = self._former, None, False
        self.health_check, self.serving_since = HealthCheck(self.child, SILENT_S), time.monotonic()

    @property
    def children(self) -> list[ChildProcess]:
        """Processes that run or have not been reaped, the current one first."""
        former = [] if self._former is None else [self._former[0]]
        return [*([] if self.child is None else [self.child]), *former, *self._retired]

    def look(self) -> int | None:
        """Start or replace the process if needed. Return an exit code when the server must end, else None."""
        self._retired = [child for child in self._retired if not child.wait(0.0)]
        if self.child is None:
            waits = self._retired and self.settings.server.journal is not None
            if time.monotonic() >= self.restart_at and not waits:
                self.start()
        elif self._former is not None and self.child.poll() is not None:
            self._go_back()
        elif self._former is not None and time.monotonic() > self._former_until:
            self.child.kill()
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
        if code == EXIT_USAGE or len(self.deaths) > self.settings.scheduler.max_restarts:
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
