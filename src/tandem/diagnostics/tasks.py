"""Local subprocesses that run one task and write its result to a file: checks, and ranks that are timed.

All run `python -m tandem.diagnostics` and read the task from standard input.
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
"""Bytes at the end of a process's output that are searched for its last line."""
END_S = 10.0
POLL_S = 0.05
T = TypeVar("T")

Figures = dict[str, str | int | float | bool]
"""Measurements of a check by label, in display order."""
Verdict = Literal["ok", "failed", "does not apply", "no answer"]
"""`no answer`: the check's process died or exceeded its deadline."""


# --- tasks ---


class Task(Struct, frozen=True, kw_only=True, tag="check"):
    """A check of the self-test, or a part of one."""

    entry: str
    """Function to call, `module:function` below `selftest.checks`; takes the task and returns figures."""
    result: str
    """Path of the file for the `TaskResult`."""
    directory: str
    """Directory that all checks of a run share, for files that later checks read."""
    model: str
    """Path of the served model's directory."""
    hostfile: str = ""
    """Path of MLX's hosts file; empty without one."""
    random: bool = False
    """True if the model has random weights, which the check `model` generates."""
    options: JsonObject = {}
    """Arguments for one part of a check; for checks of a cluster (`--cluster`) `prompts`, their numbers of tokens."""


class TaskResult(Struct, frozen=True, kw_only=True):
    """Result of a `Task`."""

    verdict: Verdict
    detail: str = ""
    """Reason, in one line, unless the verdict is `ok`."""
    figures: Figures = {}


class TimingTask(Struct, frozen=True, kw_only=True, tag="timing"):
    """Time one rank's collectives and channels or, with `ranks` 1, the decode and prefill steps of its machine."""

    rank: int = 0
    ranks: int = 1
    backend: str = "ring"
    operations: list[str] = []
    """Operations to time, as in `Row.operation`."""
    sizes: list[int] = []
    """Array sizes to time, in bytes."""
    iterations: int = 0
    keys: ClusterKeys | None = None
    """Keys for the operation `tcp`, else None."""
    listen: tuple[str, int] = ("", 0)
    """Address and port of this rank's TCP channel."""
    following: str = ""
    """URL of the next rank's TCP channel, tcp://ADDRESS:PORT."""
    fast_sync: bool = False
    """True to turn on MLX's fast fences (macOS)."""
    result: str = ""
    """Path of the file for the `RankTimes`."""


class Row(Struct, frozen=True, kw_only=True):
    """Timing of one operation at one message size."""

    operation: str
    """`all_sum`: sum of an evaluated array; `between`: sum between two device operations; `tcp`, `ring`: one hop to the next
    rank."""
    bytes: int
    median_us: float
    p99_us: float
    gb_per_s: float
    """Bandwidth in 10**9 bytes a second."""


class RankTimes(Struct, frozen=True, kw_only=True, tag=True):
    """Result of a `TimingTask`. If the rank failed, `error` is set and the other fields are meaningless."""

    error: str | None = None
    """Message of the failure, `LATE` after a timeout, None on success."""
    device: str = ""
    gpu: bool = False
    metal: bool = False
    memory_bytes: int = 0
    mlx: str = ""
    rows: list[Row] = []
    steps: list[Step] = []

    @property
    def latency_s(self) -> dict[str, float]:
        """Return the median seconds of an all_sum by message size in bytes, as text."""
        return {str(row.bytes): row.median_us / 1e6 for row in self.rows if row.operation == "all_sum"}


class RecordingTask(Struct, frozen=True, kw_only=True, tag="recording"):
    """Serve as one rank and record its logits."""

    worker: Raw
    """JSON of the rank's `WorkerPayload`."""
    path: str
    """Path of the file for the logits."""


class CommandTask(Struct, frozen=True, kw_only=True, tag="command"):
    """Run `tandem` with these arguments until the command or the parent exits. Needs no `tandem` on PATH."""

    words: list[str]


AnyTask = Task | TimingTask | RecordingTask | CommandTask


# --- processes ---


class TaskProcess(ChildProcess):
    """Subprocess that runs one task; its output goes to a log beside `task.result`.

    A context manager that kills the process on exit.
    """

    def __init__(
        self, task: Task | TimingTask, *, name: str, variables: Mapping[str, str] | None = None, module: str = MODULE
    ) -> None:
        """Start the process with `variables` added to its environment. Raises SpawnError."""
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
        """Return the result that the process has written; None if there is none."""
        try:
            return msgspec.json.decode(self.result.read_bytes(), type=kind)
        except FileNotFoundError:
            return None

    def last_words(self) -> str:
        """Return the last non-empty line of the process's output; empty if there is none."""
        lines = [line for line in self._log.read_bytes()[-TAIL:].decode(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip() if lines else ""

    def finding(self, deadline_s: float) -> TaskResult:
        """Wait up to `deadline_s` seconds for the process to exit. Return its result, or `no answer` with the reason."""
        ended = self.wait(deadline_s)
        if finding := self.answer(TaskResult):
            return finding
        words = f": {last}" if (last := self.last_words()) else ""
        return TaskResult(
            verdict="no answer",
            detail=(f"its process {self.describe_exit()}" if ended else f"it did not come back within {deadline_s:g} s") + words,
        )


def leave(answer: TaskResult | RankTimes, result: str) -> None:
    """Write the result atomically to the file `result`. Called in the subprocess."""
    write_private(Path(result), msgspec.json.encode(answer), sync=False)


@contextmanager
def check_parts(entry: str, options: Sequence[dict[str, object]], variables: Sequence[Mapping[str, str]]
                ) -> Iterator[list[TaskProcess]]:  # fmt: skip
    """Start one process for each pair of `options` and `variables`; each runs the part `entry` of a check.

    The processes share a temporary directory and are killed when the context ends.
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
    """Make an MLX group on this machine and yield each rank's environment variables. Raises LayoutError."""
    launcher, process_group = LocalLauncher(1), make_process_group(backend, ranks, 0)
    try:
        yield [{**launcher.variables(rank, ranks), **process_group.variables(rank)} for rank in range(ranks)]
    finally:
        process_group.remove()


def timing_group(task: TimingTask, addresses: Sequence[str], ports: Sequence[int]) -> list[TimingTask]:
    """Return one task per rank; rank i listens at `addresses[i]`:`ports[i]` and sends to rank i + 1 in a ring."""
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
    """Run timing tasks in parallel, each with its environment variables. All are killed when one fails or after `timeout_s`."""
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
