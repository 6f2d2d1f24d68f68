"""What the tests with vLLM share: expected tokens, engines, servers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

VLLM = Path(sys.executable).parent / "vllm"
START_S = 400.0
PROMPTS = [[i % 200 + 40 for i in range(start, start + count)] for start, count in ((1, 5), (7, 40), (3, 70), (90, 33))]

KINDS = {
    "deepseek_v3": ("DeepseekV3ForCausalLM", ("--pipeline-parallel-size", "2")),
    "granitemoehybrid": ("GraniteMoeHybridForCausalLM", ("--tensor-parallel-size", "2")),
    "gpt_oss": ("GptOssForCausalLM", ("--pipeline-parallel-size", "2")),
}
"""Types besides Llama's with which `vllm serve` is tried, their architecture and layout: for docs/models-list.md."""
SEES = {
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma3n": "Gemma3nForConditionalGeneration",
    "gemma4": "Gemma4ForConditionalGeneration",
    "gemma4_unified": "Gemma4UnifiedForConditionalGeneration",
    "kimi_k25": "KimiK25ForConditionalGeneration",
    "kimi_k3": "KimiK3ForConditionalGeneration",
    "kimi_vl": "KimiVLForConditionalGeneration",
    "lfm2-vl": "Lfm2VlForConditionalGeneration",
    "llama4": "Llama4ForConditionalGeneration",
    "llava": "LlavaForConditionalGeneration",
    "minimax_m3_vl": "MiniMaxM3SparseForConditionalGeneration",
    "mistral3": "Mistral3ForConditionalGeneration",
    "muse_glimmer": "MuseGlimmerForConditionalGeneration",
    "pixtral": "PixtralForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
}
"""Types that see or hear, and the architecture that their checkpoints name, for which `vllm serve` refuses them."""

_REFERENCE = """
import json, sys
from tandem.comm.blas import preload_blas
preload_blas("auto")
import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load
from tandem import LLM, SamplingParams
from tandem.models.description import describe
from tandem.checkpoints.resolve import resolve
from tandem.loading.stage import load_stage
path, prompts, count = json.loads(sys.stdin.read())
files = resolve(path)
with LLM(path, dequantize="yes", self_check=False) as llm:
    outputs = llm.generate(prompts, SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True))
    served = [one.token_ids for one in outputs]
model, _ = load(path)
if not describe(files).quantization:
    model.set_dtype(mx.float32)
plain = []
for prompt in prompts:
    caches, feed, tokens = make_prompt_cache(model), prompt, []
    for _ in range(count):
        logits = model(mx.array([feed]), cache=caches)
        feed = [int(mx.argmax(logits[0, -1]))]
        tokens += feed
    plain.append(tokens)
print(json.dumps({"served": served, "mlx_lm": plain}))
"""


def expected_tokens(model: Path, prompts: Sequence[Sequence[int]], count: int) -> dict[str, list[list[int]]]:
    """Greedy tokens of `tandem` (one process) and of mlx-lm, from a process of their own: vLLM forks this one."""
    run = subprocess.run(
        [sys.executable, "-c", _REFERENCE],
        input=json.dumps([str(model), list(prompts), count]),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    found: dict[str, list[list[int]]] = json.loads(run.stdout.splitlines()[-1])
    return found


def generate(llm: Any, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Greedy tokens from vLLM."""
    from vllm import SamplingParams

    outputs = llm.generate(
        [{"prompt_token_ids": list(prompt)} for prompt in prompts],
        SamplingParams(temperature=0, max_tokens=count, ignore_eos=True),
        use_tqdm=False,
    )
    return [list(output.outputs[0].token_ids) for output in outputs]


@contextmanager
def engine(model: Path, **options: Any) -> Iterator[Any]:
    """vLLM's Python API, with its engine (and workers) in processes of their own."""
    from vllm import LLM

    llm = LLM(str(model), max_model_len=options.pop("max_model_len", 512), **options)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def descendants(pid: int) -> list[int]:
    """Process ids below `pid`."""
    import psutil

    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def gone(pids: Sequence[int], timeout_s: float) -> bool:
    """True when none of `pids` runs any more within `timeout_s`."""
    import psutil

    deadline = time.monotonic() + timeout_s

    def alive(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    while any(alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


class Server:
    """`vllm serve`, as a user starts it."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, base: str) -> None:
        self.process, self.log, self.base = process, log, base

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        request = urllib.request.Request(f"{self.base}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as response:
            answer: dict[str, Any] = json.load(response)
        return answer

    def status(self, path: str, **body: Any) -> tuple[int, str]:
        try:
            return 200, json.dumps(self.post(path, **body))
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.base}/health", timeout=5) as response:
                return response.status == 200
        except OSError:
            return False


@contextmanager
def server(log: Path, port: int, *arguments: str, env: dict[str, str] | None = None, host: str = "127.0.0.1") -> Iterator[Server]:
    """Start `vllm serve`, wait until it is healthy, and end it with everything below it."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(VLLM), "serve", *arguments, "--port", str(port)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )
    one = Server(process, log, f"http://{host}:{port}")
    try:
        deadline = time.monotonic() + START_S
        while not one.ready():
            assert process.poll() is None, one.text[-6000:]
            assert time.monotonic() < deadline, one.text[-6000:]
            time.sleep(0.5)
        yield one
    finally:
        below = descendants(process.pid)
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for pid in below:
            if not gone([pid], 10):
                os.kill(pid, signal.SIGKILL)
