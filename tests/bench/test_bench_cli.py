"""`tandem bench` and `tandem top` as commands, against a real server."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from served import served
from tandem.testing import tiny_model

pytestmark = pytest.mark.slow
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.endswith("_API_KEY")}


def tandem(words: str, *more: str, key: str = "secret") -> subprocess.CompletedProcess[str]:
    """`words` are separated by blanks; `more` may hold some."""
    return subprocess.run(
        [sys.executable, "-m", "tandem", *words.split(), *more],
        capture_output=True,
        text=True,
        timeout=240,
        env=ENVIRONMENT | {"OPENAI_API_KEY": key},
    )


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tiny_model(tmp_path_factory.mktemp("tiny"))
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("secret\n")
    keys.chmod(0o600)
    with served(directory, "-pp", "2", "--api-key-file", keys) as address:
        yield address


SMALL = "--num-prompts 6 --random-input-len 12 --random-output-len 8 --ignore-eos"


def test_serve_measures_and_writes(url: str, tmp_path: Path) -> None:
    done = tandem(
        f"bench serve --base-url {url} {SMALL} --max-concurrency 2 --goodput e2el:60000 --save-detailed --result-filename r.json",
        "--result-dir",
        str(tmp_path / "new"),
        "--plot",
        str(tmp_path / "plot.svg"),
    )
    assert done.returncode == 0, done.stderr
    assert "Time to first token" in done.stdout and "P99" in done.stdout and "Good requests" in done.stdout
    result = json.loads((tmp_path / "new" / "r.json").read_text())
    assert result["completed"] == 6 and result["failed"] == 0 and result["total_output_tokens"] == 48
    assert result["request_goodput"] == pytest.approx(result["request_throughput"])
    assert 0 < result["mean_ttft_ms"] <= result["p99_ttft_ms"] < 60_000
    assert result["rounds"][0]["output_lens"] == [8] * 6 and len(result["rounds"][0]["itls"]) == 6
    assert ElementTree.fromstring((tmp_path / "plot.svg").read_text()).tag.endswith("svg")


def test_serve_compares_two_by_turns(url: str, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    done = tandem(
        f"bench serve --base-url {url}/v1/ --compare {url} --rounds 2 {SMALL} --save-result "
        "--result-filename r.json --endpoint /v1/chat/completions --dataset-name prefix_repetition "
        "--prefix-repetition-prefix-len 16 --prefix-repetition-suffix-len 4 "
        "--prefix-repetition-output-len 5 --request-rate 50",
        "--result-dir",
        str(tmp_path),
        "--api-key-file",
        str(key),
        key="wrong",
    )
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^(round \d|all rounds): second server over first: TTFT \d", done.stdout, re.M) == [
        "round 1",
        "round 2",
        "all rounds",
    ]
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["completed"] == result["compared"]["completed"] == 12
    assert result["total_output_tokens"] == result["compared"]["total_output_tokens"] == 60
    assert set(result["ratios"]) >= {"mean_ttft_ms", "output_throughput"}


def test_latency(url: str, tmp_path: Path) -> None:
    done = tandem(
        f"bench latency --base-url {url} --num-iters 3 --num-iters-warmup 1 --input-len 8 --output-len 6 --ignore-eos",
        "--output-json",
        str(tmp_path / "l.json"),
    )
    assert done.returncode == 0, done.stderr
    assert "Tokens per second after the first" in done.stdout
    result = json.loads((tmp_path / "l.json").read_text())
    assert result["completed"] == 3 and result["total_output_tokens"] == 18


def test_requests_that_fail_are_counted(url: str) -> None:
    # Prompts of 12 words pass as warm-up; long ones are beyond the tiny model's context of 512 tokens.
    done = tandem(f"bench serve --base-url {url} {SMALL} --dataset-name long --long-input-len 5000 --num-warmups 0")
    assert done.returncode == 1
    assert re.search(r"Failed requests +2", done.stdout) and "2 of 6 requests failed" in done.stderr
    assert "context length" in done.stderr


@pytest.mark.parametrize("words", ["--once", ""])  # its output goes into a pipe
def test_top_shows_the_server(url: str, words: str) -> None:
    tandem(f"bench latency --base-url {url} --num-iters 1 --output-len 4 --input-len 4")
    done = tandem(f"top --base-url {url} {words} --interval 0.2")
    assert done.returncode == 0, done.stderr
    assert "healthy" in done.stdout and re.search(r"tokens/s \d.* TTFT \d+ ms", done.stdout)
    ranks = re.findall(r"^ *(\d of 2) +(\d-\d) ", done.stdout, re.MULTILINE)
    assert ranks == [("1 of 2", "0-1"), ("2 of 2", "2-3")]


@pytest.mark.parametrize(("command", "sign"), [("top", b"healthy"), ("status", b"process")])
def test_top_and_status_watch_until_they_are_interrupted(url: str, command: str, sign: bytes) -> None:
    master, slave = pty.openpty()
    named = ["--base-url", url] if command == "top" else ["--url", url, "--watch"]
    process = subprocess.Popen(
        [sys.executable, "-m", "tandem", command, *named, "--interval", "0.1"],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=ENVIRONMENT | {"OPENAI_API_KEY": "secret", "TERM": "xterm"},
    )
    os.close(slave)
    screen = b""
    try:
        while screen.count(sign) < 3:
            readable, _, _ = select.select([master], [], [], 240)
            assert readable, screen
            screen += os.read(master, 65536)
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # the end of a terminal
            while os.read(master, 65536):
                pass
        assert process.wait(240) == 0
    finally:
        process.kill()
        process.wait()
        os.close(master)


OPERATIONS = [(name, size) for name in ("all_sum", "between", "tcp", "ring") for size in (64, 4096)]


def test_comm_measures_what_a_plan_is_made_with(tmp_path: Path) -> None:
    """This machine, then two hosts of a file; both are in the profile."""
    profile, hosts = tmp_path / "profile.json", tmp_path / "hosts.json"
    few = ("--sizes", "4K,64", "--num-iters", "5", "--output-json", str(tmp_path / "c.json"))
    done = tandem("bench comm", *few, "--write-profile", str(profile))
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "c.json").read_text())["rows"]
    assert [(row["operation"], row["bytes"]) for row in rows] == OPERATIONS
    assert all(0 < row["median_us"] <= row["p99_us"] for row in rows)
    assert re.search(r"weights of float32: \d", done.stdout) and "tandem plan MODEL --profile" in done.stdout
    [here] = json.loads(profile.read_text())["hosts"]

    hosts.write_text(json.dumps([{"ssh": "localhost"}, {"ssh": "127.0.0.1"}]))
    done = tandem("bench comm", *few, "--hostfile", str(hosts), "--write-profile", str(profile))
    assert done.returncode == 0, done.stderr
    assert "=== localhost - 127.0.0.1 (ring)" in done.stdout
    [pair] = json.loads((tmp_path / "c.json").read_text())["pairs"]
    assert [(row["operation"], row["bytes"]) for row in pair["rows"]] == OPERATIONS
    written = json.loads(profile.read_text())
    assert [one["name"] for one in written["hosts"]] == [here["name"], "localhost", "127.0.0.1"]
    assert [one["hosts"] for one in written["links"]] == [[here["name"]] * 2, ["localhost", "127.0.0.1"]]

    model = str(tiny_model(tmp_path / "tiny"))
    done = tandem("plan", model, "--hostfile", str(hosts), "--profile", str(profile), "--layout", "tp=2", "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert f"{profile} gives the speed of localhost, 127.0.0.1." in plan["notes"]
    assert "Measured links over ring: localhost - 127.0.0.1." in plan["notes"]
    link = written["links"][1]
    assert plan["candidates"][0]["prediction"]["collective"] >= link["sum_us"] / 1e6 * 0.99


def test_the_wrong_key_is_named(url: str) -> None:
    for words in ("bench latency", "top --once"):
        done = tandem(f"{words} --base-url {url}", key="wrong")
        assert done.returncode == 2 and "401" in done.stderr and "--api-key-file" in done.stderr, done.stderr
