"""Processes of this machine that get a task and leave an answer in a file: checks, and ranks that are timed.

All run `python -m tandem.diagnostics`, which a task on standard input tells what to do.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal, Self, TypeVar

import msgspec
from msgspec import Raw, Struct

from tandem.env import child_environment
from tandem.json_types import JsonObject
from tandem.launchers.local import LocalLauncher
from tandem.launchers.process_groups import make_process_group
from tandem.planner.profile import Step
from tandem.processes.child import ChildProcess
from tandem.protocol.keys import ClusterKeys
from tandem.system.files import write_private

MODULE = "tandem.diagnostics"
LATE = "late"
TAIL = 65536
"""Bytes at the end of a process's output in which its last words are looked for."""
END_S = 10.0
POLL_S = 0.05
T = TypeVar("T")

Figures = dict[str, str | int | float | bool]
"""Measurements of a check, in the order in which a person should read them."""
Verdict = Literal["ok", "failed", "does not apply", "no answer"]
"""`no answer`: the check's process died, or did not end in time."""


# --- tasks ---


class Task(Struct, frozen=True, kw_only=True, tag="check"):
    """A check of the self-test, or a part of one."""

    entry: str
    """Module and function below `selftest.checks`, `module:function`; it takes the task and returns figures."""
    result: str
    """File for the `TaskResult`."""
    directory: str
    """Directory of the whole run, for what checks leave to later ones."""
    model: str
    """Directory of the model that is served."""
    hostfile: str = ""
    """MLX's hosts file; empty without one."""
    random: bool = False
    """The model's weights are random: the check `model` makes it."""
    options: JsonObject = {}
    """Arguments of a part of a check."""


class TaskResult(Struct, frozen=True, kw_only=True):
    """The answer to a `Task`."""

    verdict: Verdict
    detail: str = ""
    """Why it is not ok, in one line."""
    figures: Figures = {}


class TimingTask(Struct, frozen=True, kw_only=True, tag="timing"):
    """Time what joins one rank to others or, alone, the steps of its machine."""

    rank: int = 0
    ranks: int = 1
    backend: str = "ring"
    operations: list[str] = []
    """Operations to time, see `Row.operation`."""
    sizes: list[int] = []
    """Bytes of one array."""
    iterations: int = 0
    keys: ClusterKeys | None = None
    """For `tcp`."""
    listen: tuple[str, int] = ("", 0)
    """Address and port of its channel."""
    following: str = ""
    """Address of the next rank: tcp://ADDRESS:PORT."""
    fast_sync: bool = False
    """With MLX's fast fences, on a Mac."""
    result: str = ""
    """File for the `RankTimes`."""


class Row(Struct, frozen=True, kw_only=True):
    """Repeated calls of one operation with one size."""

    operation: str
    """all_sum: of an array that is there; between: an all_sum between two operations of the device; tcp and ring: one
    hop."""
    bytes: int
    median_us: float
    p99_us: float
    gb_per_s: float
    """10**9 bytes a second."""


class RankTimes(Struct, frozen=True, kw_only=True, tag=True):
    """The answer to a `TimingTask`; with `error` (and nothing else that counts) if the rank failed."""

    error: str | None = None
    """`LATE` if its time was up."""
    device: str = ""
    gpu: bool = False
    metal: bool = False
    memory_bytes: int = 0
    mlx: str = ""
    rows: list[Row] = []
    steps: list[Step] = []

    @property
    def latency_s(self) -> dict[str, float]:
        """Bytes (as text) -> median seconds of an all_sum."""
        return {str(row.bytes): row.median_us / 1e6 for row in self.rows if row.operation == "all_sum"}


class RecordingTask(Struct, frozen=True, kw_only=True, tag="recording"):
    """Be a rank that serves, and record its logits."""

    worker: Raw
    """The rank's `WorkerPayload`."""
    path: str
    """File for the logits."""


class CommandTask(Struct, frozen=True, kw_only=True, tag="command"):
    """Run `tandem` with these words until it ends or the parent does. There need be no `tandem` on PATH."""

    words: list[str]


AnyTask = Task | TimingTask | RecordingTask | CommandTask


# --- processes ---


