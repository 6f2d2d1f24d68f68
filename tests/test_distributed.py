"""`tandem.distributed.MLXCommunicator`: vllm-mlx's operations, among two ranks of a ring and in one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.errors import LayoutError
from tandem.launchers.process_groups import free_ports

_RANK = """
import json
import mlx.core as mx
from tandem.distributed import MLXCommunicator, StepPlan
from tandem.errors import TandemError
from tandem.protocol.step import InsertOp
from tandem.protocol.request import SamplingParams

one = MLXCommunicator(backend="ring")
said = {"rank": [one.rank, one.world_size]}
own = one.rank == 0
one.barrier()
said["int"] = [one.broadcast_int(2**40 if own else None), one.broadcast_int(-5 if not own else 9, src=1)]
said["tensor"] = [one.broadcast_tensor(mx.array([[1.5, -2.25]]) * (1 + one.rank), src=source).tolist() for source in (0, 1)]
said["types"] = [
    one.broadcast_tensor(mx.array([1, 0, 1] if own else [0, 1, 0]).astype(kind)).tolist()
    for kind in (mx.bool_, mx.uint8, mx.bfloat16, mx.int64)
]
said["object"] = one.broadcast_object({"a": [1, (2, None)], "text": "\\u00fc"} if own else None)
said["bytes"] = one.broadcast_object(bytes(range(256)) * 1000 if not own else None, src=1) == bytes(range(256)) * 1000
plan = StepPlan(3, 0, ["gone"], inserts=[InsertOp("new", [1, 2], 2, SamplingParams(seed=7))], sampling_seeds={"new": 2**63})
for sent in (plan, None):
    got = one.broadcast_step_plan(sent) if own else one.receive_step_plan()
    said.setdefault("plan", []).append(got is None if own or sent is None else got == plan)
said["tokens"] = [one.broadcast_tokens([11, 12, 13] if not own else [], src=1),
                  one.broadcast_tokens(mx.array([4, 5], mx.uint32) * (1 + one.rank)).tolist()]
said["refused"] = []
for act in (
    lambda: one.broadcast_object(object() if own else None),
    lambda: one.broadcast_object(2**64 if own else 1),
    lambda: one.broadcast_object("text" if own else None, kind=int),
    lambda: one.broadcast_int(1, src=2),
    lambda: one.receive_step_plan() if own else one.broadcast_step_plan(None),
):
    try:
        act()
    except TandemError as error:
        said["refused"].append(f"{type(error).__name__}: {error}")
one.barrier()  # nobody is left waiting
print(json.dumps(said))
"""


def test_all_ranks_have_what_one_gives(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(2)]))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK],
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
    for number, one in enumerate(said):
        assert one["rank"] == [number, 2]
        assert one["int"] == [2**40, -5]
        assert one["tensor"] == [[[1.5, -2.25]], [[3.0, -4.5]]]
        assert one["types"] == [[True, False, True], [1, 0, 1], [1, 0, 1], [1, 0, 1]]
        assert one["object"] == {"a": [1, [2, None]], "text": "ü"} and one["bytes"]
        assert one["plan"] == [True, True]
        assert one["tokens"] == [[11, 12, 13], [4, 5]]
        unknown, large, kind, source, plan = one["refused"]
        assert unknown.startswith("TransportError: rank 0: the object is not of numbers, text, bytes, lists, dicts or structs")
        assert ("Encoding objects of type object is unsupported" in unknown) == (number == 0)
        assert large.startswith("TransportError: rank 0: the object is not of numbers, text, bytes, lists, dicts or structs")
        assert kind.startswith("TransportError: 5 bytes cannot be read as a message")
        assert source == "LayoutError: src 2: the group has ranks 0 to 1; give one of them"
        assert plan.startswith(f"LayoutError: rank {number} ")


def test_a_process_that_nobody_launched_is_a_group_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from tandem.distributed import MLXCommunicator

    for name in ("MLX_RANK", "MLX_HOSTFILE"):
        monkeypatch.delenv(name, raising=False)
    one = MLXCommunicator()
    assert (one.rank, one.world_size, one.broadcast_int(4), one.broadcast_object([1])) == (0, 1, 4, [1])
    monkeypatch.setenv("MLX_RANK", "1")
    with pytest.raises(LayoutError, match=r"backend 'ring': .*start this program with launch_distributed or mlx\.launch"):
        MLXCommunicator(backend="ring")
    with pytest.raises(LayoutError, match="backend 'nothing': .*only valid values"):
        MLXCommunicator(backend="nothing")
