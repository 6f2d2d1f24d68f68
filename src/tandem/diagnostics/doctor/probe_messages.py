"""Requests to a probe and its replies: JSON lines over its standard input and output."""

from __future__ import annotations

from msgspec import Struct

from tandem.diagnostics.tasks import RankTimes, TimingTask
from tandem.protocol.hosts import VariableName

MARK = b"\x1etandem "
"""Begins each line of a probe; other lines are a login shell's."""


# --- doctor -> probe -------------------------------------------------------------------------------------------


class GatherFacts(Struct, frozen=True, tag=True):
    """Answered by `Facts`."""

    model: str | None = None
    """Directory, GGUF file, hub id or `demo` to look for; nothing is downloaded."""
    full_hash: bool = False
    """Read all of each weight file instead of samples."""
    ports: list[int] = []
    """Ports to try whether they are free."""


class TellTime(Struct, frozen=True, tag=True):
    """Answered by `Time` at once."""


class Listen(Struct, frozen=True, tag=True):
    """Accept test connections that begin with `token` (32 hex digits); answered by `ReservedPorts` with one port."""

    token: str


class Reserve(Struct, frozen=True, tag=True):
    """Name `count` free ports; answered by `ReservedPorts`."""

    count: int


class Transfer(Struct, frozen=True, tag=True):
    """Connect to another probe's `Listen` and measure; answered by `Transferred`."""

    address: str
    port: int
    token: str
    seconds: float
    """Length of the bandwidth test; 0 only tries to connect."""


class RunRank(Struct, frozen=True, tag=True):
    """Run one rank that times; answered by `RankTimes`."""

    task: TimingTask
    variables: dict[str, str]
    files: dict[VariableName, str]
    """Variable -> content of the file that it is to name."""
    timeout_s: float


Request = GatherFacts | TellTime | Listen | Reserve | Transfer | RunRank

# --- probe -> doctor -------------------------------------------------------------------------------------------


class ModelFacts(Struct, frozen=True):
    """A machine's copy of the model."""

    path: str | None
    """Place of the copy; None if there is none."""
    problem: str | None = None
    """Reason why it is missing, or what it lacks."""
    digests: dict[str, str] = {}
    """File name -> hash of its content, or of samples of it."""
    bytes: int = 0


class Facts(Struct, frozen=True, tag=True):
    """Facts of a machine. `outputs` are the texts of commands, which `parsing` reads."""

    hostname: str
    hostname_addresses: list[str]
    """Addresses of the machine's own name there; the one that most programs take first."""
    system: str
    """`Darwin` or `Linux`."""
    executable: str
    """Path of the Python that runs."""
    root: bool
    chip: str
    memory_bytes: int
    available_bytes: int
    """Memory that other programs do not use at the moment."""
    mlx_bytes: int | None
    """Memory that MLX may use on the GPU; None where it computes on the CPU."""
    versions: dict[str, str | None]
    outputs: dict[str, str]
    busy_ports: list[int]
    model: ModelFacts | None = None
    variables: dict[str, str] = {}
    """MLX's variables in the environment of a rank that is started there."""


class Time(Struct, frozen=True, tag=True):
    """Seconds since 1970 on that machine."""

    now: float


class ReservedPorts(Struct, frozen=True, tag=True):
    """Free ports, or those that listen."""

    ports: list[int]


class Transferred(Struct, frozen=True, tag=True):
    """A connection's figures; with `error` (and nothing else) if there was none."""

    error: str | None = None
    latency_s: float = 0.0
    """Half of the median round trip of a small message."""
    bandwidth: float = 0.0
    """Bytes a second, one way."""


class ProbeError(Struct, frozen=True, tag=True):
    """The request failed on that machine."""

    message: str


Reply = Facts | Time | ReservedPorts | Transferred | RankTimes | ProbeError
