"""One stream through Tandem's HTTP server against mlx-lm's bare `stream_generate` loop on the same weights.

Both load the same unquantised copy of the model, get the same prompt and produce the same number of tokens, greedily,
in turns. Goal: at least 0.95 of the bare loop's tokens per second.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

import harness
import load

BARE_LOOP = """
import json, sys, time
from mlx_lm import load, stream_generate
model, tokenizer = load(sys.argv[1])
print("ready", flush=True)
for line in sys.stdin:
    job = json.loads(line)
    prompt = tokenizer.encode(job["prompt"])
    start, pieces, text = time.perf_counter(), [], ""
    for response in stream_generate(model, tokenizer, prompt, max_tokens=job["max_tokens"]):
        pieces.append(time.perf_counter())
        text += response.text
    count = response.generation_tokens
    print(json.dumps({"tokens": count, "prompt_tokens": len(prompt), "ttft": pieces[0] - start, "text": text,
                      "total": pieces[-1] - start, "decode": (count - 1) / (pieces[-1] - pieces[0])}), flush=True)
"""


class BareLoop:
    """mlx-lm's loop in a process of its own, waiting for jobs on a pipe."""

    def __init__(self, model: str, env: dict[str, str]) -> None:
        self._command, self._env = [sys.executable, "-P", "-c", BARE_LOOP, model], env

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(self._command, env=self._env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._read()
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)

    def run(self, job: load.BenchRequest) -> dict[str, Any]:
        """Tokens and times of one run."""
        assert self._process.stdin is not None
        print(json.dumps({"prompt": job.prompt, "max_tokens": job.max_tokens}), file=self._process.stdin, flush=True)
        return dict(json.loads(self._read()))

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("mlx-lm's loop ended early")
        return line


def main() -> None:
    """Command line."""
    parser = harness.arguments(__doc__, rounds=3)
    parser.add_argument("--starts", type=int, default=3, help="times that both sides are started afresh")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="tokens of the prompt")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens to generate")
    args = parser.parse_args()
    gpu = harness.on_gpu()
    model = harness.prepared(args.model, args.dtype, gpu)
    prompts = load.PromptSource(model)
    played: list[tuple[tuple[dict[str, Any], dict[str, Any]], float]] = []
    with harness.heading("One stream"):
        for _ in range(args.starts):
            played += _one_start(args, model, prompts, gpu)
        harness.table(
            [
                "round",
                "bare tok/s",
                "tandem tok/s",
                "ratio",
                "bare TTFT s",
                "tandem TTFT s",
                "ratio with prompt",
                "same text",
                "others",
            ],
            [[i + 1, *_row(bare, ours), others] for i, ((bare, ours), others) in enumerate(played)],
        )
    ratios = [ours["decode"] / bare["decode"] for (bare, ours), _ in played]
    wholes = [whole_ratio(bare, ours) for (bare, ours), _ in played]
    verdicts = [
        harness.verdict("tokens/s while decoding, median of the rounds' ratios", harness.middle(ratios), 0.95),
        harness.verdict("tokens/s of whole requests, prompt and HTTP included", harness.middle(wholes), 0.95),
    ]
    harness.write_json(args.json, args, {"runs": played, "verdicts": verdicts})


def _one_start(
    args: argparse.Namespace, model: Path, prompts: load.PromptSource, gpu: bool
) -> list[tuple[tuple[dict[str, Any], dict[str, Any]], float]]:
    """Rounds of two fresh processes: where their memory happens to lie makes a few percent as long as they live."""
    peer = BareLoop(str(model), harness.peer_environment(args, gpu))

    def play() -> tuple[dict[str, Any], dict[str, Any]]:
        job = load.BenchRequest(prompts.make(args.prompt_tokens), args.max_tokens)
        return peer.run(job), _measured(load.one(server, job))

    with harness.tandem_server(model, args.threads) as server, peer:
        play()  # warms up
        return harness.rounds(args, play)


def _row(bare: dict[str, Any], ours: dict[str, Any]) -> list[object]:
    # mlx-lm drops the space that a text begins with.
    same = "yes" if ours["text"].strip() == bare["text"].strip() else "no"
    return [
        bare["decode"],
        ours["decode"],
        ours["decode"] / bare["decode"],
        bare["ttft"],
        ours["ttft"],
        whole_ratio(bare, ours),
        same,
    ]


def whole_ratio(bare: dict[str, Any], ours: dict[str, Any]) -> float:
    """Tokens per second from the request to the last token, ours to theirs (a text can end early for either)."""
    return float(ours["tokens"] / ours["total"] * bare["total"] / bare["tokens"])


def _measured(answer: load.Timed) -> dict[str, Any]:
    return {
        "tokens": answer.tokens,
        "prompt_tokens": answer.prompt_tokens,
        "ttft": answer.ttft,
        "text": answer.text,
        "total": answer.pieces[-1] - answer.sent,
        "decode": answer.decode_rate,
    }


if __name__ == "__main__":
    main()
