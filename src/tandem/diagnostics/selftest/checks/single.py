"""Checks of one rank over HTTP: mlx-lm's tokens and speed, prefill chunks, and many connections."""

from __future__ import annotations

import json
import resource
import socket
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from tandem.descriptors import raise_limit
from tandem.diagnostics.selftest.check import Differs
from tandem.diagnostics.selftest.server import LONGEST_S, Server, ask, prompt_of, serving
from tandem.diagnostics.tasks import Figures, Task
from tandem.errors import TandemError
from tandem.processes.device import this_device
from tandem.system.http_client import ServerClient

PROMPT, TOKENS = 32, 24
TIE, GPU_TIE = 1e-3, 0.05
"""Largest gap of two log probabilities that rounding may reorder, on a CPU (float32) and a GPU (half precision)."""
SHARED_TIE = 10
"""Multiple of those where ranks share layers."""
SLOWEST = 0.5
"""Smallest acceptable share of mlx-lm's speed; HTTP alone does not explain less."""
CHUNKS, CPU_CHUNKS = (512, 1024, 2048), (64, 256)
LONG, CPU_LONG = 2200, 300
"""Tokens of the long prompt, on a GPU and a CPU."""
CONNECTIONS, MAC_FILES = 300, 256
HEALTH_S = 10.0


@dataclass
class Reference:
    """Answer of mlx-lm."""

    texts: list[str]
    """Decoded texts of the first 0, 1, 2, ... tokens."""
    gaps: list[float]
    """Gap between the two highest log probabilities at each position."""
    pace: float
    """Tokens a second, including prefill."""
    tie: float
    source: str = "mlx-lm's"


def pace(task: Task) -> Figures:
    """Check that greedy tokens equal mlx-lm's and, for a real model, are about as fast."""
    prompt = prompt_of(PROMPT)
    reference = mlx_lm_answer(task.model, prompt)
    with serving(task.model, "--prefix-cache", "0") as server:
        ask(server, prompt, 2)  # warm-up: compiles kernels
        answers = [ask(server, prompt, TOKENS) for _ in range(2)]
    best = max(TOKENS / (answer.ended - answer.sent) for answer in answers)
    figures: Figures = {
        "tokens a second, mlx-lm": round(reference.pace, 1),
        "tokens a second": round(best, 1),
        "share of mlx-lm's pace": round(best / reference.pace, 2),
        "tokens that agree": agreed(reference, answers[-1].text),
    }
    if answers[0].text != answers[1].text:
        raise Differs("the same answer twice, expected; two different ones, seen", figures)
    if best < SLOWEST * reference.pace and not task.random:  # for a tiny model HTTP takes longer than its steps
        raise Differs(
            f"at least {SLOWEST:g} of mlx-lm's {reference.pace:.1f} tokens a second, expected; {best:.1f}, seen", figures
        )
    return figures


def mlx_lm_answer(model: str, prompt: list[int]) -> Reference:
    """Decode greedily with mlx-lm in this process, and free its memory afterwards.

    On a CPU the weights are expanded to float32, as Tandem's are.
    """
    import mlx.core as mx
    from mlx.utils import tree_map
    from mlx_lm.generate import generate_step
    from mlx_lm.utils import dequantize_model, load

    from tandem.checkpoints.resolve import resolve
    from tandem.loading.memory import choose_device, on_gpu

    choose_device("auto")
    module, tokenizer, *_ = load(str(resolve(model).path))
    if not on_gpu():
        module = dequantize_model(module)
        module.update(tree_map(lambda x: x.astype(mx.float32) if mx.issubdtype(x.dtype, mx.floating) else x, module.parameters()))
        mx.eval(module.parameters())
    tokens, gaps, spent = list[int](), list[float](), 0.0
    for count in (2, TOKENS):  # the first run compiles kernels
        tokens, gaps, began = [], [], time.perf_counter()
        for token, logprobs in generate_step(mx.array(prompt), module, max_tokens=count):
            tokens.append(int(token))
            top: Any = mx.sort(logprobs)[-2:].tolist()
            gaps.append(top[1] - top[0])
        spent = time.perf_counter() - began
    texts = [tokenizer.decode(tokens[:count], skip_special_tokens=True) for count in range(len(tokens) + 1)]
    del module
    mx.clear_cache()
    return Reference(texts, gaps, TOKENS / spent, GPU_TIE if on_gpu() else TIE)


