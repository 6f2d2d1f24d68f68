"""Several models behind one address, as a user runs them: loaded when asked for, unloaded to make room."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from adapters import tiny_adapter
from served import Server, serving, wait_until
from tandem import LLM, SamplingParams
from tandem.env import machine_memory
from tandem.testing import tiny_model

pytestmark = pytest.mark.slow
MIB = 2**20
PROMPT = "Once upon a time"
LONG = {"max_tokens": 200, "temperature": 0, "extra_body": {"ignore_eos": True}}


class Models(Server):
    """A running `tandem serve` with several models."""

    def loaded(self) -> set[str]:
        """Names of the models that /v1/models calls loaded."""
        return {one["id"] for one in self.get("/v1/models")["data"] if one["loaded"]}

    def state(self, model: str) -> str:
        """What /v1/models says of one model."""
        return str(next(one["state"] for one in self.get("/v1/models")["data"] if one["id"] == model))

    def serving_processes(self) -> set[str]:
        """Names of the models whose engines run, by the supervisor's word."""
        return {one["model"] for one in self.status()["replicas"]}

    def status(self) -> Any:
        return json.loads(self.command("status", "--port", self.port, "--json", "--interval", "0").stdout)[0]

    def complete(self, model: str, **options: Any) -> str:
        reply = self.client.completions.create(model=model, prompt=PROMPT, **{**LONG, "max_tokens": 12, **options})
        assert reply.model == ("alpha" if model == "default" else model)
        return reply.choices[0].text


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """alpha and beta (two stages) fit together; gamma (two tensor-parallel ranks) fits alone, its weights are alpha's.

    A position of a tiny model's KV cache takes 1 KiB, so that the caches decide.
    """
    path = tmp_path_factory.mktemp("models")
    for name, seed in (("alpha", 0), ("beta", 1), ("delta", 0)):
        tiny_model(path / name, seed=seed)
    tiny_adapter(path / "alpha", path / "adapter")
    budget = 54 * MIB / machine_memory()
    file = path / "tandem.toml"
    file.write_text(f"""
[model]
model = "{path / "alpha"}"
[scheduler]
memory_fraction = {budget!r}
kv_tokens = 16384
self_check = false
[models.beta]
model = "{path / "beta"}"
pipeline_parallel_size = 2
[models.gamma]
model = "{path / "alpha"}"
tensor_parallel_size = 2
kv_tokens = 40000
[models.delta]
model = "{path / "delta"}"
unload_after = 2.0
[models."alpha:sql"]
model = "{path / "alpha"}"
adapter_path = "{path / "adapter"}"
parallel = [2, 1]
""")
    return file


@pytest.fixture(scope="module")
def server(config: Path) -> Iterator[Models]:
    with serving("--config", config, kind=Models) as one:
        yield one
    assert one.process.returncode == 0


def test_models_come_and_go_with_requests(server: Models) -> None:
    listed = server.get("/v1/models")["data"]
    assert [one["id"] for one in listed] == ["alpha", "beta", "gamma", "delta", "alpha:sql"]
    assert server.loaded() == {"alpha"} and {one["max_model_len"] for one in listed} == {512}
    alpha = server.complete("alpha")
    assert server.complete("default") == alpha, "`default` is the first"
    beta = server.complete("beta")
    assert beta != alpha and server.loaded() == {"alpha", "beta"}, "both fit"
    assert server.complete("gamma") == alpha, "the same weights under another layout"
    assert server.loaded() == server.serving_processes() == {"gamma"}, "it fits alone"
    assert server.complete("alpha") == alpha and server.loaded() == {"alpha"}
    assert server.complete("gamma") == alpha and server.loaded() == {"gamma"}
    assert server.complete("beta") == beta and server.loaded() == {"beta"}
    metrics = httpx.get(f"{server.url}/metrics", timeout=240).text
    assert 'tandem_model_loads_total{model="gamma"} 2.0' in metrics
    assert re.search(r'^tandem_generation_tokens_total{model="beta",replica="\d+"} 12.0$', metrics, re.M)
    assert not re.search(r'^tandem_generation_tokens_total{model="gamma"', metrics, re.M)


def test_everybody_is_served_whatever_they_ask_for(server: Models) -> None:
    """Requests to models that exclude one another, all at once: each is answered by its own model, in its turn."""
    expected = {name: server.complete(name) for name in ("alpha", "beta", "gamma")}
    answers: list[tuple[str, str]] = []
    threads = [
        threading.Thread(target=lambda name=name: answers.append((name, server.complete(name))))
        for name in ("alpha", "gamma", "beta") * 2
    ]
    for thread in threads:
        thread.start()
    seen: set[frozenset[str]] = set()
    while any(thread.is_alive() for thread in threads):
        seen.add(frozenset(server.loaded()))
        time.sleep(0.05)
    assert len(answers) == 6 and all(text == expected[name] for name, text in answers)
    assert all(not ({"gamma"} < one) for one in seen), f"more than fits at once: {seen}"


