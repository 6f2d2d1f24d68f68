"""Messages between the head (the launcher in an engine) and rank hosts, which start ranks on the machines.

A rank host has room for one rank; a machine that runs several ranks has as many rank hosts.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

Number = Annotated[int, Meta(ge=0)]
HostPort = Annotated[str, Meta(pattern=r"^[^:\s]+:[0-9]{1,5}$")]
VariableName = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*\Z")]
NoneOrHostPort = Annotated[str, Meta(pattern=r"^([^:\s]+:[0-9]{1,5})?$")]


class MlxWorld(Struct, frozen=True, kw_only=True):
    """What `mlx.launch` put into the environment of a process that it started."""

    rank: Number | None = None
    hostfile: list[list[HostPort]] = []
    """Content of MLX_HOSTFILE: for each rank the addresses (IP:port) on which it listens."""
    devices: list[list[str | list[str] | None]] = []
    """Content of MLX_IBV_DEVICES: for each rank its RDMA devices towards every rank, null for itself."""
    coordinator: NoneOrHostPort = ""
    """MLX_JACCL_COORDINATOR, IP:port."""
    prefers_ring: bool = False
    """MLX_JACCL_RING is set."""
    nccl: NoneOrHostPort = ""
    """NCCL_HOST_IP and NCCL_PORT, as IP:port."""
    mpi: bool = False
    """It runs under mpirun."""

    @property
    def backend(self) -> str:
        """The backend that these variables are for; empty when there is none."""
        if self.devices:
            return "jaccl-ring" if self.prefers_ring else "jaccl"
        return "ring" if self.hostfile else "nccl" if self.nccl else "mpi" if self.mpi else ""


class HostFacts(Struct, frozen=True, kw_only=True):
    """A rank host and its machine."""

    name: str
    """The machine's own name, for people."""
    machine: str
    """What tells machines apart, whatever they are called (`system.identity`)."""
    pid: int
    address: str
    """Address on which the ranks of other machines reach it."""
    versions: dict[str, str]
    """Of python (major.minor), tandem, mlx and mlx-lm."""
    system: str
    """Such as `Linux x86_64`."""
    chip: str
    memory_bytes: int
    """Installed, or a container's part of it."""
    usable_bytes: int
    """What ranks there may use of it: on a Mac, what Metal lets its GPU have."""
    cores: int
    gpus: list[str]
    """NVIDIA GPUs that it may use, in CUDA's terms."""


# --- rank host -> head -----------------------------------------------------------------------------------------


class Join(Struct, frozen=True, tag=True, kw_only=True):
    """First message, repeated until there is an answer."""

    facts: HostFacts
    host_id: str
    """Of the rank host: the same whenever it joins."""
    attempt: int
    """Rises with each connection on which it tries."""
    head: str
    """Address by which the rank host has reached the head; ranks will reach the engine by it too."""
    slot: Number | None = None
    """Rank that it is meant for; None: any."""
    ticket: str = ""
    """What the launcher gave to the rank host that it started for this slot; works once."""
    mlx: MlxWorld = MlxWorld()


class Ports(Struct, frozen=True, tag=True):
    """Answers `ReservePorts`."""

    number: int
    ports: list[int]
    problem: str = ""
    """Why there are none."""


class RankStarted(Struct, frozen=True, tag=True):
    """The rank process runs."""

    number: int
    pid: int


class RankExited(Struct, frozen=True, tag=True):
    """The rank process has ended, or could not be started."""

    number: int
    code: int
    how: str
    """In words."""


class Pong(Struct, frozen=True, tag=True):
    """Answers `Ping`."""

    number: int
    stopped: bool = False
    """The rank stands still (SIGSTOP)."""


class Leave(Struct, frozen=True, tag=True):
    """The rank host was told to end; its rank has ended."""


HostMessage = Join | Ports | RankStarted | RankExited | Pong | Leave

# --- head -> rank host -----------------------------------------------------------------------------------------


class Welcome(Struct, frozen=True, tag=True):
    """The rank host belongs to the cluster now."""

    heartbeat_timeout: float
    """Seconds without a word from the head after which it ends its rank."""


class Refuse(Struct, frozen=True, tag=True):
    """The rank host cannot be used, and ends."""

    reason: str


class Ping(Struct, frozen=True, tag=True):
    """Sent about every second."""

    number: int


class ReservePorts(Struct, frozen=True, tag=True):
    """Find ports that are free now at `address`; `wanted` ones if they are."""

    number: int
    address: str
    count: int
    wanted: list[int] = []


class StartRank(Struct, frozen=True, tag=True):
    """Start a rank process; one that still runs is killed first."""

    number: int
    """Of this process, in what is said of it."""
    rank: int
    payload: bytes
    """The line for its standard input."""
    environment: dict[str, str]
    world: dict[str, str]
    """Variables of the group that it joins."""
    files: dict[VariableName, str]
    """Content of files, by the variable that is to name the file; the rank host calls the file so too."""
    sharing: int
    """Ranks of this gang on the machine, which share its cores."""


class KeepSpare(Struct, frozen=True, tag=True):
    """Have a process wait for the next rank that is started here."""

    rank: int
    spec: bytes
    """The first line for its standard input."""
    environment: dict[str, str]
    sharing: int
    """As of `StartRank`."""


class DropSpare(Struct, frozen=True, tag=True):
    """The next rank will be another one: end what waits for it."""


class KillRank(Struct, frozen=True, tag=True):
    """End the rank process at once."""

    number: int


class JoinAgain(Struct, frozen=True, tag=True):
    """The head has given this rank host up, after a silence: end the rank, and join anew."""


class Release(Struct, frozen=True, tag=True):
    """The cluster is over: end the rank, and the rank host."""


HeadMessage = (Welcome | Refuse | Ping | ReservePorts | StartRank | KeepSpare | DropSpare | KillRank | JoinAgain
               | Release)
