"""Exchange of addresses between an engine's workers, through the key-value store that vLLM provides.

The store is torch's, used for a few short strings at start-up; torch.distributed is never initialised. Its port is open to
anyone. So the store holds only addresses, each authenticated with keys from vLLM's configuration.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

import msgspec

from tandem.errors import TransportError
from tandem.json_types import JsonObject
from tandem.launchers.process_groups import free_ports
from tandem.launchers.ray.nodes import is_loopback
from tandem.protocol.keys import ClusterKeys

if TYPE_CHECKING:
    from vllm.config import VllmConfig

log = logging.getLogger("vllm.tandem")
TIMEOUT = timedelta(minutes=10)
"""Timeout of the store: loading torch and vLLM takes minutes on a slow machine."""
_KEYS = "tandem_keys"


def add_keys(vllm_config: VllmConfig) -> None:
    """Add new CURVE keys to the configuration of an engine with several ranks; vLLM passes them to its workers."""
    more: JsonObject = vllm_config.additional_config or {}
    if vllm_config.parallel_config.world_size > 1 and _KEYS not in more:
        vllm_config.additional_config = {**more, _KEYS: msgspec.structs.asdict(ClusterKeys.generate())}


class _Store(Protocol):
    """Interface of torch's key-value stores, as far as used."""

    def set(self, key: str, value: str) -> None:
        """Write a value."""

    def get(self, key: str) -> bytes:
        """Wait for a value and return it."""


class Rendezvous:
    """One worker's connection to the store."""

    def __init__(self, init_method: str, rank: int, size: int, additional_config: Mapping[str, object]) -> None:
        """Connect to the store at vLLM's `init_method`, tcp://host:port or file://path. Rank 0 serves a TCP store if there is
        none."""
        from torch.distributed import FileStore, TCPStore

        self.keys = msgspec.convert(additional_config[_KEYS], ClusterKeys)
        self.rank, self.size = rank, size
        address = urlsplit(init_method)
        if address.scheme == "file":
            self._store: _Store = FileStore(address.path, size)
        else:
            # Under Ray the store already runs in rank 0's process; multi_tenant joins it.
            self._store = TCPStore(
                address.hostname,
                address.port,
                size,
                is_master=rank == 0,
                timeout=TIMEOUT,
                wait_for_workers=False,
                multi_tenant=True,
            )

    def gather(self, key: str, value: str) -> list[str]:
        """Write this worker's value and return all workers' values by rank. Waits for all. Raises TransportError for a forged
        value."""
        self._store.set(f"tandem/{key}/{self.rank}", f"{self._seal(key, self.rank, value)} {value}")
        return [self._value(key, rank) for rank in range(self.size)]

    def _value(self, key: str, rank: int) -> str:
        seal, _, value = self._store.get(f"tandem/{key}/{rank}").decode(errors="replace").partition(" ")
        if not hmac.compare_digest(seal.encode(), self._seal(key, rank, value).encode()):
            raise TransportError(
                f"what vLLM's key-value store has as {key} of rank {rank} was not written by this "
                "engine; keep its port from others, and start again"
            )
        return value

    def _seal(self, key: str, rank: int, value: str) -> str:
        return hmac.digest(self.keys.connect_secret.encode(), f"{key} {rank} {value}".encode(), "sha256").hex()


def free_port(address: str, wanted: int) -> int:
    """Return a free port of `address`: `wanted`, which firewalls may name, unless it is taken or `address` is loopback."""
    named = [] if is_loopback(address) else [wanted]
    [port] = free_ports(1, address, named)
    if named and port != wanted:
        log.warning("Port %d of %s is in use: listening on %d, which a firewall must let through", wanted, address, port)
    return port
