"""`tandem hosts write`: a hosts file with addresses that all machines can use."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tandem.doctor.messages import Facts, GatherFacts
from tandem.doctor.parsing import Interface, interfaces
from tandem.doctor.session import ProbeLink, ProbeLost, local_probe, remote_probe
from tandem.doctor.topology import address_cables, choose_addresses, networks_of, parse_cable, readdress
from tandem.errors import ConfigError, UsageError
from tandem.launchers.agent.link import PREFIX
from tandem.launchers.agent.trust import Trust
from tandem.launchers.hostfile import LOCAL_NAMES, read_hostfile
from tandem.processes.interpreter import code_command

GATHER_S = 60.0
CONFIG_S = 300.0


def write(arguments: argparse.Namespace) -> int:
    """Ask the machines, and write. Raises UsageError."""
    hosts = list(arguments.hosts) or [PREFIX + name for name in Trust("head").peers()]
    if not hosts:
        raise UsageError("no hosts are named, and no agent is paired; name ssh destinations, or `tandem hosts pair` "
                         "first", param="hosts")
    if len(set(hosts)) < len(hosts):
        raise ConfigError(f"a host is named twice: {', '.join(hosts)}; add entries for further ranks by hand",
                          param="hosts")
    facts = _gather(hosts)
    machines = {name: interfaces(one) for name, one in facts.items()}
    if arguments.over is not None:
        text = _from_mlx(arguments, hosts, facts, machines)
    else:
        text = _own(arguments, hosts, facts, machines)
    if arguments.file == "-":
        print(text)
        return 0
    Path(arguments.file).write_text(text + "\n", encoding="utf-8")
    read_hostfile(arguments.file, "hosts write")
    print(f"{arguments.file} is written for {len(hosts)} host(s); next: tandem doctor --hostfile {arguments.file}",
          file=sys.stderr)
    return 0


def _gather(hosts: Sequence[str]) -> dict[str, Facts]:
    """Facts of every host. Raises UsageError naming one that does not answer."""
    def ask(name: str) -> Facts:
        link = ProbeLink(name, local_probe() if name in LOCAL_NAMES else remote_probe(name))
        try:
            reply = link.ask(GatherFacts(), GATHER_S)
        except ProbeLost as error:
            raise UsageError(f"{name}: {error.message}" + (f"; {error.remedy}" if error.remedy else "")) from None
        finally:
            link.close()
        assert isinstance(reply, Facts)
        return reply

    with ThreadPoolExecutor(max_workers=len(hosts)) as pool:
        return dict(zip(hosts, pool.map(ask, hosts), strict=True))


def _own(arguments: argparse.Namespace, hosts: Sequence[str], facts: Mapping[str, Facts],
         machines: Mapping[str, list[Interface]]) -> str:
    """Addresses that are there, or that are chosen for cables."""
    cables = address_cables([parse_cable(text, hosts) for text in arguments.cable], machines)
    for name, ends in cables.items():
        print(f"# on {name}:", file=sys.stderr)
        for interface, address in ends:
            mac = facts[name].system == "Darwin"
            print(f"sudo ifconfig {interface} inet {address.ip} netmask {address.netmask}" if mac else
                  f"sudo ip addr add {address} dev {interface} && sudo ip link set {interface} up", file=sys.stderr)
    future = {name: [*found, *(Interface(interface, [address], point_to_point=True)
                               for interface, address in cables.get(name, []))] for name, found in machines.items()}
    addresses = choose_addresses(hosts, future)
    entries = [{"ssh": name, "ips": [addresses[name]]} for name in hosts]
    return json.dumps({**({"backend": arguments.backend} if arguments.backend else {}), "hosts": entries}, indent=2)


def _from_mlx(arguments: argparse.Namespace, hosts: Sequence[str], facts: Mapping[str, Facts],
              machines: Mapping[str, list[Interface]]) -> str:
    """MLX's own tool, which knows what is plugged where on Macs; with subnets that clash with nothing."""
    if others := [name for name, one in facts.items() if one.system != "Darwin"]:
        raise UsageError(f"--over is for Macs; not one: {', '.join(others)}", param="over")
    if agents := [name for name in hosts if name.startswith(PREFIX)]:
        raise UsageError(f"--over works over ssh, which mlx.distributed_config needs; not by ssh: {', '.join(agents)}",
                         param="over")
    with tempfile.TemporaryDirectory(prefix="tandem-hosts-") as directory:
        file = Path(directory) / "hosts.json"
        command = code_command("from mlx._distributed_utils.config import main; main()", "--hosts", ",".join(hosts),
                               "--over", arguments.over, "--no-auto-setup", "--output-hostfile", str(file),
                               *(["--backend", arguments.backend] if arguments.backend else []))
        # It waits for Enter after the commands for each host.
        done = subprocess.run(command, input="\n" * len(hosts), capture_output=True, text=True, timeout=CONFIG_S)
        if done.returncode or not file.exists():
            lines = (done.stderr or done.stdout).strip().splitlines()
            raise UsageError(f"mlx.distributed_config failed: {lines[-1] if lines else done.returncode}")
        said = done.stdout.replace("Enter to continue", "")
        commands, text = readdress(said, file.read_text(), networks_of(machines))
    print(commands, file=sys.stderr)
    return text
