"""Worker processes: they answer, end by their own limits, and are killed when nobody waits."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import time

import psutil
import pytest

from tandem.checkpoints.files import ModelFiles
from tandem.errors import RequestError, SpawnError, UnavailableError
from tandem.processes import sandbox
from tandem.server.chats.texts import TextsOf
from tandem.server.workers import pool
from tandem.server.workers.pool import Workers
from tandem.text.tokenizer import load_tokenizer

pytestmark = pytest.mark.slow
GOOD = "judge", {"schema": "ChatRequest", "unknown": "refuse", "body": b'{"messages": [{"role": "user", "content": "x"}]}'}
HANG = "hang", {}


def texts(directory):
    """A task that encodes one text."""
    return "encode", {
        "model": TextsOf(str(directory), "tiny", None, False),
        "texts": ["hello"],
        "context": 100,
        "param": "prompt",
        "special": True,
        "closed": False,
    }


def children():
    """Worker processes of this one."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if sandbox.MODULE in process.cmdline():
                found.append(process)
        except psutil.Error:
            continue
    return found


def run(work):
    async def whole():
        workers = Workers()
        try:
            await work(workers)
        finally:
            await workers.close()

    asyncio.run(whole())
    assert not children()


@pytest.fixture
def odd(tmp_path, monkeypatch):
    """Workers that have less and know tasks which go wrong."""
    (tmp_path / "odd_work.py").write_text(
        "import os, signal, time\n"
        "from tandem.server.workers.work import *\n"
        "from tandem.server.workers import work\n"
        "class PanicException(BaseException): pass\n"  # as of libraries in Rust
        "def load(model: TextsOf, **others):\n"
        "    work.kept = bytearray(300 * 2**20)\n"
        "def hang(): time.sleep(600)\n"
        "def burn():\n"
        "    while True: pass\n"
        "def eat(): return len(bytearray(2**30))\n"
        "def die(): os.kill(os.getpid(), signal.SIGKILL)\n"
        "def mistake(): return {}['sec' + 'ret']\n"
        "def panic(): raise PanicException('sec' + 'ret')\n"
    )
    monkeypatch.setattr(pool, "WORK", "odd_work")
    monkeypatch.setattr(pool, "CPU_S", 1)
    monkeypatch.setattr(pool, "MEMORY_BYTES", 256 * 2**20)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))


def test_one_that_reads_no_task_is_ended(monkeypatch, caplog):
    async def work(workers):
        assert await workers.ask("a", *GOOD, type(None)) is None
        children()[0].suspend()
        with monkeypatch.context() as patch:
            patch.setattr(pool, "WALL_S", 2.0)
            with pytest.raises(UnavailableError):
                await workers.ask("a", "judge", {**GOOD[1], "body": b" " * (8 << 20)}, type(None))
        assert await workers.ask("a", *GOOD, type(None)) is None
        assert "does not answer within 2 s" in caplog.text

    run(work)


def test_a_process_does_task_after_task(model_dir):
    tokenizer = load_tokenizer(ModelFiles(model_dir, "tiny"))

    async def work(workers):
        assert await workers.ask("a", *GOOD, type(None)) is None
        [first] = children()
        bad = {**GOOD[1], "body": b'{"messages": [{"role": "user"}]}'}
        with pytest.raises(RequestError, match="needs 'content'") as caught:
            await workers.ask("a", "judge", bad, type(None))
        assert caught.value.param == "messages[0]"
        [packed] = await workers.ask("a", *texts(model_dir), list[bytes], prepare="load")
        assert memoryview(packed).cast("i").tolist() == tokenizer.encode("hello")
        assert children() == [first]

    run(work)


@pytest.mark.parametrize("how", ["burn", "eat"])
def test_a_task_that_takes_too_much_ends_with_its_process_and_is_refused(odd, how):
    async def work(workers):
        with pytest.raises(RequestError, match="make it smaller") as caught:
            await workers.ask("a", how, {}, str)
        assert caught.value.status == 400 and caught.value.code == "request_too_expensive"
        assert await workers.ask("a", *GOOD, type(None)) is None

    run(work)


def test_a_tokenizer_may_take_more_than_a_task_may(odd, model_dir):
    async def work(workers):
        [packed] = await workers.ask("a", *texts(model_dir), list[bytes], prepare="load")
        assert packed

    run(work)


def test_a_tokenizer_whose_files_are_away_is_no_fault_of_the_request(model_dir, tmp_path, caplog):
    async def work(workers):
        task = texts(tmp_path / "model")
        with pytest.raises(UnavailableError) as caught:
            await workers.ask("a", *task, list[bytes], prepare="load")
        assert str(tmp_path) not in caught.value.message
        shutil.copytree(model_dir, tmp_path / "model")
        assert await workers.ask("a", *task, list[bytes], prepare="load")

    run(work)
    assert str(tmp_path) in caplog.text


def test_a_process_that_somebody_kills_is_no_fault_of_the_request(odd, caplog):
    async def work(workers):
        with pytest.raises(UnavailableError):
            await workers.ask("a", "die", {}, str)
        assert await workers.ask("a", *GOOD, type(None)) is None
        [idle] = children()
        os.kill(idle.pid, signal.SIGKILL)
        idle.wait(240)
        assert await workers.ask("a", *GOOD, type(None)) is None, "one that died idle is replaced unseen"

    run(work)
    assert "a worker process was killed (SIGKILL)" in caplog.text


@pytest.mark.parametrize(("how", "name"), [("mistake", "KeyError"), ("panic", "PanicException")])
def test_a_mistake_of_ours_is_logged_without_the_clients_words(odd, caplog, how, name):
    async def work(workers):
        with pytest.raises(RequestError, match="Internal server error") as caught:
            await workers.ask("a", how, {}, str)
        assert caught.value.status == 500
        assert await workers.ask("a", *GOOD, type(None)) is None

    run(work)
    assert f"unexpected {name} in a worker process" in caplog.text
    assert "secret" not in caplog.text


def test_a_task_that_nobody_waits_for_is_killed_and_another_client_is_not_held_up(odd):
    async def work(workers):
        hanging = [asyncio.create_task(workers.ask("a", *HANG, str)) for _ in range(3)]
        while not children():
            await asyncio.sleep(0.01)
        assert await workers.ask("b", *GOOD, type(None)) is None, "though all of a's hang"
        for task in hanging:
            task.cancel()
        await asyncio.gather(*hanging, return_exceptions=True)
        until = time.monotonic() + 240
        while len(children()) > 1:
            assert time.monotonic() < until
            await asyncio.sleep(0.01)
        assert await workers.ask("a", *GOOD, type(None)) is None

    run(work)


def test_when_no_process_can_be_started_the_next_request_tries_again(monkeypatch, caplog):
    tries = []

    def refused(*_, **__):
        tries.append(1)
        raise SpawnError("the worker cannot be started: Cannot allocate memory")

    monkeypatch.setattr(sandbox, "ChildProcess", refused)

    async def work(workers):
        for _ in range(2):
            with pytest.raises(UnavailableError):
                await workers.ask("a", *GOOD, type(None))

    run(work)
    assert len(tries) == 2
    assert "Cannot allocate memory; its request is refused with 503" in caplog.text


def test_none_outlives_the_pool(odd):
    async def work(workers):
        task = asyncio.create_task(workers.ask("a", *HANG, str))
        while not children():
            await asyncio.sleep(0.01)
        await workers.close()
        with pytest.raises(UnavailableError):
            await task

    run(work)
