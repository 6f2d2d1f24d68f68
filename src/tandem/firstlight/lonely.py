"""The parent of a rank that waits for a peer that never comes: `python -m tandem.firstlight.lonely`.

It prints the rank's process id, and stays until it is killed.
"""

from __future__ import annotations

import sys
import time

from tandem.borders import own_process
from tandem.firstlight.ranks import Pair
from tandem.processes.child import receive_payload, watch_lifeline

MODULE = "tandem.firstlight.lonely"
LONGEST_S = 120.0


def main() -> None:
    """Start the rank and stay."""
    own_process()
    receive_payload()
    watch_lifeline()
    with Pair("wait", ranks=1) as pair:
        sys.stdout.write(f"{pair.processes[0].pid}\n")
        sys.stdout.flush()
        time.sleep(LONGEST_S)


if __name__ == "__main__":
    main()
