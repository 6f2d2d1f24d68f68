"""What joins the ranks of a stage, over MLX's ring."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.launchers.process_groups import free_ports

_RANK = """
import json, os, socket, sys
import mlx.core as mx
from tandem.comm import group as groups
groups.POLLING_CORES = int(sys.argv[1])
group = groups.StageGroup("ring", 2)
polled = 0
for name in os.listdir("/proc/self/fd"):
    try:
        with socket.socket(fileno=os.dup(int(name))) as one:
            one.getpeername()
            polled += not os.get_blocking(one.fileno())
    except OSError:
        continue
both_ways = 1 << 20
sums = [bool((group.sum(mx.ones(size)) == 2).all()) for size in (1, 64, both_ways)]
whole = group.gather_last(mx.full((1, 2 - group.rank), group.rank), [2, 1]).tolist()
print(json.dumps([polled, sums, whole]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process its own sockets in /proc")
@pytest.mark.parametrize(("cores", "polled"), [(1 << 20, 0), (0, 2)], ids=["few cores", "many cores"])
def test_a_ring_polls_its_sockets_only_where_cores_abound(cores: int, polled: int, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(2)]))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK, str(cores)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)},
        )
        for rank in range(2)
    ]
    try:
        said = [json.loads(rank.communicate(timeout=240)[0]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert said == [[polled, [True] * 3, [[0, 0, 1]]]] * 2
