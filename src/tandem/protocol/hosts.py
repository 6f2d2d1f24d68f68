"""Messages between the head (the launcher in an engine) and node agents, which start ranks on the machines.

A node agent has room for one rank; a machine that runs several ranks has as many node agents.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

Number = Annotated[int, Meta(ge=0)]
HostPort = Annotated[str, Meta(pattern=r"^[^:\s]+:[0-9]{1,5}$")]
VariableName = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*\Z")]
NoneOrHostPort = Annotated[str, Meta(pattern=r"^([^:\s]+:[0-9]{1,5})?$")]


class MlxProcessGroup(Struct, frozen=True, kw_only=True):
    """Variables that `mlx.launch` sets for a process that it starts."""

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
    """True under mpirun."""

    @property
    def backend(self) -> str:
        """The backend that these variables are for; empty when there is none."""
        if self.devices:
            return "jaccl-ring" if self.prefers_ring else "jaccl"
        return "ring" if self.hostfile else "nccl" if self.nccl else "mpi" if self.mpi else ""


class HostFacts(Struct, frozen=True, kw_only=True):
    """A node agent and its machine."""

    name: str
    """The machine's own name, for people."""
    machine: str
    """Identity of the machine, whatever its name (`system.identity`)."""
    pid: int
    address: str
    """Address on which the ranks of other machines reach it."""
    versions: dict[str, str]
    """Versions of python (major.minor), tandem, mlx and mlx-lm."""
    system: str
    """Operating system and architecture, such as `Linux x86_64`."""
    chip: str
    memory_bytes: int
    """Installed, or a container's part of it."""
    usable_bytes: int
    """Memory that ranks may use; on a Mac, Metal's limit for the GPU."""
    cores: int
    gpus: list[str]
    """NVIDIA GPUs that it may use, in CUDA's terms."""


# --- node agent -> head -----------------------------------------------------------------------------------------


class Join(Struct, frozen=True, tag=True, kw_only=True):
    """First message, repeated until there is an answer."""

    facts: HostFacts
    host_id: str
    """Identity of the node agent, the same whenever it joins."""
    attempt: int
    """Number of its connection, which rises with each."""
    head: str
    """Address by which the node agent reached the head; ranks reach the engine by it too."""
    slot: Number | None = None
    """Rank that it is meant for; None: any."""
    ticket: str = ""
    """Ticket from the launcher for this slot; valid once."""
    mlx: MlxProcessGroup = MlxProcessGroup()


class Ports(Struct, frozen=True, tag=True):
    """Answers `ReservePorts`."""

    number: int
    ports: list[int]
    problem: str = ""
    """Reason why no ports were found; empty if there are."""


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


class HostPong(Struct, frozen=True, tag="Pong"):
    """Answers `HostPing`."""

    number: int
    stopped: bool = False
    """True while the rank is suspended (SIGSTOP)."""


class Leave(Struct, frozen=True, tag=True):
    """The node agent ends on request; its rank has ended."""


HostMessage = Join | Ports | RankStarted | RankExited | HostPong | Leave

# --- head -> node agent -----------------------------------------------------------------------------------------


class Welcome(Struct, frozen=True, tag=True):
    """The node agent is admitted to the cluster."""

    heartbeat_timeout: float
    """Seconds without a message from the head after which it ends its rank."""


class Refuse(Struct, frozen=True, tag=True):
    """The node agent is not admitted, and ends."""

    reason: str


class HostPing(Struct, frozen=True, tag="Ping"):
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
    """Number of this process in later messages."""
    rank: int
    payload: bytes
    """The line for its standard input."""
    environment: dict[str, str]
    process_group: dict[str, str]
    """Variables of the group that it joins."""
    files: dict[VariableName, str]
    """Variable that must point to a file -> the file's content."""
    sharing: int
    """Ranks of this rank group on the machine, which share its cores."""


class KeepStandby(Struct, frozen=True, tag=True):
    """Start a standby process for the next rank that starts here."""

    rank: int
    spec: bytes
    """The first line for its standard input."""
    environment: dict[str, str]
    sharing: int
    """Ranks on the machine, as in `StartRank`."""


class DropStandby(Struct, frozen=True, tag=True):
    """End the standby process: the next rank will be another one."""


class KillRank(Struct, frozen=True, tag=True):
    """End the rank process at once."""

    number: int


class JoinAgain(Struct, frozen=True, tag=True):
    """The head removed this node agent after a silence: end the rank, and join anew."""


class Release(Struct, frozen=True, tag=True):
    """The cluster has ended: end the rank, and the node agent."""


HeadMessage = Welcome | Refuse | HostPing | ReservePorts | StartRank | KeepStandby | DropStandby | KillRank | JoinAgain | Release
