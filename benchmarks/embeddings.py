"""Embeddings against the same prompts completed by one token: the same server, in turns.

An embedding is a prefill, and should cost no more than one (goal: 0.97 of the prompt tokens a second).

`embeddings.py --rerank 100` measures a running stream instead: the p99 of its gaps beside refused reranks of 10,000 documents
over that alone before and after, in turns (goal: 1.2), and beside reranks of so many that are computed. Likewise beside thinking
budgets and LoRA adapters that are refused, and beside an Ollama client that stops reading against one that reads.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import socket
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import harness
import load
import mlx.core as mx
from kv_roles import ENOUGH, Stream

REFUSED = 10_000
"""Documents of a rerank that is refused."""
STREAM = 2000
"""Tokens of a stream; the next one follows it."""
LAYOUTS: dict[str, dict[str, object]] = {
    "one rank": {},
    "TP 2": {"tensor_parallel_size": 2},
    "PP 2": {"pipeline_parallel_size": 2},
}


def main() -> None:
    """Command line."""
    parser = harness.arguments(__doc__, rounds=3)
    parser.add_argument("--inputs", type=int, default=16, help="prompts at once")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each")
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--rerank", type=int, metavar="DOCUMENTS", help="gaps of a stream beside reranks of so many")
    parser.add_argument("--prefill-time-ms", type=float, help="of the server of --rerank")
    parser.add_argument("--seconds", type=float, default=20, help="that --rerank measures the stream alone, and beside refusals")
    args = parser.parse_args()
    model = harness.prepared(args.model, args.dtype, harness.on_gpu())
    prompts = load.PromptSource(model)
    if args.rerank:
        harness.write_json(args.json, args, {name: gaps(args, model, prompts, name) for name in args.layouts})
        return
    results: dict[str, Any] = {"verdicts": []}
    for name in args.layouts:
        with harness.tandem_server(model, args.threads, name, prefix_cache=0, **LAYOUTS[name]) as server:

            def play(server: harness.Server = server) -> tuple[float, float]:
                texts = [prompts.make(args.tokens) for _ in range(args.inputs)]
                return completed(server, texts), embedded(server, texts)

            play()
            with harness.heading(f"{name}: {args.inputs} prompts of {args.tokens} tokens"):
                rows = [
                    [number + 1, plain, vectors, vectors / plain, others]
                    for number, ((plain, vectors), others) in enumerate(harness.rounds(args, play))
                ]
                harness.table(["round", "completed tok/s", "embedded tok/s", "ratio", "others"], rows)
        results[name] = rows
        results["verdicts"].append(
            harness.verdict(f"{name}, median of the rounds' ratios", harness.middle([row[3] for row in rows]), 0.97)
        )
    harness.write_json(args.json, args, results)


def completed(server: harness.Server, texts: list[str]) -> float:
    """Prompt tokens a second, until each prompt has its one token."""
    started = harness.now()
    answers = load.closed_loop(server, [load.BenchRequest(text, 1) for text in texts], len(texts))
    return sum(one.prompt_tokens for one in answers) / (harness.now() - started)


def embedded(server: harness.Server, texts: list[str]) -> float:
    """Prompt tokens a second of one request for all."""
    body = {"model": server.model, "input": texts, "encoding_format": "base64"}
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/v1/embeddings", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    started = harness.now()
    with urllib.request.urlopen(request, timeout=600) as answer:
        tokens: int = json.load(answer)["usage"]["prompt_tokens"]
    return tokens / (harness.now() - started)


def gaps(args: argparse.Namespace, model: Path, prompts: load.PromptSource, name: str) -> list[dict[str, Any]]:
    """Print the gaps of a stream in each phase of each round; return the verdicts."""
    limit = {} if args.prefill_time_ms is None else {"prefill_time_ms": args.prefill_time_ms}
    flags = {"reranker": "on", "prefix_cache": 0, "enable_lora": True, "max_loras": 2, **limit, **LAYOUTS[name]}
    documents = [prompts.make(args.tokens) for _ in range(args.rerank)]
    with tempfile.TemporaryDirectory() as folder, harness.tandem_server(model, args.threads, name, **flags) as server:
        broken = json.dumps({"lora_name": "broken", "lora_path": folder}).encode()
        write_broken(model, Path(folder))
        budget = json.dumps({"messages": [{"role": "user", "content": "a"}], "thinking_budget": 2**40}).encode()
        refused, computed = rerank(["a document"] * REFUSED), rerank(documents)
        phases: dict[str, Callable[[], object]] = {
            "alone": lambda: time.sleep(args.seconds),
            f"beside {REFUSED} refused": lambda: _until(args.seconds, lambda: send(server, refused, 400)),
            "beside refused budgets": lambda: _until(args.seconds, lambda: send(server, budget, 400, "/v1/chat/completions")),
            "beside refused adapters": lambda: _until(args.seconds, lambda: send(server, broken, 400, "/v1/load_lora_adapter")),
            "alone again": lambda: time.sleep(args.seconds),
            "beside one that reads": lambda: beside(server, args.seconds, reads=True),
            "beside one that does not": lambda: beside(server, args.seconds, reads=False),
            f"beside {len(documents)}": lambda: send(server, computed),
        }
        found: dict[str, list[float]] = {phase: [] for phase in phases}
        with harness.heading(f"{name}: a stream beside reranks"), streaming(server) as gaps_since:
            send(server, rerank(documents[:16]))
            for _ in range(args.rounds):
                for phase, work in phases.items():
                    began = time.monotonic()
                    work()
                    found[phase] += gaps_since(began)
                    print(f"({phase}: {time.monotonic() - began:.0f} s, {len(found[phase])} gaps)", flush=True)
            alone = _percentile(found["alone"] + found["alone again"], 99)
            rows = [
                [phase, len(all_), *(1e3 * _percentile(all_, share) for share in (50, 99, 100)), _percentile(all_, 99) / alone]
                for phase, all_ in found.items()
            ]
            harness.table(["phase", "gaps", "p50 ms", "p99 ms", "max ms", "p99 / alone"], rows)
    ratios = {phase: ratio for phase, *_, ratio in rows}
    ratios["beside one that does not"] /= ratios.pop("beside one that reads")
    wanted = [phase for phase in ratios if "refused" in phase or "not" in phase]
    return [harness.verdict(f"{name}, p99 {phase}", ratios[phase], 1.2, at_most=True) for phase in wanted]


def write_broken(model: Path, directory: Path) -> None:
    """Write a LoRA adapter for all layers' queries, with a NaN."""
    width, heads = (json.loads((model / "config.json").read_text())[name] for name in ("hidden_size", "num_attention_heads"))
    head = json.loads((model / "config.json").read_text()).get("head_dim") or width // heads
    arrays = {
        "model.layers.0.self_attn.q_proj.lora_a": mx.full((width, 8), float("nan")),
        "model.layers.0.self_attn.q_proj.lora_b": mx.zeros((8, heads * head)),
    }
    mx.save_safetensors(str(directory / "adapters.safetensors"), arrays)
    parameters = {"rank": 8, "scale": 1.0, "dropout": 0.0, "keys": ["self_attn.q_proj"]}
    config = {"fine_tune_type": "lora", "num_layers": 1, "lora_parameters": parameters}
    (directory / "adapter_config.json").write_text(json.dumps(config))


