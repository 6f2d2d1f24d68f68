"""A process that makes a check, or a part of one: `python -m tandem.firstlight.child`.

It gets a task, and leaves a finding in a file.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import msgspec

from tandem.borders import own_process
from tandem.comm.blas import preload_blas
from tandem.descriptors import raise_limit
from tandem.env import child_environment
from tandem.errors import TandemError
from tandem.firstlight.check import Differs, Finding, NotApplicable, Task, resolve
from tandem.processes.child import ChildProcess, receive_payload, watch_lifeline

MODULE = "tandem.firstlight.child"
TAIL = 4096
"""Bytes of what a process wrote, from the end, in which its last words are looked for."""
END_S = 10.0


class CheckProcess(ChildProcess):
    """The process, for its parent; what it writes goes to a log beside its result. A context manager that ends it."""

    def __init__(self, task: Task, *, name: str, module: str = MODULE, variables: Mapping[str, str] | None = None
                 ) -> None:  # fmt: skip
        """`module` is its entry point, `variables` go into its environment. Raises SpawnError."""
        self._result = Path(task.result)
        self._log = self._result.with_suffix(".log")
        self._result.unlink(missing_ok=True)
        with self._log.open("wb") as output:
            super().__init__(module, msgspec.json.encode(task), env=child_environment(variables), name=name,
                             output=output.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()
        self.wait(END_S)

    def finding(self, deadline_s: float) -> Finding:
        """Wait for its end; what it left, or what is to be said of one that left nothing."""
        ended = self.wait(deadline_s)
        try:
            return msgspec.json.decode(self._result.read_bytes(), type=Finding)
        except FileNotFoundError:
            pass
        lines = [line for line in self._log.read_bytes()[-TAIL:].decode(errors="replace").splitlines() if line.strip()]
        words = f": {lines[-1].strip()}" if lines else ""
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
    finding = look(task)
    part = Path(task.result + ".part")
    part.write_bytes(msgspec.json.encode(finding))
    part.replace(task.result)
    sys.stdout.flush()
    os._exit(0)  # MLX's ring waits for its peers when it is taken down


if __name__ == "__main__":
    main()
