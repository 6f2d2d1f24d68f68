"""Messages between the head (the launcher in an engine) and node agents, which start ranks on their machines.

A node agent starts one rank at a time; a machine with several ranks has as many node agents.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

Number = Annotated[int, Meta(ge=0)]
HostPort = Annotated[str, Meta(pattern=r"^[^:\s]+:[0-9]{1,5}$")]
VariableName = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*\Z")]
NoneOrHostPort = Annotated[str, Meta(pattern=r"^([^:\s]+:[0-9]{1,5})?$")]


class MlxProcessGroup(Struct, frozen=True, kw_only=True):
    """Process group of MLX, as the environment variables that `mlx.launch` sets for each process."""

    rank: Number | None = None
    hostfile: list[list[HostPort]] = []
    """Content of MLX_HOSTFILE: each rank's listening addresses (IP:port)."""
    devices: list[list[str | list[str] | None]] = []
    """Content of MLX_IBV_DEVICES: each rank's RDMA device towards every rank, null for itself."""
    coordinator: NoneOrHostPort = ""
    """MLX_JACCL_COORDINATOR, IP:port."""
    prefers_ring: bool = False
    """True if MLX_JACCL_RING is set."""
    nccl: NoneOrHostPort = ""
    """NCCL_HOST_IP and NCCL_PORT, as IP:port."""
    mpi: bool = False
    """True if mpirun started the process."""

    @property
    def backend(self) -> str:
        """MLX backend that these variables configure; empty without any."""
        if self.devices:
            return "jaccl-ring" if self.prefers_ring else "jaccl"
        return "ring" if self.hostfile else "nccl" if self.nccl else "mpi" if self.mpi else ""


class HostFacts(Struct, frozen=True, kw_only=True):
    """Description of a node agent and its machine."""

    name: str
    """Host name of the machine, for messages."""
    machine: str
    """Identity of the machine, independent of its name (`system.identity`)."""
    pid: int
    address: str
    """Address of the machine for ranks on other machines."""
    versions: dict[str, str]
    """Versions of python (major.minor), tandem, mlx and mlx-lm."""
    system: str
    """Operating system and architecture, such as `Linux x86_64`."""
    chip: str
    memory_bytes: int
    """Installed memory in bytes, or the container's limit."""
    usable_bytes: int
    """Bytes that ranks may use; on a Mac, Metal's limit for the GPU."""
    cores: int
    gpus: list[str]
    """NVIDIA GPUs that it may use, as CUDA names them."""


# --- node agent -> head -----------------------------------------------------------------------------------------


class Join(Struct, frozen=True, tag=True, kw_only=True):
    """First message of a node agent, repeated until the head answers."""

    facts: HostFacts
    host_id: str
    """Identity of the node agent, constant over all its joins."""
    attempt: int
    """Number of the connection attempt, rising by one each time."""
    head: str
    """Address at which the node agent reached the head; its ranks reach the engine there too."""
    slot: Number | None = None
    """Rank that the node agent is for; None for any rank."""
    ticket: str = ""
    """One-time ticket from the launcher for this slot."""
    mlx: MlxProcessGroup = MlxProcessGroup()


class Ports(Struct, frozen=True, tag=True):
    """Answer to `ReservePorts`."""

    number: int
    ports: list[int]
    problem: str = ""
    """Reason why no ports were found; empty on success."""


class RankStarted(Struct, frozen=True, tag=True):
    """Report that the rank process runs."""

    number: int
    pid: int


class RankExited(Struct, frozen=True, tag=True):
    """Report that the rank process has exited or could not start."""

    number: int
    code: int
    how: str
    """How the process ended, in words."""


class HostPong(Struct, frozen=True, tag="Pong"):
    """Answer to `HostPing`."""

    number: int
    stopped: bool = False
    """True while the rank is suspended (SIGSTOP)."""


class Leave(Struct, frozen=True, tag=True):
    """The node agent shuts down on request, after its rank has exited."""


HostMessage = Join | Ports | RankStarted | RankExited | HostPong | Leave

# --- head -> node agent -----------------------------------------------------------------------------------------


class Welcome(Struct, frozen=True, tag=True):
    """Join accepted."""

    heartbeat_timeout: float
    """Seconds without a message from the head after which the node agent ends its rank."""


class Refuse(Struct, frozen=True, tag=True):
    """Join refused: the node agent must exit."""

    reason: str


class HostPing(Struct, frozen=True, tag="Ping"):
    """Heartbeat of the head, about every second."""

    number: int


class ReservePorts(Struct, frozen=True, tag=True):
    """Find `count` free ports at `address`, preferring the `wanted` ones."""

    number: int
    address: str
    count: int
    wanted: list[int] = []


class StartRank(Struct, frozen=True, tag=True):
    """Start a rank process; kill a previous one first."""

    number: int
    """Number of this process in later messages."""
    rank: int
    payload: bytes
    """Line for the process's standard input (`WorkerPayload`)."""
    environment: dict[str, str]
    process_group: dict[str, str]
    """Environment variables of the MLX process group to join."""
    files: dict[VariableName, str]
    """Environment variable -> content of the file that it must point to."""
    sharing: int
    """Ranks of this group on the machine, which share its cores."""


class KeepStandby(Struct, frozen=True, tag=True):
    """Start a standby process, which becomes the next rank on this node."""

    rank: int
    spec: bytes
    """First line for the process's standard input."""
    environment: dict[str, str]
    sharing: int
    """Ranks on the machine, as in `StartRank`."""


class DropStandby(Struct, frozen=True, tag=True):
    """End the standby process, as the next rank needs another specification."""


class KillRank(Struct, frozen=True, tag=True):
    """End the rank process at once."""

    number: int


class JoinAgain(Struct, frozen=True, tag=True):
    """The head removed this node agent after missed heartbeats: end the rank and join again."""


class Release(Struct, frozen=True, tag=True):
    """The cluster has ended: end the rank and the node agent."""


HeadMessage = Welcome | Refuse | HostPing | ReservePorts | StartRank | KeepStandby | DropStandby | KillRank | JoinAgain | Release
