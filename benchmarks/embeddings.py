"""Embeddings against the same prompts completed by one token: the same server, in turns.

An embedding is a prefill, and should cost no more than one (goal: 0.97 of the prompt tokens a second).
"""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import harness
import load

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
    args = parser.parse_args()
    model = harness.prepared(args.model, args.dtype, harness.on_gpu())
    prompts = load.PromptSource(model)
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


if __name__ == "__main__":
    main()
