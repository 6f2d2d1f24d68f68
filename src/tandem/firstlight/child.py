"""A check's process: `python -m tandem.firstlight.child`. It gets a task, and leaves a finding in a file."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from tandem.borders import own_process
from tandem.comm.blas import preload_blas
from tandem.descriptors import raise_limit
from tandem.errors import TandemError
from tandem.firstlight.check import Differs, Finding, NotApplicable, Task, resolve
from tandem.processes.child import receive_payload, watch_lifeline

MODULE = "tandem.firstlight.child"


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


def main() -> int:
    """Read the task, check, write."""
    own_process()
    task = msgspec.json.decode(receive_payload(), type=Task)
    watch_lifeline()
    raise_limit()
    preload_blas("auto")  # before any check imports mlx
    finding = look(task)
    part = Path(task.result + ".part")
    part.write_bytes(msgspec.json.encode(finding))
    part.replace(task.result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
