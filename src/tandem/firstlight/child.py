"""A process that makes a check, or a part of one: `python -m tandem.firstlight.child`.

It gets a task, and leaves a finding in a file.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

import msgspec

from tandem.borders import own_process
from tandem.comm.blas import preload_blas
from tandem.descriptors import raise_limit
from tandem.doctor.ranks import TaskProcess, leave
from tandem.errors import TandemError
from tandem.firstlight.check import Differs, Finding, NotApplicable, Task, resolve
from tandem.processes.child import receive_payload, watch_lifeline

MODULE = "tandem.firstlight.child"


class CheckProcess(TaskProcess):
    """The process, for its parent."""

    def __init__(self, task: Task, *, name: str, module: str = MODULE, variables: Mapping[str, str] | None = None
                 ) -> None:  # fmt: skip
        super().__init__(task, module, name=name, variables=variables)

    def finding(self, deadline_s: float) -> Finding:
        """Wait for its end; what it left, or what is to be said of one that left nothing."""
        ended = self.wait(deadline_s)
        if found := self.answer(Finding):
            return found
        words = f": {said}" if (said := self.last_words()) else ""
        return Finding(verdict="no answer", detail=(f"its process {self.describe_exit()}" if ended else
                                                    f"it did not come back within {deadline_s:g} s") + words)


def look(task: Task) -> Finding:
    """Make one check, whatever it raises."""
    try:
        return Finding(verdict="ok", figures=resolve(task.entry)(task))
    except NotApplicable as reason:
        return Finding(verdict="does not apply", detail=reason.message)
    except Differs as difference:
        return Finding(verdict="failed", detail=difference.message, figures=difference.figures)
    except TandemError as error:
        return Finding(verdict="failed", detail=error.message)
    except Exception as error:  # noqa: BLE001 - whatever it is, the report has it
        words = str(error).strip().splitlines() or [""]
        return Finding(verdict="failed", detail=f"{type(error).__name__}: {words[0]}")


def main() -> None:
    """Read the task, check, write."""
    own_process()
    task = msgspec.json.decode(receive_payload(), type=Task)
    watch_lifeline()
    raise_limit()
    preload_blas("auto")  # before any check imports mlx
    leave(look(task), task.result)
    sys.stdout.flush()
    os._exit(0)  # MLX's ring waits for its peers when it is taken down


if __name__ == "__main__":
    main()
