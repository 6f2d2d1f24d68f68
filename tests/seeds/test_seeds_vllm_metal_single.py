"""vllm-metal's page that has no Ray: its programs, item by item, as printed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_helpers import START_S

WORKS = [
    (
        "`LLM(model=..., tensor_parallel_size=1)`, `SamplingParams(temperature=0.7, max_tokens=256)`",
        "the same with the [plugin](vllm.md); `from tandem import LLM, SamplingParams` without vLLM",
        "test_its_programs_run_side_by_side",
    ),
    ("several programs with an `LLM` each, in several terminals", "the same", "test_its_programs_run_side_by_side"),
    (
        "`gpu_memory_utilization=0.8, max_num_batched_tokens=4096, max_num_seqs=256`",
        "the same under the plugin; `tandem.LLM` has `memory_fraction=`, `prefill_chunk=`, `max_batch_size=`",
        "test_its_programs_run_side_by_side",
    ),
]
"""What is printed there, what does it here, and the test that shows it (of this file, where none is named)."""

DIFFERS = [
    (
        "Ray is not supported, one device only, TP within a machine",
        "Ray, several devices, TP over machines",
        "this is what Tandem is for",
    ),
    (
        "instances on several ports, with a balancer of your own",
        "also `tandem serve MODEL --data-parallel-size 2`, behind one port; `tandem up MODEL --name second --port "
        "8001`; several models behind one port: [models](models.md#several-models-and-lora-adapters)",
        "a router keeps a prefix where it is cached",
    ),
]
"""What is printed there, what there is here, and why it differs."""

ONLY_A_MAC = [("Llama-3.2-3B-Instruct-4bit on Metal", "tests never reach a hub, and have no Metal")]
"""What Linux cannot show, and what is done instead."""

pytest.importorskip("vllm")

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

TENSOR_PARALLEL = """
from vllm import LLM, SamplingParams

# Create vLLM instance (tensor parallelism limited to single device)
llm = LLM(
    model="mlx-community/Llama-3.2-3B-Instruct-4bit",
    tensor_parallel_size=1,  # Limited to 1 on Metal
)

# Generate
sampling_params = SamplingParams(temperature=0.7, max_tokens=256)
outputs = llm.generate(["Hello, how are you?"], sampling_params)
"""
SHARDED = """
from vllm import LLM, SamplingParams

llm = LLM(
    model="mlx-community/Llama-3.2-3B-Instruct-4bit",
    # Optimize memory usage
    gpu_memory_utilization=0.8,
    max_num_batched_tokens=4096,
    max_num_seqs=256,
)

sampling_params = SamplingParams(temperature=0.7, max_tokens=256)
outputs = llm.generate(["Hello, how are you?"], sampling_params)
"""
SAID = "print([len(output.outputs[0].token_ids) for output in outputs], flush=True)"


def test_its_programs_run_side_by_side(tiny: Path, tmp_path: Path) -> None:
    """Two of its programs at the same time, as in its two terminals."""
    environment = {**os.environ, "TANDEM_MEMORY_FRACTION": "0.2"}  # of what other tests leave
    terminals = []
    for program in (TENSOR_PARALLEL, SHARDED):
        text = program.replace("mlx-community/Llama-3.2-3B-Instruct-4bit", str(tiny)) + SAID
        assert str(tiny) in text
        terminals.append(
            subprocess.Popen(
                [sys.executable, "-c", text],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=tmp_path,
                env=environment,
            )
        )
    try:
        for terminal in terminals:
            said, errors = terminal.communicate(timeout=START_S)
            assert terminal.returncode == 0, errors[-6000:]
            [count] = [int(line.strip("[]")) for line in said.splitlines() if line.startswith("[")]
            assert 0 < count <= 256
    finally:
        for terminal in terminals:
            terminal.kill()
