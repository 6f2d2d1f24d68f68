"""`tandem agent`: node agent of this machine, which starts ranks for paired heads."""

from __future__ import annotations

import argparse
import signal
import socket
from contextlib import closing, nullcontext

from tandem.cli.arguments import say
from tandem.diagnostics.doctor.facts import gather
from tandem.diagnostics.doctor.parsing import interfaces
from tandem.diagnostics.doctor.probe_messages import GatherFacts
from tandem.diagnostics.doctor.topology import physical
from tandem.errors import ConfigError
from tandem.launchers.agent.agent_server import Agent
from tandem.launchers.agent.discovery import Announcement
from tandem.launchers.agent.pairing import ATTEMPTS, LIFE_S
from tandem.launchers.agent.trust import Trust, checked_name
from tandem.launchers.hostfile import is_ipv4
from tandem.log import set_up
from tandem.version import __version__

MOST_CODES = 6
"""Limit of the codes that are shown one after another; a forgotten agent then admits nobody."""


def run(arguments: argparse.Namespace) -> int:
    """Run the agent until a signal, or with --forget unpair a head. Raises UsageError."""
    trust = Trust("agent")
    if arguments.forget:
        trust.forget(arguments.forget)
        print(f"{arguments.forget} may not run anything here any more; what runs there for it is ended")
        return 0
    name = checked_name(arguments.name or socket.gethostname().split(".")[0])
    if not 0 <= arguments.port < 65535:
        raise ConfigError(f"--port {arguments.port}: must be from 0 (any free ones) to 65534", param="port")
    if arguments.page is not None and not 0 <= arguments.page <= 65535:
        raise ConfigError(f"--page {arguments.page}: must be from 0 (a free one) to 65535", param="page")
    if not is_ipv4(arguments.host):
        raise ConfigError(f"--host {arguments.host}: must be an IPv4 address of this machine", param="host")
    set_up(log_format=arguments.log_format)
    agent = Agent(name, trust, host=arguments.host, port=arguments.port)
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: signals.append(number))
    with closing(agent), nullcontext() if arguments.no_announce else _announcement(agent, arguments.host):
        shown = _say(agent, trust, pair=arguments.pair)
        if arguments.page is not None:
            from tandem.cli.hosts.page import start_page  # brings FastAPI, which an agent has no use for

            say(f"page: {start_page(agent.name, arguments.page)}   (for this machine's browsers alone)")
        agent.serve(until=lambda: _ends(agent, shown, signals))
        say("Stopping: what runs here for other machines ends too")
    say("Stopped")
    return 0


def _say(agent: Agent, trust: Trust, *, pair: bool) -> list[str]:
    """Print the ports and the paired heads, and a pairing code if no head is paired yet. Return the codes shown."""
    names = ", ".join(paired := trust.peers()) or "nobody"
    say(f"agent {agent.name} listens on ports {agent.port} and {agent.pair_port} (pairing); paired with: {names}")
    return [_show_code(agent)] if pair or not paired else []


def _show_code(agent: Agent) -> str:
    """Print a new pairing code, and return it."""
    code = agent.pairing.open()
    say(
        f"code {code[:3]} {code[3:]}: type it where the other machine asks (`tandem hosts pair {agent.name}`, or "
        f"`tandem hosts write`); good for {LIFE_S / 60:.0f} minutes and {ATTEMPTS} attempts"
    )
    return code


def _ends(agent: Agent, shown: list[str], signals: list[int]) -> bool:
    """Return True after a signal. Print a new code when the last of `shown` has expired, unless it was guessed at or
    `MOST_CODES` were shown."""
    if not shown or not agent.pairing.is_over:
        return bool(signals)
    if agent.pairing.attempts_left == ATTEMPTS and len(shown) < MOST_CODES:
        say(f"The code is no longer good, since {LIFE_S / 60:.0f} minutes have passed; here is a new one:")
        shown.append(_show_code(agent))
    else:
        say("The code is no longer good; for a new one end this (Ctrl-C), and run it again with --pair")
        shown.clear()
    return False


def _announcement(agent: Agent, host: str) -> Announcement:
    facts = gather(GatherFacts())
    links = [(there.name, network, there.kind) for there in physical(interfaces(facts)) for network in there.networks]
    addresses = [str(network.ip) for _, network, _ in links] if host == "0.0.0.0" else [host]
    return Announcement(
        agent.name,
        agent.port,
        {
            "public": agent.public,
            "pair_port": str(agent.pair_port),
            "chip": facts.chip,
            "system": facts.system,
            "memory": str(facts.memory_bytes),
            "version": __version__,
            "links": ", ".join(f"{name} {network} {kind}".strip() for name, network, kind in links),
        },
        addresses,
    )
