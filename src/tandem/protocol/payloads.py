"""Payloads that engines, ranks and node agents read from standard input when they start."""

from __future__ import annotations

from msgspec import Raw, Struct

from tandem.config.api_keys import ClientLimits
from tandem.protocol.keys import ClusterKeys
from tandem.protocol.layout import StageSpec

WORKER_MODULE = "tandem.executors.worker"
"""Entry point of ranks."""
STANDBY = "standby"
"""Argument of that entry point for a process that waits to become a rank."""
LAUNCHERS = "tandem.launchers"
"""Entry point of what launchers start; its first argument is a role."""
RANK_HOST = f"{LAUNCHERS} rank-host"
"""Words after `python -m` that start a node agent."""


class WorkerPayload(Struct, frozen=True, kw_only=True):
    """Payload of a rank."""

    spec: StageSpec
    keys: ClusterKeys
    bus_endpoint: str
    channel_host: str
    generation: str
    weights_endpoint: str = ""
    """Endpoint at which the engine's machine serves the model; empty when the rank's own machine has it."""
    lending: ClusterKeys | None = None
    """Keys shared by ranks that keep this model's KV on other disks, and lend it to one another."""
    lending_host: str = ""
    """Address of the rank's machine at which they ask for it."""


class ApiPayload(Struct, frozen=True, kw_only=True):
    """Payload of an api."""

    settings: Raw
    """Settings as `tandem.config.loading.to_json` writes them."""
    keys: dict[str, ClientLimits]
    """API keys, as the supervisor has read them."""


class EnginePayload(Struct, frozen=True, kw_only=True):
    """Payload of an engine."""

    settings: Raw
    """Settings as `tandem.config.loading.to_json` writes them."""
    lending: ClusterKeys | None = None
    """With which the ranks of all its engines of one model lend KV to one another; None where none needs to."""


class HostPayload(Struct, frozen=True, kw_only=True):
    """Payload of a node agent."""

    keys: ClusterKeys
    endpoints: list[str]
    """HOST:PORT of the head's join socket, by each address that the machine may reach it at."""
    slot: int | None = None
    ticket: str = ""
    address: str | None = None
    """Address of the machine for other ranks; None: the one from which it reaches the head."""
    join_timeout: float = 30.0
    """Seconds to keep trying to join."""
    rejoin: bool = False
    """Join again after the head was lost."""
    log_level: str = "INFO"
    worker: str = WORKER_MODULE
    """Entry point of ranks."""
