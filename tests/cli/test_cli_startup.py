"""What a server says while it starts, on a terminal and into a log; and what it says last when it cannot."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from cli.terminal import Terminal
from jargon import jargon
from tandem.testing import tiny_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    # As deep as this its self-check takes long enough to be seen.
    return str(tiny_model(tmp_path_factory.mktemp("startup") / "tiny", layers=24))


def test_a_terminal_shows_live_lines_and_then_what_to_do_and_what_was_lost(model):
    with Terminal("serve", model, "-pp", "2", "--port", "0") as terminal:
        terminal.wait_for("stop  Ctrl-C")
        text = terminal.text
        assert "computing a first answer over all parts" in text and "? bytes" not in text
        assert jargon(text) == set() and "INFO" not in text and "Uvicorn" not in text
        ready = text[text.rindex("Tandem is ready: ") :].splitlines()
        address = ready[0].split()[3]
        assert ready[1].split() == ["page", f"{address}/ui"]
        assert f"curl {address}/v1/chat/completions" in ready[2]
        assert ready[0].endswith(f", in 2 parts on {socket.gethostname()}, {socket.gethostname()})")
        os.kill(httpx.get(f"{address}/v1/status", timeout=240).json()["engine"]["ranks"][1]["pid"], signal.SIGKILL)
        terminal.wait_for("unfinished request(s) go on")
        terminal.type("\x03")
        assert terminal.ends() == 0
        lost, again, stopping, stopped = [line for line in terminal.text.splitlines() if re.search("ERROR|WARNING|Stopp", line)]
        assert "was killed (SIGKILL)" in lost and "Serving again on" in again
        assert "requests wait" in " ".join(terminal.text.split())
        assert "have 5 s to end" in stopping and "nothing that the server started runs" in stopped
        assert jargon(terminal.text) == set()


def test_ctrl_c_says_what_it_waits_for_and_a_second_one_ends_it(model):
    ask = {"model": "default", "prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with (
        Terminal("serve", model, "--port", "0", "--max-batch-size", "1", "--drain-timeout", "240") as terminal,
        ThreadPoolExecutor(8) as clients,
    ):
        terminal.wait_for("stop  Ctrl-C")
        address = terminal.text[terminal.text.rindex("Tandem is ready: ") :].split()[3]
        answers = [clients.submit(httpx.post, f"{address}/v1/completions", json=ask, timeout=240) for _ in range(8)]
        # Each has to be there, as one that still connects when the server ends has no answer.
        while sum(one.done() for one in answers) + len(httpx.get(f"{address}/v1/status", timeout=240).json()["requests"]) < 8:
            pass
        terminal.type("\x03")
        terminal.wait_for("answers under way have 240 s to end (Ctrl-C ends them now)")
        terminal.type("\x03")
        assert terminal.ends() == 0
        assert "shutting down" in "".join(one.result().text for one in answers)


def test_a_log_has_few_lines_in_an_order_that_is_true(model):
    command = [sys.executable, "-m", "tandem", "serve", model, "-pp", "2", "--port", "0"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    )
    try:
        assert process.stdout is not None
        lines = []
        while not lines or "stop" not in lines[-1].split()[:1]:
            lines.append(process.stdout.readline())
            assert lines[-1], lines
        process.send_signal(signal.SIGTERM)
        rest = process.communicate(timeout=240)[0]
    finally:
        process.kill()
        process.wait()
    assert "\x1b" not in "".join(lines)

    def places(words):
        return [i for i, line in enumerate(lines) if words in line]

    assert len(places("% of")) <= 4
    assert len(places("Uvicorn running on")) == 1
    assert "Uvicorn" not in rest
    ready = places("Tandem is ready")[0]
    assert places("Uvicorn running on")[0] < ready
    assert places("engine ready")[0] < places("Uvicorn running on")[0]
    assert len(places("Post-load barrier passed")) == 2
    assert min(places("Post-load barrier passed")) > max(places("Sharded model loaded successfully"))
    assert places("self-check: 2 ranks compute")[0] < places("self-check passed: 2 ranks agree")[0]


def test_the_reason_is_said_last(model, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tandem", "serve", model, "-pp", "2", "--port", "0", "--kv-tokens", "1000000000000"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode in (2, 3)
    said = [line for line in done.stderr.splitlines() if "Killing the api" not in line]  # a busy machine may need that
    assert "--kv-tokens" in said[-1]
    assert "draining" not in done.stderr
