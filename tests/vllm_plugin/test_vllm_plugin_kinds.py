"""`vllm serve` of a model with a latent, of a hybrid with recurrent states and of one with windows and experts:
mlx-lm's own tokens."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from vllm_helpers import KINDS, PROMPTS, server

from tandem.launchers.process_groups import free_ports

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

OUTPUT = 12

_MODELS = """
import json, sys
import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model
from pathlib import Path
from tandem.testing import tiny_model
kinds, prompts, count = json.loads(sys.stdin.read())
found = {}
for family, architecture in kinds.items():
    tiny_model(Path(sys.argv[1], family), family, config={"architectures": [architecture]})
    model, _ = load_model(Path(sys.argv[1], family))
    model.set_dtype(mx.float32)
    found[family] = [[int(token) for token, _ in generate_step(mx.array(one), model, max_tokens=count)]
                     for one in prompts]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[list[int]]]]:
    """Where the models are, and mlx-lm's greedy tokens of each for PROMPTS: by another process, as vLLM forks this."""
    path = tmp_path_factory.mktemp("kinds")
    kinds = {family: architecture for family, (architecture, _) in KINDS.items()}
    made = subprocess.run(
        [sys.executable, "-c", _MODELS, str(path)],
        input=json.dumps([kinds, PROMPTS, OUTPUT]),
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    return path, json.loads(made.stdout.splitlines()[-1])


@pytest.mark.parametrize("family", KINDS)
def test_completions_are_those_of_mlx_lm(family: str, models: tuple[Path, dict[str, list[list[int]]]], tmp_path: Path) -> None:
    path, wanted = models
    [port] = free_ports(1)
    with server(
        tmp_path / "log",
        port,
        str(path / family),
        "--served-model-name",
        "tiny",
        "--max-model-len",
        "256",
        "--max-num-batched-tokens",
        "64",
        "--host",
        "127.0.0.1",
        *KINDS[family][1],
    ) as one:
        for _ in range(2):  # again, from what was kept of the prompts
            answer = one.post(
                "/v1/completions",
                model="tiny",
                prompt=PROMPTS,
                max_tokens=OUTPUT,
                temperature=0,
                ignore_eos=True,
                return_token_ids=True,
            )
            assert [choice["token_ids"] for choice in answer["choices"]] == wanted[family]
