"""What `tandem bench comm` tells a rank that times collectives, channels or steps, and what the rank answers. Pure."""

from __future__ import annotations

from msgspec import Struct

from tandem.planner.profile import Step
from tandem.protocol.keys import ClusterKeys

MODULE = "tandem.bench.comm_rank"
"""Entry point of such a rank."""


class CommPayload(Struct, frozen=True, kw_only=True):
    """What one rank is to do: with others what joins them, alone the steps of its machine."""

    rank: int = 0
    ranks: int = 1
    backend: str = "ring"
    sizes: list[int] = []
    """Bytes of one array."""
    iterations: int = 0
    keys: ClusterKeys | None = None
    listen: tuple[str, int] = ("", 0)
    """Address and port of its channel."""
    following: str = ""
    """Where the next rank listens: tcp://ADDRESS:PORT."""
    fast_sync: bool = False
    """With MLX's fast fences, on a Mac."""
    result: str = ""
    """File for the answer; standard output if there is none."""


class Row(Struct, frozen=True, kw_only=True):
    """Repeated calls of one operation with one size."""

    operation: str
    """all_sum: of an array that is there; between: an all_sum between two operations of the device; tcp and ring: one
    hop."""
    bytes: int
    median_us: float
    p99_us: float
    gb_per_s: float
    """10**9 bytes a second."""


class RankTimes(Struct, frozen=True, kw_only=True):
    """What a rank has found, and on what."""

    device: str
    gpu: bool
    metal: bool
    memory_bytes: int
    mlx: str
    rows: list[Row] = []
    steps: list[Step] = []
