"""`tandem hosts`: find machines, pair with them, and write the hosts file."""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from rich.table import Table

from tandem.cli.screen import screen
from tandem.diagnostics.doctor import topology
from tandem.diagnostics.doctor.parsing import Interface, interfaces
from tandem.diagnostics.doctor.probe_messages import Facts, GatherFacts
from tandem.diagnostics.doctor.probe_session import ProbeLink, ProbeLost, Probes, probe_command
from tandem.env import child_environment, variable
from tandem.errors import ConfigError, UsageError
from tandem.json_types import JsonObject
from tandem.launchers.agent.agent_server import PORT
from tandem.launchers.agent.discovery import Found, find
from tandem.launchers.agent.link import PREFIX, PairingLink, agent_name
from tandem.launchers.agent.pairing import HeadSide
from tandem.launchers.agent.trust import NAME, Peer, Trust, checked_name
from tandem.launchers.hostfile import LOCAL_NAMES, read_hostfile
from tandem.planner.hosts import host_fields
from tandem.printable import printable
from tandem.processes.interpreter import code_command
from tandem.protocol.agent_messages import PairElement, PairHello, PairIdentity, PairProof
from tandem.system.files import file_errors
from tandem.system.privacy import LOCAL_NETWORK, refusal
from tandem.system.tools import find_tool

GATHER_S = 60.0
CONFIG_S = 300.0
LOCAL_SSH = """#!/bin/sh
for word; do
    case "$word" in
    {here}) while [ "$1" != "$word" ]; do shift; done; shift; exec sh -c "$*";;
    -*|*=*) ;;
    *) break;;
    esac
done
exec {ssh} "$@"
"""
"""Replacement for ssh in mlx.distributed_config that runs commands for this machine locally.

That tool uses ssh for this machine too, which on a Mac would need Remote Login and the user's own key.
"""


def write(arguments: argparse.Namespace) -> int:
    """Write the hosts file from the machines' facts; first pair with agents that are not paired. Raises UsageError."""
    paired = Trust("head").peers()
    hosts = list(arguments.hosts) or [PREFIX + name for name in paired]
    if not hosts:
        raise UsageError(
            "no hosts are named, and no agent is paired; name ssh destinations, or `tandem hosts pair` first", param="hosts"
        )
    if len(set(hosts)) < len(hosts):
        raise ConfigError(f"a host is named twice: {', '.join(hosts)}; add entries for further ranks by hand", param="hosts")
    for agent in filter(None, map(agent_name, hosts)):
        if agent not in paired:
            print(f"paired with {pair_with(*_locate(agent, _FIND_S), None)}", file=sys.stderr)
    _tell(f"asking {', '.join(hosts)}")
    facts = gather_facts(hosts)
    machines = {name: interfaces(one) for name, one in facts.items()}
    write = _own if arguments.over is None else _from_mlx
    data = write(arguments, hosts, facts, machines)
    topology.add_meeting_addresses(data["hosts"], machines)
    for entry in data["hosts"]:
        entry |= host_fields(facts[entry["ssh"]].memory_bytes, facts[entry["ssh"]].chip)
    text = json.dumps(data, indent=2)
    if arguments.file == "-":
        print(text)
        return 0
    with file_errors(f"{arguments.file}: cannot be written", "name another file", param="file"):
        Path(arguments.file).write_text(text + "\n", encoding="utf-8")
    read_hostfile(arguments.file, "hosts write")
    print(f"{arguments.file} is for {len(hosts)} machine(s); next: tandem doctor --hostfile {arguments.file}", file=sys.stderr)
    return 0


def gather_facts(hosts: Sequence[str]) -> dict[str, Facts]:
    """Return the facts of every host by name. Raises UsageError naming a host that does not answer."""
    with Probes(len(hosts)) as probes:
        probes.links |= {name: ProbeLink(name, probe_command(name)) for name in hosts}
        try:
            facts = probes.each(lambda name: probes.ask(name, GatherFacts(), Facts, GATHER_S), hosts)
        except ProbeLost as error:
            raise UsageError(error.message) from None
    return dict(zip(hosts, facts, strict=True))


