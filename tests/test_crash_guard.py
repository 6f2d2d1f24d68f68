"""Threads and tasks end at a border, and every one has one."""

from __future__ import annotations

import ast
import asyncio
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import tandem
from tandem import crash_guard
from tandem.crash_guard import EXIT_BROKEN, start_task, start_thread

SOURCES = Path(tandem.__file__).parent
NAKED = {"Thread", "Timer", "create_task", "ensure_future", "start_new_thread"}
AWAITED = {
    "server/waiting.py unless": "both are awaited there, and their results taken",
    "server/acquire.py _wait_in_stream": "awaited there, and its result taken",
    "bench/workload.py offer": "gathered there",
    "server/chats/picture_fetch.py fetch_pictures": "gathered there, and ended",
    "llm/llm.py start": "awaited there, also when it is cancelled",
    "executors/gpu_probe.py probe_gpu": "a timer that hands on its one error",
    "processes/sandbox.py ask": "a timer that kills a process, which cannot fail",
}
"""Those that somebody waits for, who gets what they raise."""


def started() -> Iterator[tuple[str, str, int]]:
    """File and function of each thread and task that is started without a border."""
    for path in sorted(SOURCES.rglob("*.py")):
        place = str(path.relative_to(SOURCES))
        if place == "crash_guard.py":
            continue
        tree = ast.parse(path.read_text())
        functions = [one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
        for call in ast.walk(tree):
            if not isinstance(call, ast.Call):
                continue
            name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            if name in NAKED:
                around = [one for one in functions if one.lineno <= call.lineno <= (one.end_lineno or 0)]
                innermost = max(around, key=lambda one: one.lineno).name if around else ""
                yield place, innermost, call.lineno


def test_no_thread_and_no_task_is_without_a_border() -> None:
    found = {f"{place} {function}": line for place, function, line in started()}
    naked = [f"{place}, line {line}" for place, line in found.items() if place not in AWAITED]
    assert not naked, (
        "start these with tandem.crash_guard.start_thread or start_task; what their creator awaits can be "
        f"listed in AWAITED with the reason: {naked}"
    )
    assert set(AWAITED) <= set(found), "these are no more"


def test_every_process_of_our_own_says_so() -> None:
    entries = [path for path in SOURCES.rglob("*.py") if '__name__ == "__main__"' in path.read_text()]
    silent = {str(path.relative_to(SOURCES)) for path in entries if "own_process()" not in path.read_text()}
    assert silent == set()


def test_what_a_thread_raises_is_logged_without_its_words_and_handed_on(caplog: pytest.LogCaptureFixture) -> None:
    got: list[BaseException] = []

    words = "-".join(("a", "prompt"))

    def work() -> None:
        raise ValueError(words)

    start_thread(work, name="worker", on_failure=got.append).join()
    assert isinstance(got[0], ValueError)
    [record] = caplog.records
    assert record.levelno == logging.ERROR
    assert "the thread 'worker' has failed: ValueError; what it did has ended" in record.getMessage()
    assert "in work" in record.getMessage()
    assert words not in record.getMessage()


def test_what_a_task_raises_is_logged_and_handed_on_and_a_cancelled_one_has_not_failed(caplog: pytest.LogCaptureFixture) -> None:
    got: list[BaseException] = []

    async def fail() -> None:
        raise KeyError("x")

    async def scene() -> None:
        sleeping = start_task(asyncio.sleep(60), name="sleeper")
        await asyncio.gather(start_task(fail(), name="failing", on_failure=got.append), return_exceptions=True)
        sleeping.cancel()
        await asyncio.gather(sleeping, return_exceptions=True)

    asyncio.run(scene())
    assert [type(one) for one in got] == [KeyError]
    [record] = caplog.records
    assert "the task 'failing' has failed: KeyError" in record.getMessage()
    assert not crash_guard._tasks


def test_in_a_process_of_others_a_failure_is_told_and_the_process_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    start_thread(lambda: 1 / 0, name="worker").join()
    [record] = caplog.records
    assert record.levelno == logging.CRITICAL
    assert "ZeroDivisionError; nothing replaces it" in record.getMessage()


CHILD = """
import asyncio, sys, threading, time
from tandem import crash_guard, log
log.set_up("INFO", prefix="[engine]")
crash_guard.own_process()

def on_failure(error):
    raise error

async def fail():
    raise RuntimeError("x")

async def main():
    crash_guard.start_task(fail(), name="model_pool")
    await asyncio.sleep(60)

if sys.argv[1] == "thread":
    crash_guard.start_thread(lambda: 1 / 0, name="ipc_server")
elif sys.argv[1] == "handed on":
    crash_guard.start_thread(lambda: 1 / 0, name="ipc_server", on_failure=on_failure)
else:
    asyncio.run(main())
time.sleep(60)
"""


@pytest.mark.parametrize("what", ["thread", "handed on", "task"])
def test_a_process_of_our_own_ends_with_one_report_when_a_thread_or_task_breaks(what: str) -> None:
    done = subprocess.run([sys.executable, "-c", CHILD, what], capture_output=True, text=True, timeout=240)
    assert done.returncode == EXIT_BROKEN
    assert done.stderr.count("has failed") == 1
    name = "model_pool" if what == "task" else "ipc_server"
    assert f"CRITICAL [engine] the {what if what == 'task' else 'thread'} '{name}' has failed" in done.stderr
    assert "this process ends, for another to be started in its place" in done.stderr


def test_the_ipc_server_of_a_broken_thread_can_be_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from tandem.engine import ipc_server
    from tandem.protocol.control import EngineStatus

    status = EngineStatus(
        query_id=0,
        state="ready",
        detail="",
        model="m",
        source="",
        max_context=1,
        vocab_size=1,
        queued=0,
        running=0,
        kv_tokens_used=0,
        kv_tokens_total=1,
        restarts=0,
        stages=1,
        micro_batches=1,
        ranks=[],
    )
    monkeypatch.setattr(ipc_server.IPCServer, "_forget_silent", lambda self: 1 / 0)
    door = ipc_server.IPCServer(tmp_path / "engine.sock", status, lambda: b"")
    door._thread.join(240)
    assert not door._thread.is_alive()
    closing = threading.Thread(target=door.close, daemon=True)
    closing.start()
    closing.join(240)
    assert not closing.is_alive(), "close() hangs"
    assert "the thread 'ipc_server' has failed: ZeroDivisionError" in caplog.text
