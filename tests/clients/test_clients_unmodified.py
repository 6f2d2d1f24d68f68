"""Clients that are programs, unmodified, against the demo model: what they find is what is so.

`make test-clients` runs them, from an environment that scripts/clients_env makes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model

from tandem.checkpoints.resolve import resolve
from tandem.text.tokenizer import load_tokenizer

PYTHON = Path(os.environ.get("TANDEM_CLIENTS_PYTHON", "/nowhere/bin/python"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.demo,
    pytest.mark.skipif("TANDEM_CLIENTS_PYTHON" not in os.environ, reason="for make test-clients"),
]
QUESTIONS: list[dict[str, Any]] = [
    {"question": "The capital of France is", "choices": ["Paris", "Madrid", "a kind of cheese"], "answer": 0},
    {"question": "The capital of Japan is", "choices": ["Berlin", "Tokyo", "Lima"], "answer": 1},
    {"question": "Fish live in", "choices": ["trees", "the sky", "water"], "answer": 2},
    {"question": "The opposite of hot is", "choices": ["hotter", "cold", "seven"], "answer": 0},
]
"""Of the last one the right answer is called wrong, so that not all of them are counted."""
TASK = {
    "task": "known",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}


def program(name: str, package: str) -> str:
    """A command of the environment; skips for want of it, by name."""
    if not (PYTHON.parent / name).is_file():
        pytest.skip(f"{package} is not installed")
    return str(PYTHON.parent / name)


def run(tmp_path: Path, *command: str) -> str:
    """Its output; no hub is asked for anything."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub"), "NO_COLOR": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=500, check=False, cwd=tmp_path, env={**os.environ, **offline}
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def likelihoods() -> list[list[tuple[float, bool]]]:
    """Of each choice of each question its logarithm, and whether it is what a greedy answer begins with: from mlx-lm's
    own model in float32."""
    files = resolve("demo")
    model, _ = load_model(files.path)
    model.set_dtype(mx.float32)
    encode = load_tokenizer(files).encode
    found = []
    for one in QUESTIONS:
        found.append([])
        for choice in one["choices"]:
            tokens, start = encode(f"{one['question']} {choice}", False), len(encode(one["question"], False))
            logits = model(mx.array([tokens[:-1]]))[0, start - 1 :]
            values = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            own = mx.take_along_axis(values, mx.array(tokens[start:])[:, None], axis=-1)
            greedy = mx.argmax(values, axis=-1).tolist() == tokens[start:]
            found[-1].append((float(own.sum().item()), greedy))
    return found


def test_lm_eval(demo: str, tmp_path: Path) -> None:
    lm_eval = program("lm_eval", "lm-eval")
    (tmp_path / "known.jsonl").write_text("".join(json.dumps(one) + "\n" for one in QUESTIONS))
    task = {**TASK, "dataset_kwargs": {"data_files": {"test": str(tmp_path / "known.jsonl")}}}
    (tmp_path / "known.yaml").write_text(json.dumps(task))  # which is YAML too
    run(
        tmp_path,
        lm_eval,
        "run",
        "--model",
        "local-completions",
        "--tasks",
        "known",
        "--include_path",
        str(tmp_path),
        "--batch_size",
        "4",
        "--log_samples",
        "--output_path",
        "out",
        "--model_args",
        f"model=default,base_url={demo}/v1/completions,num_concurrent=2,max_retries=1,max_length=2048",
    )
    [results], [samples] = (list((tmp_path / "out").rglob(f"{kind}_*")) for kind in ("results", "samples"))
    expected = likelihoods()
    told = {one["doc_id"]: one["filtered_resps"] for one in map(json.loads, samples.read_text().splitlines())}
    for number, choices in enumerate(expected):
        for (value, greedy), (theirs, is_greedy) in zip(choices, told[number], strict=True):
            assert float(theirs) == pytest.approx(value, abs=1e-3) and str(is_greedy) == str(greedy)
    right = [
        max(range(len(of)), key=lambda i, of=of: of[i][0]) == one["answer"] for of, one in zip(expected, QUESTIONS, strict=True)
    ]
    assert right == [True, True, True, False]
    assert json.loads(results.read_text())["results"]["known"]["acc,none"] == 0.75


def test_guidellm(demo: str, tmp_path: Path) -> None:
    guidellm = program("guidellm", "guidellm")
    (tmp_path / "data.jsonl").write_text(
        "".join(json.dumps({"prompt": f"Name {what}.", "output_tokens_count": 4}) + "\n" for what in ("a fruit", "a river"))
    )
    run(
        tmp_path,
        guidellm,
        "run",
        "--backend",
        f"kind=openai_http,target={demo}",
        "--profile",
        "kind=synchronous",
        "--constraint",
        "kind=max_requests,count=2",
        "--data",
        f"kind=json_file,path={tmp_path}/data.jsonl",
        "--output",
        f"kind=json,path={tmp_path}/report.json",
        "--disable-console",
    )
    [benchmark] = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert (len(requests["successful"]), requests["errored"], requests["incomplete"]) == (2, [], [])
    assert [one["output_tokens"] for one in requests["successful"]] == [4, 4]


SCRIPT = """
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateText, streamText } from 'ai';
const model = createOpenAICompatible({ name: 'tandem', baseURL: process.argv[2] + '/v1' })('default');
const asked = { model, prompt: 'Name a colour.', maxOutputTokens: 5 };
const whole = await generateText(asked);
let streamed = '';
for await (const piece of streamText(asked).textStream) streamed += piece;
console.log(JSON.stringify({ whole: whole.text, streamed, tokens: whole.usage.outputTokens }));
"""


def test_ai(demo: str, tmp_path: Path) -> None:
    modules = PYTHON.parents[1] / "node" / "node_modules"
    if shutil.which("node") is None or not (modules / "ai").is_dir():
        pytest.skip("ai (npm) is not installed: node and npm are needed")
    (tmp_path / "node_modules").symlink_to(modules)
    (tmp_path / "ask.mjs").write_text(SCRIPT)
    said = json.loads(run(tmp_path, "node", "ask.mjs", demo))
    assert said["whole"] and said["streamed"] == said["whole"] and said["tokens"] == 5