def scored(server: Server, prompt: list[int], tokens: int) -> Reference:
    """Return a server's greedy answer with the gaps between the likeliest tokens. Raises UsageError.

    Ranks that share layers add in another order: `tie` is wide enough for that.
    """
    body = {"model": "default", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "logprobs": 2}
    reply = ServerClient(server.url).get_json("/v1/completions", method="POST", body=body, timeout_s=LONGEST_S)
    choice = reply["choices"][0]
    scores, text = choice["logprobs"], str(choice["text"])
    tops = [sorted(top.values()) for top in scores["top_logprobs"]]
    texts = [*(text[:offset] for offset in scores["text_offset"]), text]
    tie = SHARED_TIE * (GPU_TIE if this_device().gpu else TIE)
    return Reference(texts, [top[-1] - top[0] for top in tops], 0.0, tie, "one rank's")


def agreed(reference: Reference, text: str) -> str:
    """Return the number of equal tokens as text. Raises Differs where the texts differ and mlx-lm's choice was no tie.

    Compares texts, since HTTP carries text. mlx-lm drops a leading space.
    """
    text = text.strip()
    count = max(i for i, prefix in enumerate(reference.texts) if text.startswith(prefix.strip().rstrip("\ufffd")))
    if count >= len(reference.gaps):
        return f"all {count}"
    gap = min(reference.gaps[max(count - 1, 0) : count + 2])  # one character may consist of several tokens
    if gap > reference.tie:
        raise Differs(
            f"{len(reference.gaps)} tokens of {reference.source}, expected; another after {count}, where its two "
            f"likeliest are {gap:.3f} apart, seen"
        )
    return f"{count}, then a tie"


def chunks(task: Task) -> Figures:
    """Report the prefill speed for several chunk sizes, and whether the answers are equal."""
    figures: Figures = {}
    texts: dict[int, str] = {}
    gpu = this_device().gpu
    length = LONG if gpu else CPU_LONG
    for chunk in CHUNKS if gpu else CPU_CHUNKS:
        with serving(task.model, "--prefill-chunk", str(chunk), "--prefix-cache", "0") as server:
            if gpu:
                ask(server, prompt_of(length, 1), 2)  # warm-up: compiles kernels
            answer = ask(server, prompt_of(length, 2), 8)
            texts[chunk] = answer.text
            figures[f"chunks of {chunk}, tokens a second"] = round(length / answer.ttft, 1)
    if len(set(texts.values())) > 1:
        figures["answers"] = "differ between sizes of chunks, which rounding may explain"
    return figures


def connections(task: Task) -> Figures:
    """Check that a server started with a limit of 256 open files, macOS's default, serves 300 connections at once."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (MAC_FILES, hard))
    with serving(task.model) as server:
        if raise_limit() < CONNECTIONS + 50:
            raise TandemError(f"this process may open {resource.getrlimit(resource.RLIMIT_NOFILE)[0]} files only")
        url = urlsplit(server.url)
        address = (str(url.hostname), int(url.port or 80))
        request = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
        opened: list[socket.socket] = []
        try:
            for _ in range(CONNECTIONS):
                opened.append(socket.create_connection(address, timeout=HEALTH_S))
            began = time.monotonic()
            for connection in opened:
                connection.sendall(request)
            answered = sum(connection.recv(15).startswith(b"HTTP/1.1 200") for connection in opened)
            took = time.monotonic() - began
            if answered < CONNECTIONS:
                raise Differs(f"{CONNECTIONS} answers over {CONNECTIONS} connections, expected; {answered}, seen")
            health = json.dumps(server.health()["status"])
            ask(server, prompt_of(8), 4)
        except OSError as error:
            raise Differs(f"{CONNECTIONS} connections, expected; {error} after {len(opened)}, seen") from None
        finally:
            for connection in opened:
                connection.close()
    return {"connections": CONNECTIONS, "all answered after, s": round(took, 2), "health": health.strip('"')}
