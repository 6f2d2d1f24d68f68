"""LoRA adapters over HTTP: chosen by model name, loaded and unloaded while two replicas serve."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from adapters import tiny_adapter
from served import PATIENCE_S, TLS, Call, Server, serving, wait_until
from tandem import LLM, SamplingParams
from tandem.testing import tiny_model

PROMPT = "Once there was"
NAMES = ("", "sql", "chat")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("adapters")
    tiny_model(path / "tiny")
    tiny_adapter(path / "tiny", path / "sql")
    tiny_adapter(path / "tiny", path / "chat", keys=("mlp.up_proj", "self_attn.v_proj"), rank=6)
    return path


@pytest.fixture(scope="module")
def expected(place: Path) -> dict[str, str]:
    """What each adapter says where it is the only one."""
    found = {}
    for name in NAMES:
        with LLM(str(place / "tiny"), adapter_path=str(place / name) if name else None) as llm:
            params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
            found[name or "tiny"] = llm.generate(PROMPT, params)[0].text
    assert len(set(found.values())) == len(NAMES)
    return found


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[Server]:
    adapters = ("--lora-modules", f"sql={place / 'sql'}", "--enable-lora", "--max-loras", "2")
    with serving(place / "tiny", "--data-parallel-size", "2", *adapters) as server:
        yield server


def change(server: Server, verb: str, name: str, path: Path | None = None) -> httpx.Response:
    body = {"lora_name": name, **({"lora_path": str(path)} if path else {})}
    return httpx.post(f"{server.url}/v1/{verb}_lora_adapter", json=body, timeout=PATIENCE_S, verify=TLS)


def said(server: Server, name: str, **more: object) -> Call:
    return Call(server.url, {"model": name, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, **more})


def engines(server: Server) -> list[psutil.Process]:
    return [one for one in server.family() if "engine" in one.cmdline() and "tandem.cli.processes" in one.cmdline()]


def test_adapters_are_models_beside_their_base(server: Server, place: Path, expected: dict[str, str]) -> None:
    assert said(server, "chat").join().status == 404
    assert change(server, "load", "chat", place / "chat").text == "Success: LoRA adapter 'chat' added successfully."
    calls = [(name, said(server, name)) for _ in range(3) for name in expected]
    assert [call.join().result["text"] for _, call in calls] == [expected[name] for name, _ in calls]
    listed = {one["id"]: (one["parent"], one["root"]) for one in server.get("/v1/models")["data"]}
    assert listed == {"tiny": (None, "tiny"), "sql": ("tiny", str(place / "sql")), "chat": ("tiny", str(place / "chat"))}
    for verb, name, path, status, word in (
        ("load", "sql", place / "sql", 400, "already been loaded"),
        ("load", "tiny", place / "sql", 400, "has the name of a model; choose another"),
        ("load", "no name", place / "sql", 400, "cannot be a model's name"),
        ("load", "more", place, 400, "adapter_config.json"),
        ("load", "more", place / "sql", 400, "--max-loras"),
        ("unload", "more", None, 404, "cannot be found"),
    ):
        answer = change(server, verb, name, path)
        assert answer.status_code == status and word in answer.json()["error"]["message"]
    running = said(server, "chat", max_tokens=150, stream=True)
    wait_until(lambda: running.chunks > 3)
    assert change(server, "unload", "chat").text == "Success: LoRA adapter 'chat' removed successfully."
    assert running.join().result["usage"]["completion_tokens"] == 150 and "error" not in running.result
    assert said(server, "chat").join().status == 404


def test_a_new_engine_gets_the_adapters_that_were_loaded(server: Server, place: Path, expected: dict[str, str]) -> None:
    assert change(server, "load", "chat", place / "chat").status_code == 200
    calls = [(name, said(server, name, max_tokens=300, stream=True)) for _ in range(2) for name in expected]
    wait_until(lambda: any(call.chunks > 3 for _, call in calls))
    engines(server)[0].kill()
    for name, call in calls:
        assert call.join().result["text"].startswith(expected[name]) and call.result["usage"]["completion_tokens"] == 300
    wait_until(lambda: [one["state"] for one in server.get("/health")["replicas"]] == ["ready", "ready"])
    for name in list(expected) * 4:
        assert said(server, name).join().result["text"] == expected[name]
    running = [said(server, "chat", max_tokens=300, stream=True) for _ in range(3)]
    wait_until(lambda: all(call.chunks > 3 for call in running))
    with ThreadPoolExecutor(1) as pool:
        unload = pool.submit(change, server, "unload", "chat")  # it waits for them, also where they go on
        wait_until(lambda: "chat" not in {one["id"] for one in server.get("/v1/models")["data"]})
        for one in engines(server):
            one.kill()
        for call in running:
            assert call.join().result["text"].startswith(expected["chat"]) and call.result["usage"]["completion_tokens"] == 300
        assert unload.result().status_code == 200
    assert said(server, "chat").join().status == 404
