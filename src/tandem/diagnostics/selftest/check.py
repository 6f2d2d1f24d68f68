"""Checks of the self-test: their type, the table of all, and the code that runs one in a subprocess. Imports no mlx."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field

from tandem.comm.blas import preload_blas
from tandem.diagnostics.tasks import Figures, Task, TaskResult
from tandem.errors import TandemError


class Differs(TandemError):
    """Raised when a check measures something unexpected. The message names the expected and the measured value."""

    def __init__(self, message: str, figures: Figures | None = None) -> None:
        super().__init__(message)
        self.figures = figures or {}


class NotApplicable(TandemError):
    """Raised when a check does not apply to this machine; the message names the reason."""


def judged(problems: list[str], figures: Figures) -> Figures:
    """Return the figures. Raises Differs if `problems` is not empty."""
    if problems:
        raise Differs("; ".join(problems), figures)
    return figures


class CheckResult(TaskResult, frozen=True, kw_only=True):
    """A `TaskResult` with the check's name, as reports store it."""

    name: str
    seconds: float
    attempts: int = 1
    """Number of attempts; a check during which the run was killed is retried once."""


@dataclass(frozen=True)
class Check:
    """A check: name, requirements, and the function that performs it."""

    name: str
    """Name for `--only` and reports."""
    entry: str
    """Function of the check, as in `Task.entry`."""
    deadline_s: float
    """Seconds after which the check's process is killed; generous, since the machine may be busy."""
    title: str
    """Subject of the check, for reports and tables."""
    proves: str
    """Statement that holds if the verdict is ok."""
    hosts: bool = field(default=False, kw_only=True)
    """True if the check needs a hosts file."""
    risky: bool = field(default=False, kw_only=True)
    """True if the check may hang the GPU or restart the machine; it runs only with `--risky`."""


