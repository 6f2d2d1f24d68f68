"""`--kv-disk` over machines of their own, each with its own disk."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from hosts import eventually, hostfile, serving
from netns import Machines
from tandem.testing import tiny_model

pytestmark = pytest.mark.slow
PROMPT = [3 + i * 7 % 400 for i in range(600)]


def test_another_split_over_the_machines_finds_what_they_kept(machines: Machines, tmp_path: Path) -> None:
    model = str(tiny_model(tmp_path / "model", layers=4, dtype="float32", config={"max_position_embeddings": 1024}))
    directory = tmp_path / "kv"
    directory.mkdir()
    disks = [tmp_path / name for name in ("h1", "h2")]
    for disk in disks:
        disk.mkdir()
        machines.run(disk.name, ["mount", "--bind", str(disk), str(directory)])
    common = [model, "--hostfile", hostfile(machines, ["h1", "h2"]), "--kv-disk", str(directory)]
    with serving(machines, *common, "--layer-split", "1,3") as server:
        expected = server.complete(prompt=PROMPT)
        eventually(lambda: all(len(list(disk.glob("*/*.kv"))) == 2 for disk in disks), 120)
    with serving(machines, *common, "--layer-split", "3,1") as server:
        assert httpx.get(f"{server.url}/v1/cache", timeout=240).status_code == 200  # all ranks have looked
        assert server.complete(prompt=PROMPT) == expected
        metrics = httpx.get(f"{server.url}/metrics", timeout=240).text
        assert 'tandem_kv_disk_hit_tokens_total{replica="0"} 512.0' in metrics
        # What was brought is kept where it is needed: of layers 1 and 2 the first machine has a copy.
        assert len(list(disks[0].glob("*/*.kv"))) == 4 and not list(directory.iterdir())