def beside(server: harness.Server, seconds: float, *, reads: bool) -> None:
    """Have an Ollama client ask for a long answer, and read it or not."""
    body = json.dumps({"model": server.model, "prompt": "a", "options": {"num_predict": STREAM}}).encode()
    head = (
        f"POST /api/generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port)) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.sendall(head.encode() + body)
        ends = time.monotonic() + seconds
        while (left := ends - time.monotonic()) > 0:
            one.settimeout(left)
            with contextlib.suppress(TimeoutError):
                if not reads or not one.recv(65536):
                    time.sleep(max(left, 0))


def rerank(documents: list[str]) -> bytes:
    """Body of a rerank."""
    return json.dumps({"query": "which one tells of the sea?", "documents": documents}).encode()


def send(server: harness.Server, body: bytes, status: int = 200, path: str = "/v1/rerank") -> None:
    """Send a request, which must be answered with `status`. The client's own work is kept small: the stream's reader waits."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=900)
    try:
        connection.request("POST", path, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
    finally:
        connection.close()
    if answer.status != status:
        raise SystemExit(f"{answer.status}: {text[:400]!r}")


@contextlib.contextmanager
def streaming(server: harness.Server) -> Iterator[Callable[[float], list[float]]]:
    """Run one stream after the other, in a thread; the function returns the gaps since a time."""
    streams, over = [Stream()], threading.Event()

    def read() -> None:
        while not over.is_set():
            streams.append(Stream(over=over))
            streams[-1].read(server.port, [7 + len(streams)] * 40, STREAM)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    while len(streams) < 2 or len(streams[-1].times) < ENOUGH:
        time.sleep(0.05)
    try:
        yield lambda since: [gap for one in streams for gap in one.gaps(since)]
    finally:
        over.set()
        thread.join()


def _until(seconds: float, work: Callable[[], object]) -> None:
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        work()
        time.sleep(0.2)


def _percentile(values: list[float], share: int) -> float:
    return sorted(values)[min(len(values) * share // 100, len(values) - 1)]


if __name__ == "__main__":
    main()
