"""Functions for `DoctorCheck.looked`: the hosts that a check has facts about. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection

from tandem.diagnostics.doctor.evidence import Evidence
from tandem.diagnostics.doctor.probe_messages import Facts


def answered(evidence: Evidence) -> Collection[str]:
    """Return the hosts that answered."""
    return evidence.facts.keys()


def having(known: Callable[[Facts], object]) -> Callable[[Evidence], Collection[str]]:
    """Return a function that returns the hosts for whose facts `known` is true."""
    return lambda evidence: [name for name, facts in evidence.facts.items() if known(facts)]


def linked(evidence: Evidence) -> Collection[str]:
    """Return the hosts between which connections were tried."""
    return {name for ends in evidence.links for name in ends}


def read_on_macs(*names: str) -> Callable[[Evidence], Collection[str]]:
    """Return a function that returns the hosts that answered, except Macs that lack the output of any of `names`.

    The function returns none if all Macs lack one.
    """

    def looked(evidence: Evidence) -> Collection[str]:
        silent = {mac for mac, facts in evidence.macs.items() if any(not facts.outputs.get(name) for name in names)}
        return evidence.facts.keys() - silent if len(silent) < len(evidence.macs) else ()

    return looked
