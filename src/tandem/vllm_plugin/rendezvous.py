"""How the workers of one engine find one another: through the key-value store whose address vLLM gives them all.

The store is torch's, used for a few short strings at start-up; torch.distributed is never initialised.
"""

from __future__ import annotations

import json
import socket
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import msgspec

from tandem.processes.leftovers import temporary_prefix
from tandem.protocol.keys import ClusterKeys

TIMEOUT = timedelta(minutes=10)
"""Loading torch and vLLM takes minutes on a slow machine."""


class Rendezvous:
    """One worker's end of the store."""

    def __init__(self, init_method: str, rank: int, size: int) -> None:
        """`init_method` is vLLM's: tcp://host:port or file://path. Rank 0 serves the store if nobody does yet."""
        from torch.distributed import FileStore, TCPStore

        self.rank, self.size = rank, size
        address = urlsplit(init_method)
        if address.scheme == "file":
            self._store: Any = FileStore(address.path, size)
        else:
            # Under Ray the store is up in rank 0's process already: multi_tenant joins that one.
            self._store = TCPStore(address.hostname, address.port, size, is_master=rank == 0, timeout=TIMEOUT,
                                   wait_for_workers=False, multi_tenant=True)

    def gather(self, key: str, value: str) -> list[str]:
        """Everybody's value, in rank order. Waits for all."""
        self._store.set(f"tandem/{key}/{self.rank}", value)
        return [self._store.get(f"tandem/{key}/{rank}").decode() for rank in range(self.size)]

    def keys(self) -> ClusterKeys:
        """The engine's CURVE keys, drawn by rank 0."""
        if self.rank == 0:
            self._store.set("tandem/keys", msgspec.json.encode(ClusterKeys.generate()))
        return msgspec.json.decode(self._store.get("tandem/keys"), type=ClusterKeys)


def listen_port(address: str, port: int | None) -> int:
    """`port`, or one that was free a moment ago on `address`."""
    if port is not None:
        return port
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def ring_variables(endpoints: Sequence[str], index: int) -> dict[str, str]:
    """What MLX's ring backend reads from the environment; `endpoints` are host:port in ring order."""
    with tempfile.NamedTemporaryFile("w", prefix=temporary_prefix("ring"), suffix=".json", delete=False) as file:
        json.dump([[endpoint] for endpoint in endpoints], file)
    return {"MLX_HOSTFILE": file.name, "MLX_RANK": str(index)}
