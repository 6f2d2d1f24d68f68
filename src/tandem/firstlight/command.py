"""`tandem` as a child of a check: `python -m tandem.firstlight.command`. It ends when the check's process does.

There need be no `tandem` on PATH, and no installed package: PYTHONPATH will do.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import time

import msgspec

from tandem.borders import own_process
from tandem.processes.child import receive_payload, watch_lifeline

MODULE = "tandem.firstlight.command"
GRACE_S = 10.0


def _end() -> None:
    """As Ctrl-C would, so that it ends its own children; by force when that takes too long."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os._exit(1)


def main() -> None:
    """Run the words that are the payload."""
    own_process()
    sys.argv = ["tandem", *msgspec.json.decode(receive_payload(), type=list[str])]
    watch_lifeline(_end)
    runpy.run_module("tandem", run_name="__main__")


if __name__ == "__main__":
    main()