def _own(
    arguments: argparse.Namespace, hosts: Sequence[str], facts: Mapping[str, Facts], machines: Mapping[str, list[Interface]]
) -> JsonObject:
    """Return a hosts file's content with the machines' addresses and those chosen for cables. Print commands for the latter."""
    cables = topology.address_cables([topology.parse_cable(text, hosts) for text in arguments.cable], machines)
    for name, ends in cables.items():
        print(f"# on {name}:", file=sys.stderr)
        for interface, address in ends:
            mac = facts[name].system == "Darwin"
            print(
                f"sudo ifconfig {interface} inet {address.ip} netmask {address.netmask}"
                if mac
                else f"sudo ip addr add {address} dev {interface} && sudo ip link set {interface} up",
                file=sys.stderr,
            )
    future = {
        name: [*found, *(Interface(interface, [address], point_to_point=True) for interface, address in cables.get(name, []))]
        for name, found in machines.items()
    }
    addresses = topology.choose_addresses(hosts, future)
    entries = [{"ssh": name, "ips": [addresses[name]]} for name in hosts]
    return {**({"backend": arguments.backend} if arguments.backend else {}), "hosts": entries}


def _from_mlx(
    arguments: argparse.Namespace, hosts: Sequence[str], facts: Mapping[str, Facts], machines: Mapping[str, list[Interface]]
) -> JsonObject:
    """Return the content of a hosts file made by MLX's own tool, which finds the cables of Macs, on subnets without conflicts.

    Raises UsageError.
    """
    if others := [name for name, one in facts.items() if one.system != "Darwin"]:
        raise UsageError(f"--over is for Macs; not one: {', '.join(others)}", param="over")
    if agents := [name for name in hosts if name.startswith(PREFIX)]:
        raise UsageError(
            f"--over works over ssh, which mlx.distributed_config needs; not by ssh: {', '.join(agents)}", param="over"
        )
    with tempfile.TemporaryDirectory(prefix="tandem-hosts-") as directory:
        file = Path(directory) / "hosts.json"
        words = ["--hosts", ",".join(hosts), "--over", arguments.over, "--no-auto-setup", "--output-hostfile", str(file)]
        words += ["--backend", arguments.backend] if arguments.backend else []
        command = code_command("from mlx._distributed_utils.config import main; main()", *words)
        ssh = Path(directory) / "ssh"
        ssh.write_text(LOCAL_SSH.format(ssh=find_tool("ssh") or "ssh", here="|".join(LOCAL_NAMES)))
        ssh.chmod(0o700)
        there = child_environment({"PATH": f"{directory}{os.pathsep}{variable('PATH') or os.defpath}"})
        # The tool waits for Enter after each host's commands; without a terminal sudo cannot prompt.
        done = subprocess.run(
            command, input="\n" * len(hosts), capture_output=True, text=True, timeout=CONFIG_S, env=there, start_new_session=True
        )
        if done.returncode or not file.exists():
            lines = (done.stderr or done.stdout).strip().splitlines()
            raise UsageError(
                f"mlx.distributed_config failed: {lines[-1] if lines else done.returncode}; check cables "
                "and Remote Login on the other Macs, or name cables with --cable"
            )
        said = done.stdout.replace("Enter to continue", "")
        commands, text = topology.readdress(said, file.read_text(), topology.networks_of(machines))
    print(commands, file=sys.stderr)
    data: JsonObject = json.loads(text)
    return data


def pair_with(address: str, port: int, code: str | None) -> str:
    """Pair with the agent whose session port is `port`, and return its name. Raises UsageError."""
    trust = Trust("head")
    hello = PairHello(checked_name(socket.gethostname().split(".")[0] or "head"), trust.identity().public)
    with closing(PairingLink(address, port + 1)) as link:
        agent = link.ask(hello, PairIdentity)
        name = checked_name(agent.name)
        head = HeadSide(code or _asked_for(name), hello, agent)
        element = link.ask(head.start(), PairElement)
        head.check(link.ask(head.confirm(element), PairProof))
    trust.add(name, Peer(agent.public, f"{address}:{port}"))
    return name


def _tell(what: str) -> None:
    """Tell somebody at a terminal what takes seconds."""
    if sys.stderr.isatty():
        print(f"{what} ...", file=sys.stderr)


def _asked_for(name: str) -> str:
    if not sys.stdin.isatty():
        return sys.stdin.readline().strip()
    return input(f"code that {name} shows: ").strip()


_GIB = 2**30
_FIND_S, _MOST_S = 3.0, 60.0


