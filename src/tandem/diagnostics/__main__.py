"""Entry point of diagnostic subprocesses: `python -m tandem.diagnostics`.

The first line of standard input is the task, a JSON `tasks.AnyTask`. Probes run remotely and have their own entry point.
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
from tandem.loading.mlx_lm_models import import_models_only
from tandem.processes.child import receive_payload, watch_lifeline

GRACE_S = 10.0


def main() -> None:
    """Run the task from standard input. Each task imports mlx itself, since the BLAS must be loaded before."""
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
    """Run a check or a timing, write the result to `task.result`, and exit with code 0."""
    watch_lifeline()
    import_models_only()
    if isinstance(task, Task):
        from tandem.diagnostics.selftest.check import look

        leave(look(task), task.result)
    else:
        from tandem.diagnostics.collectives.rank import time_rank

        leave(time_rank(task), task.result)
    sys.stdout.flush()
    os._exit(0)  # skips destructors: MLX's ring waits for its peers in its own


def run_command(task: CommandTask) -> None:
    """Run `tandem` in this process until the command or the parent process exits."""
    sys.argv = ["tandem", *task.words]
    watch_lifeline(_end)
    runpy.run_module("tandem", run_name="__main__")


def _end() -> None:
    """Send SIGTERM to this process, so that the command stops its children; exit with code 1 after `GRACE_S` seconds."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os._exit(1)


if __name__ == "__main__":
    main()