CHECKS: tuple[Check, ...] = (
    Check("machine", "machine:machine", 60, "the machine, as the doctor sees it",
          "nothing is wrong here that the doctor knows of; limits, sockets and memory are what Tandem expects"),
    Check("network", "machine:network", 40, "local network and folders open to this process",
          "the system lets this process into the local network, and to which folders"),
    Check("model", "machine:model", 60, "model",
          "the model of the other checks is there"),
    Check("threads", "device:threads", 60, "steps dispatched by one thread, read by others",
          "arrays that are being computed can be read by other threads; streams of other threads work"),
    Check("broken-kernel", "device:broken_kernel", 40, "a kernel that fails raises an exception",
          "an error of the device ends no process, and the device goes on"),
    Check("sampler", "sampling:sampler", 180, "sampler: filters, penalties, draws",
          "filters, penalties, bias and log probabilities are NumPy's; what steps of greedy and top-p cost"),
    Check("digests", "sampling:digests", 40, "digests of hidden states",
          "machines of different kinds agree on digests"),
    Check("arena", "kv_buffer:rows", 300, "KV buffer: rows of unequal length",
          "batches of rows that join, leave and are taken out have the logits that mlx-lm has for each alone"),
    Check("windows", "kv_buffer:windows", 300, "KV buffer: sliding windows",
          "the same for rows that are rings"),
    Check("drafts", "kv_buffer:drafts", 300, "KV buffer: drafts that are taken back",
          "several positions a row, some of them cut off again, leave no trace"),
    Check("attention", "kv_buffer:attention", 300, "decode attention that reads each row's own length",
          "our kernels compute what MLX's attention computes, in all types and sizes of heads"),
    Check("donation", "kv_buffer:donation", 300, "KV buffer: written in place with steps in flight",
          "no step copies the KV buffer, also while the step before it is being computed"),
    Check("types", "layouts:types", 300, "types of models over stages (tiny random models)",
          "windows, sinks, experts, MLA and states compute mlx-lm's logits, whole and in stages"),
    Check("fence", "fences:fence", 40, "crossings between CPU and GPU",
          "work that goes to and fro is right, and what a crossing costs"),
    Check("collectives", "fences:collectives", 180, "sums of two ranks between the device's operations",
          "sums are right, and what one costs between two operations, as layers have it"),
    Check("late", "fences:late", 600, "a rank that comes late to a sum",
          "its peer waits, or gets an error that Tandem knows for a wait"),
    Check("wiring", "wiring:wiring", 600, "weights in memory after a pause",
          "what wiring and refreshing change for a step after a pause"),
    Check("one-rank", "single:pace", 600, "one rank, over HTTP",
          "greedy tokens are mlx-lm's, and the pace is not far from its"),
    Check("chunks", "single:chunks", 600, "long prompts in chunks of several sizes",
          "which size of chunk is fastest here"),
    Check("connections", "single:connections", 300, "300 connections with 256 open files",
          "the server raises its limit of open files"),
    Check("stages", "layouts:stages", 600, "two pipeline stages, one machine",
          "logits over Tandem's channel are those of one process, in all bits"),
    Check("stages-ring", "layouts:ring", 600, "two pipeline stages over MLX's ring, one machine",
          "the same over MLX's ring"),
    Check("tensor", "layouts:tensor", 600, "two tensor-parallel ranks, one machine",
          "logits of ranks that share layers are those of one process, but for rounding"),
    Check("both", "layouts:both", 600, "both together (`--parallel 2,1`), one machine",
          "the same for a stage of two ranks before a stage of one"),
    Check("killed", "faults:killed", 600, "a rank killed under load",
          "answers are whole and the same, and no process is left"),
    Check("stopped", "faults:stopped", 600, "a rank stopped (SIGSTOP) under load",
          "a rank that hangs is noticed and replaced"),
    Check("orphans", "faults:orphans", 600, "a supervisor, or a parent in start-up, killed",
          "nothing outlives the process that started it, not even within MLX's start-up"),
    Check("awake", "faults:awake", 300, "the machine stays awake while it serves",
          "idle sleep is held off while a server runs, and no longer"),
    Check("doctor", "hosts:doctor", 200, "several machines, as the doctor sees them",
          "nothing is wrong between the machines; speed of the ways between them", hosts=True),
    Check("links", "hosts:links", 400, "sums over several machines, ring and jaccl",
          "sums over all machines are right, and how long they take", hosts=True),
    Check("hosts", "hosts:layouts", 600, "stages and tensor parallelism over several machines",
          "their answer is one rank's; tokens a second of each", hosts=True),
    Check("deaths", "hosts:deaths", 600, "a rank of several machines killed three times",
          "the group (jaccl where there is RDMA) comes up again after each death", hosts=True),
    Check("full-memory", "risky:memory", 300, "more memory asked of the GPU than it has",
          "it is an exception that Tandem knows, and the device goes on", risky=True),
    Check("fast-fences", "risky:fast_fences", 180, "MLX's fast fences",
          "whether sums with them are right, and whether the GPU computes afterwards", risky=True),
)  # fmt: skip
CLUSTER = ("model", "doctor", "links", "hosts", "deaths", "fast-fences")
"""Checks of `--cluster`; the last may lock a GPU up."""


def chosen(*, hosts: bool, risky: bool, only: list[str] | None = None) -> list[Check]:
    """Return the checks of a run: exactly those named in `only`, or else all that `hosts` and `risky` allow."""
    if only is not None:
        return [one for one in CHECKS if one.name in only]
    return [one for one in CHECKS if (hosts or not one.hosts) and (risky or not one.risky)]


def resolve(entry: str) -> Callable[[Task], Figures]:
    """Import and return the function that `entry` (`module:function`) names."""
    module, _, function = entry.partition(":")
    check: Callable[[Task], Figures] = getattr(importlib.import_module(f"{__package__}.checks.{module}"), function)
    return check


def look(task: Task) -> TaskResult:
    """Run one check in this process; exceptions become a `failed` result. Call before anything imports mlx."""
    preload_blas("auto")
    try:
        return TaskResult(verdict="ok", figures=resolve(task.entry)(task))
    except NotApplicable as reason:
        return TaskResult(verdict="does not apply", detail=reason.message)
    except Differs as difference:
        return TaskResult(verdict="failed", detail=difference.message, figures=difference.figures)
    except TandemError as error:
        return TaskResult(verdict="failed", detail=error.message)
    except Exception as error:  # noqa: BLE001 - any exception belongs in the report
        words = str(error).strip().splitlines() or [""]
        return TaskResult(verdict="failed", detail=f"{type(error).__name__}: {words[0]}")