def run(arguments: argparse.Namespace) -> int:
    """Run the chosen action. Raises UsageError."""
    seconds = getattr(arguments, "timeout", 1.0)
    if not 0 < seconds <= _MOST_S:
        raise ConfigError(f"--timeout {seconds:g}: must be above 0 and at most {_MOST_S:g} seconds", param="timeout")
    if arguments.action == "find":
        return _find(seconds, as_json=arguments.json)
    if arguments.action == "pair":
        return _pair(arguments.agent, arguments.code, seconds)
    if arguments.action == "forget":
        Trust("head").forget(arguments.agent)
        print(
            f"{arguments.agent} is forgotten here; on that machine, `tandem agent --forget "
            f"{socket.gethostname().split('.')[0]}` does its part"
        )
        return 0
    return write(arguments)


def _find(seconds: float, *, as_json: bool) -> int:
    agents, paired = find(seconds), Trust("head").peers()
    with ThreadPoolExecutor(max_workers=8) as pool:
        answering = list(pool.map(_answering, agents))
    for agent, address in zip(list(agents), answering, strict=True):
        if not address:
            agents.remove(agent)
            name = printable(agent.name)
            print(f"{name} is announced, but does not answer: it is off or cut off, or has a firewall", file=sys.stderr)
    _follow(agents, paired)
    texts = ("chip", "system", "links", "version")
    rows = [
        {"name": agent.name, "addresses": list(agent.addresses), "port": agent.port}
        | {name: agent.facts.get(name, "") for name in texts}
        | {"memory_bytes": _number(agent.facts.get("memory", "")), "paired": _is_paired(agent, paired)}
        for agent in agents
    ]
    if as_json:
        print(json.dumps(rows, indent=2))
        return 0
    if not rows:
        print(f"no agent answered within {seconds:g} s; run `tandem agent` on each machine, on this local network")
        if sys.platform == "darwin":
            print(f"if they run: {LOCAL_NETWORK}")
        return 0
    table = Table("name", "address", "memory", "chip", "system", "links", "tandem", "paired", box=None)
    for row, agent in zip(rows, agents, strict=True):
        memory, others = f"{_number(agent.facts.get('memory', '')) / _GIB:.0f} GiB", [str(row[name]) for name in texts]
        table.add_row(agent.name, ", ".join(agent.addresses), memory, *others, "yes" if row["paired"] else "no")
    screen(highlight=False, markup=False).print(table)
    return 0


def _follow(agents: list[Found], paired: dict[str, Peer]) -> None:
    """Store the current addresses of paired agents. A forged announcement is harmless: sessions authenticate by keys."""
    for agent in agents:
        if _is_paired(agent, paired) and agent.addresses:
            address = f"{reachable(agent)}:{agent.port}"
            if address != paired[agent.name].address:
                Trust("head").add(agent.name, Peer(paired[agent.name].public, address))


def _number(text: str) -> int:
    return int(text) if text.isdecimal() and text.isascii() and len(text) < 20 else 0


def _is_paired(agent: Found, paired: dict[str, Peer]) -> bool:
    return agent.name in paired and paired[agent.name].public == agent.facts.get("public")


def _pair(target: str, code: str | None, seconds: float) -> int:
    address, port = _locate(target, seconds)
    name = pair_with(address, port, code)
    print(f"paired with {name}: use it as agent:{name} in a hosts file, or `tandem hosts write`")
    return 0


def _locate(target: str, seconds: float) -> tuple[str, int]:
    """Return address and session port of an agent, given by its name on the network or its address. Raises UsageError."""
    host, colon, port = target.partition(":")
    numeric = host.replace(".", "").isdecimal()
    if (colon and not (port.isdecimal() and 0 < int(port) < 65535)) or not (numeric or NAME.fullmatch(host)):
        raise ConfigError(f"{target}: is not NAME, IP or IP:PORT", param="agent")
    if numeric:
        return host, int(port or PORT)
    _tell(f"looking for {host} on this network")
    agent = next((agent for agent in find(seconds) if agent.name == host and agent.addresses), None)
    if agent is None:
        raise UsageError(
            f"no agent {host} answered within {seconds:g} s; `tandem hosts find` lists those that do, or name its address",
            param="agent",
        )
    return reachable(agent), agent.port


def reachable(agent: Found) -> str:
    """Return the agent's first address that accepts a connection, else its first address."""
    return _answering(agent) or agent.addresses[0]


def _answering(agent: Found) -> str:
    """Return the agent's first address that accepts a connection; empty if none does.

    The pairing port is tried, whose callers need no key.
    """
    port = min(_number(agent.facts.get("pair_port", "")) or agent.port + 1, 65535)
    return next((address for address in agent.addresses if refusal(address, port, 1.0) is None), "")
