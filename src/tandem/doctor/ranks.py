"""Processes of this machine that get a task and leave an answer in a file, and ranks that time, which are some."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from tandem.doctor.findings import Host
from tandem.doctor.messages import LATE, TIMING_MODULE, RankTimes, TimingTask
from tandem.env import child_environment
from tandem.launchers.base import World
from tandem.launchers.worlds import Devices, jaccl_world, nccl_world, ring_world
from tandem.processes.child import ChildProcess
from tandem.protocol.keys import ClusterKeys

T = TypeVar("T")
TAIL = 65536
"""Bytes of what a process wrote, from the end, in which its last words are looked for."""
END_S = 10.0
POLL_S = 0.05


class TaskProcess(ChildProcess):
    """A process with a task, which names the file for its answer (`result`); what it writes goes to a log beside that
    file. A context manager that ends it."""

    def __init__(self, task: Any, module: str, *, name: str, variables: Mapping[str, str] | None = None) -> None:
        """`task` is a struct, `module` the entry point; `variables` go into the environment. Raises SpawnError."""
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

    def answer(self, kind: type[T]) -> T | None:
        """Return what it left; None if that is nothing."""
        try:
            return msgspec.json.decode(self._result.read_bytes(), type=kind)
        except FileNotFoundError:
            return None

    def last_words(self) -> str:
        """The last line that it wrote; empty if there is none."""
        lines = [line for line in self._log.read_bytes()[-TAIL:].decode(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip() if lines else ""


def leave(answer: Any, result: str) -> None:
    """Write the answer, whole or not at all; called in the process."""
    part = Path(result + ".part")
    part.write_bytes(msgspec.json.encode(answer))
    part.replace(result)


def run_ranks(tasks: Sequence[TimingTask], variables: Sequence[Mapping[str, str]], timeout_s: float,
              module: str = TIMING_MODULE) -> list[RankTimes]:
    """Run ranks that time, each with its variables; what each finds. All end when one fails, or when time is up."""
    found: dict[int, RankTimes] = {}
    deadline = time.monotonic() + timeout_s
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-ranks-"))
        processes = []
        for task, own in zip(tasks, variables, strict=True):
            task = msgspec.structs.replace(task, result=f"{directory}/{task.rank}.json")
            processes.append(stack.enter_context(TaskProcess(task, module, name=f"rank {task.rank}", variables=own)))
        while len(found) < len(tasks) and time.monotonic() < deadline and not any(one.error for one in found.values()):
            time.sleep(POLL_S)
            for rank, process in enumerate(processes):
                if rank not in found and process.poll() is not None:
                    words = process.last_words() or process.describe_exit()
                    found[rank] = process.answer(RankTimes) or RankTimes(error=words)
    return [found.get(rank, RankTimes(error=LATE)) for rank in range(len(tasks))]


def tasks_of(task: TimingTask, addresses: Sequence[str], ports: Sequence[int]) -> list[TimingTask]:
    """The task of each rank of a group, which listens at its address and port."""
    keys, count = ClusterKeys.generate(), len(addresses)
    ends = [f"tcp://{address}:{port}" for address, port in zip(addresses, ports, strict=True)]
    return [msgspec.structs.replace(task, rank=rank, ranks=count, keys=keys, listen=(addresses[rank], ports[rank]),
                                    following=ends[(rank + 1) % count]) for rank in range(count)]


def world(backend: str, hosts: Sequence[Host], ports: Sequence[int]) -> World:
    """What the ranks of a group need in their environment. Raises LayoutError. Pure."""
    listeners = [f"{host.address}:{port}" for host, port in zip(hosts, ports, strict=True)]
    if backend in ("jaccl", "jaccl-ring"):
        devices: list[Devices] = [[list(x) if isinstance(x, tuple) else x for x in one.rdma] for one in hosts]
        return jaccl_world(backend, [one.name for one in hosts], devices, listeners[0])
    if backend == "nccl":
        return nccl_world(len(hosts), listeners[0])
    return ring_world([[one] for one in listeners])
