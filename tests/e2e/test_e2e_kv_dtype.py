"""`tandem serve --kv-dtype`: over HTTP, and what it does not work with."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from served import PATIENCE_S, serving
from tandem.testing import tiny_model

pytestmark = pytest.mark.slow


def test_over_http(tmp_path: Path) -> None:
    directory = tiny_model(tmp_path / "model", dtype="float32", config={"head_dim": 32})
    with serving(directory, "-pp", "2", "--kv-dtype", "4bit") as server:
        info, health = server.get("/model/info"), server.get("/health")
        assert (info["kv_dtype"], info["kv_bytes_per_token"]) == ("4bit in layers 0-3", 384)
        assert (health["kv_dtype"], health["kv_bytes_per_token"]) == ("4bit in layers 0-3", 384)
        asked = {"model": "default", "prompt": [5, 6, 7] * 30, "max_tokens": 12, "temperature": 0}
        first, again = (server.client.completions.create(**asked) for _ in range(2))
        assert first.usage.completion_tokens > 0 and first.choices[0].text == again.choices[0].text


@pytest.mark.parametrize(
    ("family", "config", "layout", "words"),
    [
        ("deepseek_v3", {}, (), "deepseek_v3 has no layer that it would change"),
        ("gemma2", {"head_dim": 64}, ("-pp", "2"), "computes with keys and values itself"),
    ],
)
def test_what_it_does_not_work_with_ends_with_one_line(
    family: str, config: dict[str, Any], layout: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    directory = tiny_model(tmp_path, family, config=config)
    ended = subprocess.run(
        [sys.executable, "-m", "tandem", "serve", str(directory), "--port", "0", *layout, "--kv-dtype", "8bit"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ended.returncode == 2
    assert "--kv-dtype 8bit: " in ended.stderr and words in ended.stderr and "Traceback" not in ended.stderr
