"""Requests to a probe and its replies: JSON lines over its standard input and output."""

from __future__ import annotations

from msgspec import Struct

from tandem.diagnostics.tasks import RankTimes, TimingTask
from tandem.protocol.hosts import VariableName

MARK = b"\x1etandem "
"""Prefix of each line of a probe; other lines come from a login shell."""


# --- doctor -> probe -------------------------------------------------------------------------------------------


class GatherFacts(Struct, frozen=True, tag=True):
    """Request for `Facts`."""

    model: str | None = None
    """Directory, GGUF file, hub id or `demo` to look for, without downloading; None for no model."""
    full_hash: bool = False
    """True to hash whole weight files instead of samples."""
    ports: list[int] = []
    """Ports to test for being free."""
    home: str = ""
    """Home directory of the user who named the model."""


class TellTime(Struct, frozen=True, tag=True):
    """Request for `Time`, answered immediately."""


class Listen(Struct, frozen=True, tag=True):
    """Accept test connections that start with `token` (32 hex digits). Reply: `ReservedPorts` with one port."""

    token: str


class Reserve(Struct, frozen=True, tag=True):
    """Find `count` free ports. Reply: `ReservedPorts`."""

    count: int


class Transfer(Struct, frozen=True, tag=True):
    """Connect to another probe's `Listen` port and measure. Reply: `Transferred`."""

    address: str
    port: int
    token: str
    seconds: float
    """Duration of the bandwidth test; 0 only connects."""


class RunRank(Struct, frozen=True, tag=True):
    """Run one timed rank. Reply: `RankTimes`."""

    task: TimingTask
    variables: dict[str, str]
    files: dict[VariableName, str]
    """Environment variable -> content of the file whose path it gets."""
    timeout_s: float


Request = GatherFacts | TellTime | Listen | Reserve | Transfer | RunRank

# --- probe -> doctor -------------------------------------------------------------------------------------------


class ModelFacts(Struct, frozen=True):
    """State of a machine's copy of the model."""

    path: str | None
    """Path of the copy; None if there is none."""
    problem: str | None = None
    """Why the copy is missing or incomplete; None if it is complete."""
    digests: dict[str, str] = {}
    """File name -> hash of its content or of samples of it."""
    bytes: int = 0


class Facts(Struct, frozen=True, tag=True):
    """Facts of a machine. `outputs` maps a name in `facts.COMMANDS` to that command's output, for `parsing`."""

    hostname: str
    hostname_addresses: list[str]
    """Addresses that the machine's own hostname resolves to, gethostbyname's first."""
    system: str
    """`Darwin` or `Linux`."""
    executable: str
    """Path of the Python interpreter, in its virtual environment if there is one."""
    root: bool
    chip: str
    memory_bytes: int
    available_bytes: int
    """Memory that is currently free for programs."""
    mlx_bytes: int | None
    """Memory that MLX may use on the GPU; None on a CPU."""
    versions: dict[str, str | None]
    outputs: dict[str, str]
    busy_ports: list[int]
    model: ModelFacts | None = None
    variables: dict[str, str] = {}
    """MLX's variables in the environment that ranks on that machine start with."""
    mlx_tag: str = ""
    """Platform tag of the installed wheel of mlx-metal, such as `macosx_26_0_arm64`; empty if there is none."""
    program: str = ""
    """Path of the interpreter's own file, without links."""
    build: str = ""
    """Version of Tandem with a digest of its code."""


class Time(Struct, frozen=True, tag=True):
    """Wall clock of that machine, in seconds since 1970."""

    now: float


class ReservedPorts(Struct, frozen=True, tag=True):
    """Free ports, or the port of the `Listener`."""

    ports: list[int]


class Transferred(Struct, frozen=True, tag=True):
    """Measurements of a connection; only `error` is set if it failed."""

    error: str | None = None
    latency_s: float = 0.0
    """Half the median round trip of a 64-byte message."""
    bandwidth: float = 0.0
    """Bytes a second, one way."""


class ProbeError(Struct, frozen=True, tag=True):
    """Failure of a request on that machine."""

    message: str


Reply = Facts | Time | ReservedPorts | Transferred | RankTimes | ProbeError
