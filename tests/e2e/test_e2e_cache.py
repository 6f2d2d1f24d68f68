"""Prefixes of a running server: warmed, listed and dropped, by the command line and over HTTP."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import httpx
import pytest

from served import PATIENCE_S, TLS, Server, serving
from tandem.cli.main import main
from tandem.protocol.kv_blocks import DISK_BLOCK_SIZE
from tandem.testing import tiny_model

SYSTEM = "You answer in verse, and never say why. " * 25


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("cache")
    # So wide that it pays to read, however busy the disk.
    tiny_model(directory / "tiny", config={"max_position_embeddings": 2048, "intermediate_size": 4096})
    (directory / "keys").write_text("sesame\n")
    (directory / "keys").chmod(0o600)
    (directory / "system.txt").write_text(SYSTEM)
    return directory


@pytest.fixture(scope="module")
def two(place: Path) -> Iterator[Server]:
    with serving(
        place / "tiny",
        "--data-parallel-size",
        "2",
        "--kv-disk",
        place / "kv",
        "--api-key-file",
        place / "keys",
        "--default-max-tokens",
        "4",
        "--warmup-prompts",
        place / "system.txt",
        "--unknown-fields",
        "refuse",
    ) as server:
        server.headers["Authorization"] = "Bearer sesame"
        server.client = server.client.with_options(api_key="sesame")
        yield server


def command(server: Server, place: Path, *arguments: str, code: int = 0) -> str:
    """What `tandem cache` says, run in this process: its start would take longer than what it does."""
    told, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(told), redirect_stderr(errors):
        ended = main(["cache", *arguments, "--url", server.url, "--api-key-file", str(place / "keys")])
    assert ended == code, (told.getvalue(), errors.getvalue())
    return (told if code < 2 else errors).getvalue()


def ask(server: Server, method: str, path: str, body: Any = None) -> httpx.Response:
    return httpx.request(method, server.url + path, json=body, headers=server.headers, timeout=PATIENCE_S, verify=TLS)


def cached(server: Server, system: str) -> int:
    answer = server.client.chat.completions.create(
        model="default", messages=[{"role": "system", "content": system}, {"role": "user", "content": "Why?"}]
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens_details.cached_tokens or 0


def test_the_prompts_of_warm_are_there_when_the_server_is_ready(two, place):
    for replica in ask(two, "GET", "/v1/cache").json()["data"][0]["replicas"]:
        [one] = replica["prefixes"]
        assert one["tokens"] >= 512 and one["disk_tokens"] == one["tokens"] // DISK_BLOCK_SIZE * DISK_BLOCK_SIZE
    assert cached(two, SYSTEM) > 512
    told = two.command("serve", str(place / "tiny"), "--warmup-prompts", str(place / "none.txt"))
    assert told.returncode == 2
    assert told.stderr.startswith(f"tandem: --warmup-prompts {place / 'none.txt'}: cannot be read")
    command(two, place, "drop")


def test_a_system_prompt_is_warmed_listed_and_dropped(two, place):
    told = command(two, place, "warm", str(place / "system.txt")).splitlines()
    total = int(told[0].split(": ")[1].split()[0])
    assert 512 < total < 768
    there = total // DISK_BLOCK_SIZE * DISK_BLOCK_SIZE
    # The second replica reads what the first has put on the disk that they share.
    kept = f"kept in memory {total // 32 * 32}, on disk {there}"
    assert told[1] == f"  replica 0: {total} computed, 0 were there; {kept}"
    assert told[2] == f"  replica 1: {total - there} computed, {there} were there; {kept}"
    for _ in range(3):  # wherever it is sent
        assert cached(two, SYSTEM) == total // 32 * 32
    listed = command(two, place, "list").splitlines()
    assert {line.split()[1] for line in listed[1:]} == {"0", "1"}
    assert all(line.split()[3] == str(there) for line in listed[1:])
    info = command(two, place, "info")
    assert f"disk          {place / 'kv'}: {there} tokens" in info
    shown = command(two, place, "drop", "--tier", "memory")
    assert "replica 1" in shown
    assert " 0 tokens are gone" not in shown
    assert command(two, place, "list").startswith("no prefix is in memory")
    assert f"{place / 'kv'}: {there} tokens" in command(two, place, "info")
    command(two, place, "warm", str(place / "system.txt"))
    gone = ask(two, "DELETE", "/v1/cache").json()
    assert sum(one["memory_tokens"] for one in gone["replicas"]) == 2 * (total // 32 * 32)
    assert sum(one["disk_bytes"] for one in gone["replicas"]) > 0
    assert not list((place / "kv").glob("*/*.kv"))
    assert cached(two, SYSTEM) == 0


def test_requests_and_what_is_wrong_with_them(two, place):
    chat = {"messages": [{"role": "system", "content": SYSTEM + "Rhyme!"}, {"role": "user", "content": "Why?"}]}
    (place / "chats.jsonl").write_text(json.dumps(chat) + "\n" + json.dumps({"prompt": "x" * 300}) + "\n")
    told = command(two, place, "warm", str(place / "chats.jsonl"))
    assert told.count("replica 1: ") == 2
    answer = two.client.chat.completions.create(model="default", messages=chat["messages"])
    assert answer.usage is not None
    assert answer.usage.prompt_tokens - (answer.usage.prompt_tokens_details.cached_tokens or 0) <= 32
    (place / "short.txt").write_text("hi")
    assert "fewer than 32" in command(two, place, "warm", str(place / "short.txt"), "--role", "none", code=1)
    (place / "bad.json").write_text("{")
    (place / "second.jsonl").write_text(json.dumps(chat) + "\n" + json.dumps({"prompt": "x", "frob": 1}) + "\n")
    for arguments, why in (
        (["warm", str(place / "bad.json")], "is not valid JSON"),
        (["warm", str(place / "no")], "No such file"),
        (["warm", str(place / "second.jsonl")], "second.jsonl, prompt 2: "),
        (["drop", "--unused-days", "1"], "--kv-disk"),
        (["list", "--kv-disk", "kv"], "one is about a directory"),
        (["list", "--model", "other"], "does not exist"),
    ):
        line = command(two, place, *arguments, code=2)
        assert why in line
        assert line.count("\n") == 1
    for method, path, body, status, param in (
        ("POST", "/v1/cache/warm", {}, 400, None),
        ("POST", "/v1/cache/warm", {"prompt": "x", "frob": 1}, 400, "frob"),
        ("POST", "/v1/cache/warm", {"prompt": ["y" * 3000]}, 400, "prompt"),
        ("DELETE", "/v1/cache?tier=disk", None, 400, "tier"),
        ("GET", "/v1/cache?all=1", None, 400, "all"),
        ("GET", "/v1/cache?model=other", None, 404, "model"),
    ):
        answer = ask(two, method, path, body)
        assert answer.status_code == status, answer.text
        assert answer.json()["error"]["param"] == param
    assert httpx.get(f"{two.url}/v1/cache").status_code == 401


def test_a_directory_without_its_server(two, place):
    stranger = two.command("cache", "drop", "--kv-disk", str(place))
    assert stranger.returncode == 2
    assert "is no directory that Tandem keeps KV in" in stranger.stderr
    assert (place / "keys").exists()
    command(two, place, "warm", str(place / "system.txt"))
    listed = two.command("cache", "list", "--kv-disk", str(place / "kv")).stdout
    assert "tiny" in listed
    assert "bfloat16" in listed or "float32" in listed
    assert "kept       " in two.command("cache", "info", "--kv-disk", str(place / "kv")).stdout
    old = two.command("cache", "drop", "--kv-disk", str(place / "kv"), "--unused-days", "1").stdout
    assert old.startswith("0 files are gone")
    assert list((place / "kv").glob("*/*.kv"))
    assert two.command("cache", "drop", "--kv-disk", str(place / "kv")).returncode == 0
    assert not list((place / "kv").glob("*/*.kv"))
    assert cached(two, SYSTEM) >= 512  # what is in memory is not touched
