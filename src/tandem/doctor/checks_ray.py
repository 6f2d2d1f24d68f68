"""Checks of a Ray cluster, as it describes itself. Pure."""

from __future__ import annotations

from tandem.doctor.findings import Evidence, Finding, Host, alike
from tandem.errors import UsageError
from tandem.launchers.ray.nodes import UNIT, RayNode, check_addresses

RESTART = "ray stop -f, then ray start ... --node-ip-address=ADDRESS"


def cluster(evidence: Evidence) -> list[Finding]:
    """Every node is there at the address that it advertises, and some carry ranks."""
    nodes = evidence.ray
    if nodes is None:
        return [Finding("ray", "skip", "", "--ray looks at a Ray cluster")]
    found = [Finding("ray", "fail", one.address, one.trouble, RESTART) for one in nodes if one.trouble]
    there = [one for one in nodes if not one.trouble]
    try:
        check_addresses(there, there[0].address if there else "")
    except UsageError as error:
        found.append(Finding("ray", "fail", "", error.message, RESTART))
    units = sum(one.units(one.total) for one in there)
    start = f"ray stop -f, then ray start ... --resources='{{\"{UNIT}\": 1}}'"
    for one in there:
        if not one.bundle:
            found.append(Finding("ray", "warn" if units else "fail", one.address, f"no `{UNIT}` resource, so no rank",
                                 f"on {one.address}: {start}"))
    free = sum(one.units(one.free) for one in there)
    return alike("ray", found, f"{len(nodes)} node(s), {units} device(s) for ranks, {free} of them free")


def hosts_of(nodes: list[RayNode], commands: dict[str, tuple[str, ...]]) -> list[Host]:
    """The machines of a cluster's nodes; `commands` start a probe, by node id."""
    hosts: dict[str, Host] = {}
    for one in nodes:
        if not one.trouble and one.address not in hosts:
            hosts[one.address] = Host(one.address, one.address, ranks=one.units(one.total),
                                      command=commands[one.node_id])
    return list(hosts.values())
