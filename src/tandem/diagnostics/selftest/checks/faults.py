"""Checks with processes that die, hang or lose their parent, and of sleep prevention on Macs."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from tandem.diagnostics.selftest.check import Differs, NotApplicable
from tandem.diagnostics.selftest.checks.fences import ring_ranks
from tandem.diagnostics.selftest.server import all_under_way, ask, descendants, gone, prompt_of, seconds, serving, until
from tandem.diagnostics.tasks import Figures, Task, check_parts
from tandem.system.tools import output_of

TOKENS, RANDOM_TOKENS = 60, 240
"""Tokens per answer; a tiny random model needs more, or it finishes before the fault."""
PROMPTS = 3
BACK_S, GONE_S = 90.0, 20.0
STAGES = ("-pp", "2", "--prefix-cache", "0")
LONGEST_S = 120.0
JOINED_S = 3.0
"""Seconds until a rank that waits for its peer is inside MLX's ring start-up."""
HOLDER = re.compile(r"^\s*pid (\d+)\(.*\).* Prevent(?:UserIdle)?SystemSleep\b", re.MULTILINE)


def killed(task: Task) -> Figures:
    """Check that answers complete unchanged when a rank is killed (SIGKILL) while generating them."""
    return _struck(task, signal.SIGKILL)


def stopped(task: Task) -> Figures:
    """Check that a rank stopped by SIGSTOP is detected and replaced."""
    return _struck(task, signal.SIGSTOP)


def _struck(task: Task, number: signal.Signals) -> Figures:
    tokens = RANDOM_TOKENS if task.random else TOKENS
    with serving(task.model, *STAGES) as server:
        prompts = [prompt_of(12, seed) for seed in range(PROMPTS)]
        calm = [ask(server, prompt, tokens).text for prompt in prompts]
        before = server.ranks()
        answers = all_under_way(server, prompts, tokens)
        victim = before[-1]
        began = time.monotonic()
        os.kill(victim, number)
        if not until(lambda: gone(victim), GONE_S):
            os.kill(victim, signal.SIGKILL)
            raise Differs(
                f"a rank that was struck by {number.name} is replaced within {GONE_S:g} s, expected; it is still there, seen"
            )
        noticed = seconds(began)
        texts = [answer.done().text for answer in answers]
        figures: Figures = {"gone after, s": noticed, "all answers after, s": seconds(began)}
        if not until(lambda: len(set(server.ranks()) - {victim}) == len(before), BACK_S):
            raise Differs(
                f"{len(before)} ranks again without the one that was struck, expected; process ids "
                f"{server.ranks()} after {before}, seen",
                figures,
            )
        after = server.ranks()
        if wrong := sum(text != other for text, other in zip(calm, texts, strict=True)):
            raise Differs(f"the answers of a calm server, expected; {wrong} of {PROMPTS} differ, seen", figures)
    if left := _left({*before, *after}):
        raise Differs(f"no process is left when the server has ended, expected; {len(left)}, seen", figures)
    return figures


def _left(pids: Collection[int]) -> list[int]:
    """Return the processes that are still running after `GONE_S` seconds."""
    until(lambda: all(map(gone, pids)), GONE_S)
    return [pid for pid in pids if not gone(pid)]


def orphans(task: Task) -> Figures:
    """Check that no process survives a killed supervisor, or a parent killed while its rank is in MLX's ring start-up."""
    with serving(task.model, *STAGES) as server:
        pids = descendants(server.process.pid)
        began = time.monotonic()
        server.process.kill()
        server.process.wait(10.0)
        left = _left(pids)
        figures: Figures = {"processes below a supervisor": len(pids), "gone after, s": seconds(began)}
    if left:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        raise Differs(f"no process outlives its supervisor by {GONE_S:g} s, expected; {len(left)}, seen", figures)
    return figures | _alone()


def _alone() -> Figures:
    """Kill the parent of a rank that waits in MLX's ring start-up; return the seconds until the rank exits. Raises Differs."""
    with check_parts("faults:lonely_parent", [{}], [{}]) as [parent]:
        file = _pid_file(parent.result.parent)
        if not until(lambda: file.exists() and file.read_text().isdigit(), GONE_S):
            raise Differs("a rank that waits for its peer, expected; none came up, seen")
        rank = int(file.read_text())
        time.sleep(JOINED_S)
        if gone(rank):
            raise Differs("a rank that waits for its peer, expected; it has ended, seen")
        began = time.monotonic()
        parent.kill()
        if not until(lambda: gone(rank), GONE_S):
            os.kill(rank, signal.SIGKILL)
            raise Differs(f"a rank in MLX's start-up ends within {GONE_S:g} s of its parent, expected; it is still there, seen")
    return {"rank in MLX's start-up gone after, s": seconds(began)}


def lonely_parent(task: Task) -> Figures:
    """Start a rank whose peer never joins, write its process id to a file, and wait to be killed."""
    with ring_ranks("fences:waiting_rank", count=1) as [rank]:
        _pid_file(Path(task.directory)).write_text(str(rank.pid))
        time.sleep(LONGEST_S)
    return {}


def _pid_file(directory: Path) -> Path:
    return directory / "pid"


def awake(task: Task) -> Figures:
    """Check that idle sleep is prevented while a server runs, and only then."""
    if sys.platform != "darwin":
        raise NotApplicable("idle sleep is held off on macOS alone")
    before = holders()
    with serving(task.model) as server:
        during = holders()
        ask(server, prompt_of(8), 4)
    if not during - before:
        raise Differs("an assertion against sleep while a server runs, expected; none, seen")
    ended = until(lambda: not (holders() & (during - before)), GONE_S)
    if not ended:
        raise Differs("no assertion when the server has ended, expected; it is still held, seen")
    return {"assertions of the server": len(during - before)}


def holders() -> set[str]:
    """Return the ids of the processes that prevent system sleep."""
    return set(HOLDER.findall(output_of(["pmset", "-g", "assertions"]) or ""))