class TaskProcess(ChildProcess):
    """A process with a task, which names the file for its answer; its output goes to a log beside that file.

    A context manager that ends the process.
    """

    def __init__(
        self, task: Task | TimingTask, *, name: str, variables: Mapping[str, str] | None = None, module: str = MODULE
    ) -> None:
        """Start it with `variables` added to the environment. Raises SpawnError."""
        self.result = Path(task.result)
        self._log = self.result.with_suffix(".log")
        self.result.unlink(missing_ok=True)
        with self._log.open("wb") as output:
            super().__init__(
                module, msgspec.json.encode(task), env=child_environment(variables), name=name, output=output.fileno()
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()
        self.wait(END_S)

    def answer(self, kind: type[T]) -> T | None:
        """Return the answer that the process left; None if there is none."""
        try:
            return msgspec.json.decode(self.result.read_bytes(), type=kind)
        except FileNotFoundError:
            return None

    def last_words(self) -> str:
        """Return the last line of its output; empty if there is none."""
        lines = [line for line in self._log.read_bytes()[-TAIL:].decode(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip() if lines else ""

    def finding(self, deadline_s: float) -> TaskResult:
        """Wait for the process to end and return a check's finding, or one that tells how the process ended."""
        ended = self.wait(deadline_s)
        if finding := self.answer(TaskResult):
            return finding
        words = f": {last}" if (last := self.last_words()) else ""
        return TaskResult(
            verdict="no answer",
            detail=(f"its process {self.describe_exit()}" if ended else f"it did not come back within {deadline_s:g} s") + words,
        )


def leave(answer: TaskResult | RankTimes, result: str) -> None:
    """Write the answer to the file `result`, whole or not at all; called in the process."""
    write_private(Path(result), msgspec.json.encode(answer), sync=False)


@contextmanager
def check_parts(entry: str, options: Sequence[dict[str, object]], variables: Sequence[Mapping[str, str]]
                ) -> Iterator[list[TaskProcess]]:  # fmt: skip
    """Start a process for each of `options` and `variables`, which makes the part `entry` of a check.

    They share a directory and end with the context.
    """
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-selftest-"))
        tasks = [
            Task(entry=entry, result=f"{directory}/{number}.json", directory=directory, model="", options=own)
            for number, own in enumerate(options)
        ]
        yield [
            stack.enter_context(TaskProcess(task, name=f"{entry} {number}", variables=own))
            for number, (task, own) in enumerate(zip(tasks, variables, strict=True))
        ]


@contextmanager
def local_group(backend: str, ranks: int) -> Iterator[list[dict[str, str]]]:
    """Make an MLX group on this machine; yields the environment variables of each rank. Raises LayoutError."""
    launcher, process_group = LocalLauncher(1), make_process_group(backend, ranks, 0)
    try:
        yield [{**launcher.variables(rank, ranks), **process_group.variables(rank)} for rank in range(ranks)]
    finally:
        process_group.remove()


def timing_group(task: TimingTask, addresses: Sequence[str], ports: Sequence[int]) -> list[TimingTask]:
    """Return the task of each rank of a group, which listens at its address and port."""
    keys, count = ClusterKeys.generate(), len(addresses)
    ends = [f"tcp://{address}:{port}" for address, port in zip(addresses, ports, strict=True)]
    return [
        msgspec.structs.replace(
            task, rank=rank, ranks=count, keys=keys, listen=(addresses[rank], ports[rank]), following=ends[(rank + 1) % count]
        )
        for rank in range(count)
    ]


def run_ranks(
    tasks: Sequence[TimingTask], variables: Sequence[Mapping[str, str]], timeout_s: float, module: str = MODULE
) -> list[RankTimes]:
    """Run timing tasks side by side, each with its variables. All end when one fails, or after `timeout_s` seconds."""
    answers: dict[int, RankTimes] = {}
    deadline = time.monotonic() + timeout_s
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-ranks-"))
        processes = []
        for task, own in zip(tasks, variables, strict=True):
            task = msgspec.structs.replace(task, result=f"{directory}/{task.rank}.json")
            processes.append(stack.enter_context(TaskProcess(task, name=f"rank {task.rank}", variables=own, module=module)))
        while len(answers) < len(tasks) and time.monotonic() < deadline and not any(answer.error for answer in answers.values()):
            time.sleep(POLL_S)
            for rank, process in enumerate(processes):
                if rank not in answers and process.poll() is not None:
                    words = process.last_words() or process.describe_exit()
                    answers[rank] = process.answer(RankTimes) or RankTimes(error=words)
    return [answers.get(rank, RankTimes(error=LATE)) for rank in range(len(tasks))]
