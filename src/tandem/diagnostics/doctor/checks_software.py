"""Checks of installed packages, copies of the model, and memory. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from tandem.diagnostics.doctor.evidence import Evidence, Findings, PlannedMemory
from tandem.diagnostics.doctor.model_files import is_hub_id
from tandem.diagnostics.doctor.parsing import available_bytes
from tandem.diagnostics.doctor.probe_messages import ModelFacts
from tandem.launchers.agent.link import agent_name
from tandem.launchers.ssh import same_tandem
from tandem.system.origin import PACKAGE

GIB = 2**30
INSTALL = {"tandem": PACKAGE, "mlx": "mlx", "mlx-lm": "mlx-lm"}


def versions(evidence: Evidence, findings: Findings) -> str:
    """Check that Python (minor version), mlx, mlx-lm and Tandem have the same version on all hosts."""
    for package in ("python", "mlx", "mlx-lm", "tandem"):
        of = {name: _shown(package, facts.versions.get(package)) for name, facts in evidence.facts.items()}
        installed = Counter(version for version in of.values() if version is not None)
        wanted = of.get(evidence.here) or next((version for version, _ in installed.most_common(1)), None)
        for name, version in of.items():
            if version is None:
                findings.fail(name, f"{package} is not installed", _install(evidence, name, package, wanted))
            elif wanted is not None and version != wanted:
                source = evidence.host_with(of, wanted)
                findings.fail(name, f"{package} is {version}, on {source} {wanted}", _install(evidence, name, package, wanted))
    ours = evidence.facts.get(evidence.here)
    for name, facts in evidence.facts.items():
        same = ours is not None and facts.versions.get("tandem") == ours.versions.get("tandem")
        if ours and same and ours.build and facts.build not in ("", ours.build):
            problem = f"tandem has the same version as on {evidence.here}, but other code: another commit, or changes of its own"
            findings.warn(name, problem, same_tandem(name, facts.executable))
        if facts.outputs.get("translated", "").strip() == "1":
            problem = "its Python is one for Intel, run by Rosetta: MLX needs one for Apple silicon"
            remedy = evidence.on(name, "uv python install cpython-3.12-macos-aarch64-none")
            findings.fail(name, problem, f"{remedy}   (then make the environment anew with it)")
    first = next(iter(evidence.facts.values())).versions
    return ", ".join(f"{name} {value}" for name, value in first.items())


def _shown(package: str, version: str | None) -> str | None:
    """Return the part of a version that must agree: for Python, major and minor."""
    return version if package != "python" or version is None else ".".join(version.split(".")[:2])


def _install(evidence: Evidence, name: str, package: str, wanted: str | None) -> str:
    python = evidence.facts[name].executable
    if package == "python":
        return f"make the environment on {name} with Python {wanted}: uv venv --python {wanted}"
    if package == "tandem" and name != evidence.here:
        return same_tandem(name, python)
    requirement = INSTALL[package] if wanted is None else f"{INSTALL[package]}=={wanted}"
    return evidence.on(name, f"{python} -m pip install '{requirement}'")


def model(evidence: Evidence, findings: Findings) -> str:
    """Check that every machine has a complete and identical copy of the model."""
    if evidence.model is None:
        findings.add("skip", "", "no model was named", "tandem doctor --model MODEL")
        return ""
    copies = {name: facts.model for name, facts in evidence.facts.items() if facts.model is not None}
    whole = {name: copy for name, copy in copies.items() if copy.path and not copy.problem}
    for name, copy in copies.items():
        if name not in whole:
            _absent(evidence, evidence.model, name, copy, findings, elsewhere=bool(whole))
    _different(evidence, whole, findings)
    size = max((copy.bytes for copy in whole.values()), default=0)
    return f"{evidence.model}: {size / GIB:.2f} GiB, the same on {len(whole)} machine(s)"


def _absent(evidence: Evidence, named: str, name: str, copy: ModelFacts, findings: Findings, *, elsewhere: bool) -> None:
    detail = copy.problem or f"{named} is not there"
    if evidence.weights_from_head and name != evidence.here:
        findings.add("ok", name, f"{detail}; it gets its part from {evidence.here}")
    elif (on_demand := is_hub_id(named) or named == "demo") and elsewhere and copy.path is None:
        findings.add("ok", name, f"{named} is not there yet; what it needs of it is fetched when serving starts")
    elif on_demand:
        findings.warn(name, detail, evidence.on(name, f"tandem model get {named}"))
    else:
        findings.fail(name, detail, _copy(evidence, name))


def _different(evidence: Evidence, copies: Mapping[str, ModelFacts], findings: Findings) -> None:
    """Report copies that differ from this machine's or, without one here, from the most common."""
    if not copies:
        return
    common = Counter(tuple(sorted(copy.digests.items())) for copy in copies.values()).most_common(1)[0][0]
    wanted = copies[evidence.here].digests if evidence.here in copies else dict(common)
    for name, copy in copies.items():
        names = sorted(key for key in wanted.keys() | copy.digests.keys() if wanted.get(key) != copy.digests.get(key))
        if names:
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            findings.fail(name, f"its copy differs: {shown}", _copy(evidence, name))


def _copy(evidence: Evidence, name: str) -> str:
    if name == evidence.here:
        return f"tandem model list   (name a model that is on {name})"
    here = evidence.facts.get(evidence.here)
    source = here.model.path if here and here.model and here.model.path else evidence.model
    if (agent := agent_name(name)) is not None:
        return f"copy {source} to the same path on {agent}, or serve with --weights-from head"
    target = str(source).removeprefix(f"{Path.home()}/")  # a relative one is below the home directory there
    return f"rsync -a {source}/ {name}:{target}/   (or serve with --weights-from head)"


def memory(evidence: Evidence, findings: Findings) -> str:
    """Check that every machine has the memory that the layout needs, and that it is free."""
    planned = evidence.planned
    if not isinstance(planned, PlannedMemory):
        findings.add("skip", "", planned or "no model was named, so there is nothing to plan for")
        return ""
    for name, need in planned.needs.items():
        free = available_bytes(evidence.facts[name])
        text = f"{planned.label} needs {need.needed / GIB:.2f} GiB"
        if need.needed > need.budget:
            remedy = planned.command + (f"   ({planned.remedies[0]})" if planned.remedies else "")
            findings.fail(name, f"{text}, may use {need.budget / GIB:.2f} GiB", remedy)
        elif need.needed > free and evidence.own_port is None:
            remedy = evidence.on(name, "ps -axo rss,comm | sort -rn | head") + "   (end what you can)"
            findings.warn(name, f"{text}, {free / GIB:.2f} GiB are free just now", remedy)
    most = max(need.needed / need.budget for need in planned.needs.values())
    return f"{planned.label} needs at most {most:.0%} of what a machine may use"
