"""Entry point of processes that diagnose, but for probes: `python -m tandem.diagnostics`.

The first line of standard input is the task (`tasks.AnyTask`). Probes, which other machines may start, take no tasks.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import time

import msgspec

from tandem.crash_guard import own_process
from tandem.descriptors import raise_limit
from tandem.diagnostics.tasks import AnyTask, CommandTask, RecordingTask, Task, TimingTask, leave
from tandem.processes.child import receive_payload, watch_lifeline

GRACE_S = 10.0


def main() -> None:
    """Do the task. What imports mlx is imported by the task itself, after the BLAS."""
    own_process()
    raise_limit()
    task = msgspec.json.decode(receive_payload(), type=AnyTask)
    if isinstance(task, RecordingTask):
        from tandem.diagnostics.parity.runs import record

        record(task)
    elif isinstance(task, CommandTask):
        run_command(task)
    else:
        answer(task)


def answer(task: Task | TimingTask) -> None:
    """Check or measure, and leave the answer. Ends the process."""
    watch_lifeline()
    if isinstance(task, Task):
        from tandem.diagnostics.selftest.check import look

        leave(look(task), task.result)
    else:
        from tandem.diagnostics.collectives.rank import time_rank

        leave(time_rank(task), task.result)
    sys.stdout.flush()
    os._exit(0)  # MLX's ring waits for its peers when it is taken down


def run_command(task: CommandTask) -> None:
    """Run `tandem` in this process until it ends, or the parent does."""
    sys.argv = ["tandem", *task.words]
    watch_lifeline(_end)
    runpy.run_module("tandem", run_name="__main__")


def _end() -> None:
    """End the command as Ctrl-C would, so that it ends its own children; by force after `GRACE_S` seconds."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os._exit(1)


if __name__ == "__main__":
    main()
