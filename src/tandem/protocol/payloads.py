"""Payloads that processes read from standard input when they start: ranks, apis, engines, node agents."""

from __future__ import annotations

from msgspec import Raw, Struct

from tandem.config.api_keys import ClientLimits
from tandem.protocol.keys import ClusterKeys
from tandem.protocol.layout import StageSpec

WORKER_MODULE = "tandem.executors.worker"
"""Module of the rank process, run with `python -m`."""
STANDBY = "standby"
"""Argument of `WORKER_MODULE` for a standby process, which waits to become a rank."""
LAUNCHERS = "tandem.launchers"
"""Entry point of the processes that launchers start; its first argument is a role."""
RANK_HOST = f"{LAUNCHERS} rank-host"
"""Arguments of `python -m` that start a node agent."""


class WorkerPayload(Struct, frozen=True, kw_only=True):
    """Payload of a rank."""

    spec: StageSpec
    keys: ClusterKeys
    bus_endpoint: str
    channel_host: str
    generation: str
    weights_endpoint: str = ""
    """Endpoint of the engine's machine that serves the weights; empty if the rank's machine has them."""
    lending: ClusterKeys | None = None
    """Keys for KV transfers between ranks that cache this model's KV on different disks; None without transfers."""
    lending_host: str = ""
    """Address of the rank's machine for KV transfers."""


class ApiPayload(Struct, frozen=True, kw_only=True):
    """Payload of an api process."""

    settings: Raw
    """Settings as `tandem.config.loading.to_json` writes them."""
    keys: dict[str, ClientLimits]
    """API keys and their limits, as the supervisor read them."""
    succeeds: bool = False
    """True for the successor of an api that serves: it accepts connections once it is ready."""


class EnginePayload(Struct, frozen=True, kw_only=True):
    """Payload of an engine process."""

    settings: Raw
    """Settings as `tandem.config.loading.to_json` writes them."""
    lending: ClusterKeys | None = None
    """Keys for KV transfers between the ranks of all engines of one model; None without transfers."""


class HostPayload(Struct, frozen=True, kw_only=True):
    """Payload of a node agent."""

    keys: ClusterKeys
    endpoints: list[str]
    """HOST:PORT of the head's join socket, for each address of the head."""
    slot: int | None = None
    ticket: str = ""
    address: str | None = None
    """Address of the machine for other ranks; None for the local address of the connection to the head."""
    join_timeout: float = 30.0
    """Seconds to retry joining."""
    rejoin: bool = False
    """True to join again after the head is lost."""
    log_level: str = "INFO"
    log_format: str = "auto"
    worker: str = WORKER_MODULE
    """Module that the node agent runs as a rank process."""
