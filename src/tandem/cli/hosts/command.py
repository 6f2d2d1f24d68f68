"""`tandem hosts`: find machines, pair with them, and write the hosts file."""

from __future__ import annotations

import argparse
import json
import socket
import sys

from rich.table import Table

from tandem.cli.hosts.pair import pair_with
from tandem.cli.hosts.write import write
from tandem.cli.screen import screen
from tandem.errors import ConfigError, UsageError
from tandem.launchers.agent.agent import PORT
from tandem.launchers.agent.discovery import Found, find
from tandem.launchers.agent.trust import NAME, Peer, Trust
from tandem.system.privacy import LOCAL_NETWORK

_GIB = 2**30
_MOST_S = 60.0


def run(arguments: argparse.Namespace) -> int:
    """One of the actions. Raises UsageError."""
    seconds = getattr(arguments, "timeout", 1.0)
    if not 0 < seconds <= _MOST_S:
        raise ConfigError(f"--timeout {seconds:g}: must be above 0 and at most {_MOST_S:g} seconds", param="timeout")
    if arguments.action == "find":
        return _find(seconds, as_json=arguments.json)
    if arguments.action == "pair":
        return _pair(arguments.agent, arguments.code, seconds)
    if arguments.action == "forget":
        Trust("head").forget(arguments.agent)
        print(f"{arguments.agent} is forgotten here; on that machine, `tandem agent --forget "
              f"{socket.gethostname().split('.')[0]}` does its part")
        return 0
    return write(arguments)


def _find(seconds: float, *, as_json: bool) -> int:
    agents, paired = find(seconds), Trust("head").peers()
    _follow(agents, paired)
    rows = [{"name": one.name, "addresses": list(one.addresses), "port": one.port, "chip": one.facts.get("chip", ""),
             "system": one.facts.get("system", ""), "memory_bytes": _number(one.facts.get("memory", "")),
             "links": one.facts.get("links", ""), "version": one.facts.get("version", ""),
             "paired": _is_paired(one, paired)} for one in agents]
    if as_json:
        print(json.dumps(rows, indent=2))
        return 0
    if not rows:
        print(f"no agent answered within {seconds:g} s; run `tandem agent` on each machine, on this local network")
        if sys.platform == "darwin":
            print(f"if they run: {LOCAL_NETWORK}")
        return 0
    table = Table("name", "address", "chip", "memory", "system", "links", "tandem", "paired", box=None)
    for row, one in zip(rows, agents, strict=True):
        memory = f"{_number(one.facts.get('memory', '')) / _GIB:.0f} GiB"
        table.add_row(one.name, ", ".join(one.addresses), str(row["chip"]), memory, str(row["system"]),
                      str(row["links"]), str(row["version"]), "yes" if row["paired"] else "no")
    screen(highlight=False, markup=False).print(table)
    return 0


def _follow(agents: list[Found], paired: dict[str, Peer]) -> None:
    """Note where paired agents are now. A wrong announcement leads to no harm: sessions go by keys."""
    for one in agents:
        if _is_paired(one, paired) and one.addresses:
            address = f"{reachable(one)}:{one.port}"
            if address != paired[one.name].address:
                Trust("head").add(one.name, Peer(paired[one.name].public, address))


def _number(text: str) -> int:
    return int(text) if text.isdecimal() and text.isascii() and len(text) < 20 else 0


def _is_paired(one: Found, paired: dict[str, Peer]) -> bool:
    return one.name in paired and paired[one.name].public == one.facts.get("public")


def _pair(target: str, code: str | None, seconds: float) -> int:
    address, port = _locate(target, seconds)
    name = pair_with(address, port, code)
    print(f"paired with {name}: use it as agent:{name} in a hosts file, or `tandem hosts write`")
    return 0


def _locate(target: str, seconds: float) -> tuple[str, int]:
    """Address and session port of an agent, by its name on the network or its address. Raises UsageError."""
    host, colon, port = target.partition(":")
    if colon and not (port.isdecimal() and 0 < int(port) < 65535):
        raise ConfigError(f"{target}: is not NAME, IP or IP:PORT", param="agent")
    if host.replace(".", "").isdecimal():
        return host, int(port or PORT)
    if not NAME.fullmatch(host):
        raise ConfigError(f"{target}: is not NAME, IP or IP:PORT", param="agent")
    one = next((one for one in find(seconds) if one.name == host and one.addresses), None)
    if one is None:
        raise UsageError(f"no agent {host} answered within {seconds:g} s; `tandem hosts find` lists those that do, or "
                         "name its address", param="agent")
    return reachable(one), one.port


def reachable(one: Found) -> str:
    """The first of an agent's addresses that takes a connection, else the first."""
    for address in one.addresses:
        try:
            with socket.create_connection((address, one.port), timeout=1.0):
                return address
        except OSError:
            continue
    return one.addresses[0]
