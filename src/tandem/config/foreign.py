"""Commands and flags of vLLM, SGLang, llama.cpp and Ollama that `tandem` does not take, with what it has instead."""

from __future__ import annotations

from collections.abc import Iterable

_FLAGS = """--tool-call-parser=--tool-parser --max-num-batched-tokens=--prefill-chunk --chunked-prefill-size=--prefill-chunk
--kv-cache-dtype=--kv-dtype --cache-type-k=--kv-dtype --quantization=--quant --ctx-size=--max-context -c=--max-context
--context-length=--max-context --max-running-requests=--max-batch-size --download-dir=HF_HOME
--disable-log-requests=--no-log-requests --disable-uvicorn-access-log=--no-log-requests --seed=--override-generation-config
--distributed-executor-backend=--launcher --allowed-origins=--cors-origin --no-enable-prefix-caching=--prefix-cache
--uvicorn-log-level=--log-level --shutdown-timeout=--drain-timeout --nnodes=--hostfile --num-gpu-blocks-override=--kv-tokens
--kv-cache-memory-bytes=--max-memory --enable-expert-parallel=--expert-parallel --kv-transfer-config=--kv-disk
--enable-sleep-mode=--unload-after --scheduling-policy=--api-key-file --limit-mm-per-prompt=--vision"""
_NO_FLAG = """--enable-prefix-caching --enable-chunked-prefill --enable-auto-tool-choice --async-scheduling
--continuous-batching --enable-request-id-headers --enable-prompt-tokens-details --cont-batching --jinja --flash-attn -fa -ngl
--n-gpu-layers --task --enforce-eager --swap-space --block-size --disable-log-stats --load-format --guided-decoding-backend
--runner --max-logprobs --tokenizer --mlock --threads --disable-access-log-for-endpoints --structured-outputs-config
--api-server-count --max-log-len --collect-detailed-traces --compilation-config --disable-custom-all-reduce -O3
 --verbose --keepalive --nowordwrap"""
_HERE = dict(pair.split("=") for pair in _FLAGS.split())
REMEDIES = {
    **{there: f"{there}: use {here} here" for there, here in _HERE.items()},
    **{there: f"{there}: not needed here, leave it out" for there in _NO_FLAG.split()},
    **dict.fromkeys(("convert", "quantize", "quantise"), "use `tandem model convert MODEL --quant 4bit`"),
    **dict.fromkeys(("create", "push"), "there are no Modelfiles: `tandem serve` takes --chat-template and the like"),
    "cp": "`tandem serve MODEL --served-name NAME` gives a model another name",
    "stop": "`tandem down` ends a server, `tandem model unload` a model",
    "--format": "--format: is of requests to a server, `format` of /api/chat and `response_format` of /v1/chat/completions",
}
"""Remedies by foreign word: what to use in its place."""


def remedy(word: str, options: Iterable[str] = ()) -> str:
    """Return `; ` and what to use in place of a foreign command or flag; an empty string for any other word, and for a
    flag in whose place is none of the command's `options`."""
    return f"; {REMEDIES[word]}" if word in REMEDIES and _HERE.get(word, "HF_HOME") in {*options, "HF_HOME"} else ""