def test_a_rank_that_dies_disturbs_no_other_model(server: Models) -> None:
    alpha, beta = (server.complete(name, max_tokens=200) for name in ("alpha", "beta"))
    assert server.loaded() == {"alpha", "beta"}
    pieces: list[str] = []
    again: list[str] = []

    def follow() -> None:
        pieces.extend(
            chunk.choices[0].text for chunk in server.client.completions.create(model="beta", prompt=PROMPT, stream=True, **LONG)
        )

    streaming = threading.Thread(target=follow)
    streaming.start()
    wait_until(lambda: bool(server.get("/v1/status")["requests"]))
    [victim] = {rank["pid"] for rank in server.get("/health")["ranks"] if rank["stage"] == 1}
    other = threading.Thread(target=lambda: again.append(server.complete("alpha", max_tokens=200)))
    other.start()
    psutil.Process(victim).kill()
    other.join()
    streaming.join()
    assert again == [alpha] and "".join(pieces) == beta
    # What /health tells of an engine may be a second old.
    wait_until(lambda: sum(one["restarts"] for one in server.get("/health")["replicas"]) == 1)
    assert server.get("/health")["status"] == "healthy" and server.loaded() == {"alpha", "beta"}


def test_a_stream_is_kept_awake_while_its_model_is_loaded(server: Models) -> None:
    server.complete("gamma")
    body = {"model": "alpha", "prompt": PROMPT, "max_tokens": 3, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=240) as response:
        lines = [line for line in response.iter_lines() if line]
    assert response.status_code == 200
    assert lines[0].startswith(":") and lines[-1] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert events and {event["model"] for event in events} == {"alpha"}


def test_loading_and_unloading_on_command(server: Models) -> None:
    server.complete("alpha")
    assert server.command("model", "load", "beta", "--base-url", server.url).stdout == "beta is loaded\n"
    assert "beta" in server.loaded()
    unloaded = httpx.post(f"{server.url}/v1/models/beta/unload", timeout=240).json()
    assert unloaded["state"] == "unloaded" and "beta" not in server.loaded() | server.serving_processes()
    listed = server.command("model", "ps", "--base-url", server.url).stdout.splitlines()
    assert [line.split()[1] for line in listed[1:]] == ["loaded"] + 4 * ["unloaded"]
    refused = server.command("model", "load", "nobody", "--base-url", server.url)
    assert refused.returncode == 2 and "nobody" in refused.stderr and "alpha, beta" in refused.stderr


def test_a_model_that_is_still_loading_can_be_unloaded(server: Models) -> None:
    """Whoever asked for it has left: a request that still waits would load it again."""
    server.complete("alpha")
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) as client:
        client.sendall(b"POST /v1/models/gamma/load HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 0\r\n\r\n")
        wait_until(lambda: server.state("gamma") != "unloaded")
    unloaded = httpx.post(f"{server.url}/v1/models/gamma/unload", timeout=240).json()
    assert unloaded["state"] == "unloaded" and "gamma" not in server.loaded() | server.serving_processes()


def test_an_adapter_is_a_model_by_its_name(server: Models, config: Path) -> None:
    """Divided over two ranks of one stage and one of the next; `test_models_adapters.py` compares with mlx-lm."""
    path = config.parent
    with LLM(str(path / "alpha"), adapter_path=str(path / "adapter"), kv_tokens=512) as llm:
        expected = llm.generate(PROMPT, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))[0].text
    assert server.complete("alpha:sql") == expected != server.complete("alpha")
    assert {"alpha", "alpha:sql"} <= server.loaded()


def test_an_idle_model_goes_by_itself(server: Models) -> None:
    server.complete("delta")
    assert "delta" in server.loaded()
    wait_until(lambda: "delta" not in server.loaded() | server.serving_processes())


def test_unknown_models_are_404_with_the_names_that_there_are(server: Models) -> None:
    with pytest.raises(openai.NotFoundError, match="alpha, beta, gamma, delta, alpha:sql"):
        server.complete("epsilon")


def test_what_cannot_be_loaded_is_503_and_the_rest_goes_on(server: Models, config: Path) -> None:
    server.complete("alpha")
    weights = config.parent / "delta" / "model.safetensors"
    weights.rename(weights.with_suffix(".gone"))
    try:
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError if not stream else openai.APIError, match="delta"):
                list(server.client.completions.create(model="delta", prompt=PROMPT, stream=stream))  # type: ignore[call-overload]
        [delta] = [one for one in server.get("/v1/models")["data"] if one["id"] == "delta"]
        assert delta["state"] == "failed" and "safetensors" in delta["detail"] and not delta["loaded"]
        assert server.get("/health")["status"] == "healthy"
        assert server.complete("alpha")
    finally:
        weights.with_suffix(".gone").rename(weights)


def test_the_api_can_die_alone(server: Models) -> None:
    text = server.complete("alpha")
    api = server.api()
    engines = {one.pid for one in psutil.Process(server.process.pid).children()} - {api.pid}
    api.kill()

    def answers() -> bool:
        try:
            return "alpha" in server.loaded()
        except httpx.HTTPError:
            return False

    wait_until(answers)
    assert engines <= {one.pid for one in psutil.Process(server.process.pid).children()}
    assert server.complete("alpha") == text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--extra-models", "big={path}/beta", "--kv-tokens", "99999999"), ("alpha can never be loaded", "MiB", "kv_tokens")),
        (("--extra-models", "gone={path}/gone"), ("model gone", "no such directory")),
        (("--extra-models", "beta={path}/beta", "--pinned-models", "gamma"), ("--pinned-models gamma", "alpha, beta")),
    ],
)
def test_what_can_never_work_is_refused_at_the_start(config: Path, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    path = str(config.parent)
    done = subprocess.run(
        [sys.executable, "-m", "tandem", "serve", f"{path}/alpha", "--port", "0", *(one.format(path=path) for one in arguments)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 2 and all(word in done.stderr for word in words), done.stderr
    assert "Traceback" not in done.stderr
