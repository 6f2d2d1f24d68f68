"""Discovery of agents on the local network by multicast DNS (zeroconf). Announcements are hints, never trusted."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from zeroconf import Error, InterfaceChoice, IPVersion, ServiceBrowser, ServiceInfo, ServiceListener, Zeroconf

from tandem.errors import UsageError
from tandem.printable import printable

SERVICE = "_tandem._tcp.local."
_RESOLVE_MS = 2000


@dataclass(frozen=True)
class Found:
    """An agent's announcement."""

    name: str
    addresses: tuple[str, ...]
    port: int
    facts: Mapping[str, str] = field(default_factory=dict)
    """Announced properties: `public`, `pair_port`, `chip`, `memory` (bytes), `version`, `system`, `links`."""


class Announcement:
    """A context manager that announces an agent while open."""

    def __init__(self, name: str, port: int, facts: Mapping[str, str], addresses: Sequence[str]) -> None:
        """Register the service at `addresses` of this machine. Raises UsageError for a taken name or without a network."""
        self._info = ServiceInfo(
            SERVICE,
            f"{name}.{SERVICE}",
            port=port,
            server=f"{name}.tandem.local.",
            properties={key: value.encode()[:200] for key, value in facts.items()},
            addresses=[socket.inet_aton(address) for address in addresses],
        )
        self._zeroconf = _zeroconf()
        try:
            self._zeroconf.register_service(self._info)
        except (Error, OSError) as error:
            self._zeroconf.close()
            raise UsageError(
                f"cannot announce {name} on the local network: {type(error).__name__} {error}; another --name, or --no-announce"
            ) from error

    def __enter__(self) -> Announcement:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._zeroconf.unregister_service(self._info)
        self._zeroconf.close()


class _Listener(ServiceListener):
    def __init__(self) -> None:
        self.names: set[str] = set()

    def add_service(self, zc: Zeroconf, type_: str, name: str) -> None:
        self.names.add(name)

    def update_service(self, zc: Zeroconf, type_: str, name: str) -> None:
        self.names.add(name)

    def remove_service(self, zc: Zeroconf, type_: str, name: str) -> None:
        self.names.discard(name)


def find(seconds: float) -> list[Found]:
    """Return the agents that answer within `seconds`, sorted by name. Raises UsageError."""
    zeroconf, listener = _zeroconf(), _Listener()
    try:
        browser = ServiceBrowser(zeroconf, SERVICE, listener)
        time.sleep(seconds)
        browser.cancel()
        infos = [zeroconf.get_service_info(SERVICE, name, _RESOLVE_MS) for name in sorted(listener.names)]
    finally:
        zeroconf.close()
    return [_found(info) for info in infos if info is not None and info.port]


def _zeroconf() -> Zeroconf:
    try:
        return Zeroconf(interfaces=InterfaceChoice.All, ip_version=IPVersion.V4Only)
    except OSError as error:
        raise UsageError(f"multicast DNS does not work here: {error}; name agents by address instead") from error


def _found(info: ServiceInfo) -> Found:
    facts = {
        key.decode(errors="replace"): printable((value or b"").decode(errors="replace")) for key, value in info.properties.items()
    }
    return Found(
        printable(info.name.removesuffix("." + SERVICE)), tuple(info.parsed_addresses(IPVersion.V4Only)), info.port or 0, facts
    )
