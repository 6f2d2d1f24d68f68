"""The server that `tandem up` starts: `python -m tandem.cli.background NAME LOCK`, settings on standard input."""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import time
from contextlib import suppress
from functools import partial

from tandem.borders import own_process, start_thread
from tandem.cli.arguments import exit_code
from tandem.cli.serve import serve
from tandem.config.loading import from_json, to_json
from tandem.config.settings import Settings
from tandem.log import set_up
from tandem.processes.child import receive_payload
from tandem.supervision.record import Background, Record

MODULE = "tandem.cli.background"
LOOK_S = 10.0
"""Seconds between two looks at the size of the log."""
log = logging.getLogger("tandem.cli")


def digest(settings: Settings) -> str:
    """The same for the same settings."""
    return hashlib.blake2b(to_json(settings), digest_size=16).hexdigest()


def main() -> int:
    """Serve until a signal. The lock stays open, and is nobody else's, until this process ends."""
    own_process()
    settings = from_json(receive_payload())
    place = Background(sys.argv[1])
    set_up(settings.process.log_level)

    def keep_log_short() -> None:
        while True:
            time.sleep(LOOK_S)
            with suppress(OSError):  # a full disk: the log stays as it is, and the next look tries again
                if place.trim_log():
                    log.info("the log began anew; what was before is in %s.1", place.log)

    start_thread(keep_log_short, name="log", on_failure=lambda _: None)

    def write_down(bound: Settings) -> None:
        file = bound.server.api_key_file or ""
        place.write(Record(os.getpid(), bound.server.host, bound.server.port,
                           ", ".join(one.name for one in bound.named) or bound.model.model, time.time(),
                           bound.process.drain_timeout, "http" if bound.server.tls_cert is None else "https",
                           digest(settings), file and os.path.abspath(file)))

    try:
        return exit_code(partial(serve, settings, write_down))
    finally:
        place.forget()


if __name__ == "__main__":
    sys.exit(main())
