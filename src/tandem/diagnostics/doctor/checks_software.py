"""Checks of what is installed and of the model's copies. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from tandem.diagnostics.doctor.evidence import Evidence, Finding, Planned, alike
from tandem.diagnostics.doctor.messages import ModelFacts
from tandem.diagnostics.doctor.model_files import is_hub_id
from tandem.diagnostics.doctor.parsing import available_bytes
from tandem.system.origin import PACKAGE, install_command

GIB = 2**30
INSTALL = {"tandem": PACKAGE, "mlx": "mlx", "mlx-lm": "mlx-lm"}


def versions(evidence: Evidence) -> list[Finding]:
    """Python, mlx, mlx-lm and Tandem are the same everywhere (Python to its minor version)."""
    found = []
    for package in ("python", "mlx", "mlx-lm", "tandem"):
        of = {name: _shown(package, facts.versions.get(package)) for name, facts in evidence.facts.items()}
        wanted = of.get(evidence.here) or _most_common(of)
        for name, one in of.items():
            if one is None:
                found.append(Finding("versions", "fail", name, f"{package} is not installed",
                                     _install(evidence, name, package, wanted)))
            elif one != wanted:
                found.append(Finding("versions", "fail", name, f"{package} is {one}, on {evidence.here} {wanted}",
                                     _install(evidence, name, package, wanted)))
    found += [Finding("versions", "fail", name, "its Python is one for Intel, run by Rosetta: MLX needs one for Apple "
                      "silicon", on(evidence, name, "uv python install cpython-3.12-macos-aarch64-none")
                      + "   (then make the environment anew with it)")
              for name, facts in evidence.facts.items() if facts.outputs.get("translated", "").strip() == "1"]
    first = next(iter(evidence.facts.values())).versions
    return alike("versions", found, ", ".join(f"{name} {value}" for name, value in first.items()))


def _shown(package: str, version: str | None) -> str | None:
    """Python 3.11.4 and 3.11.9 work together."""
    return version if package != "python" or version is None else ".".join(version.split(".")[:2])


def _most_common(of: Mapping[str, str | None]) -> str | None:
    return Counter(of.values()).most_common(1)[0][0]


def _install(evidence: Evidence, name: str, package: str, wanted: str | None) -> str:
    python = evidence.facts[name].executable
    if package == "python":
        return f"make the environment on {name} with Python {wanted}: uv venv --python {wanted}"
    if package == "tandem" and name != evidence.here:
        return install_command(python, name)
    return on(evidence, name, f"{python} -m pip install '{INSTALL[package]}=={wanted}'")


def on(evidence: Evidence, name: str, command: str) -> str:
    """The command as one types it on this machine."""
    return command if name == evidence.here else f"ssh {name} {_quoted(command)}"


def _quoted(command: str) -> str:
    return '"' + command.replace('"', '\\"') + '"'


def model(evidence: Evidence) -> list[Finding]:
    """Every machine has the model, whole, and the same."""
    if evidence.model is None:
        return [Finding("model", "skip", "", "no model was named", "tandem doctor --model MODEL")]
    copies = {name: facts.model for name, facts in evidence.facts.items() if facts.model is not None}
    found = [one for name, copy in copies.items() if (one := _absent(evidence, name, copy)) is not None]
    whole = {name: copy for name, copy in copies.items() if copy.path and not copy.problem}
    found += _different(evidence, whole)
    size = max((copy.bytes for copy in whole.values()), default=0)
    return alike("model", found, f"{evidence.model}: {size / GIB:.2f} GiB, the same on {len(whole)} machine(s)")


def _absent(evidence: Evidence, name: str, copy: ModelFacts) -> Finding | None:
    if copy.path and not copy.problem:
        return None
    detail = copy.problem or f"{evidence.model} is not there"
    assert evidence.model is not None
    if evidence.weights_from_head and name != evidence.here:
        return Finding("model", "ok", name, f"{detail}; it gets its part from {evidence.here}")
    if is_hub_id(evidence.model) or evidence.model == "demo":
        fetch = on(evidence, name, f"tandem model get {evidence.model}")  # a hub model comes by itself, if slowly
        return Finding("model", "warn" if is_hub_id(evidence.model) else "fail", name, detail, fetch)
    return Finding("model", "fail", name, detail, _copy(evidence, name))


def _different(evidence: Evidence, copies: Mapping[str, ModelFacts]) -> list[Finding]:
    """Copies that are not like this machine's, or not like most."""
    if not copies:
        return []
    common = Counter(tuple(sorted(copy.digests.items())) for copy in copies.values()).most_common(1)[0][0]
    wanted = copies[evidence.here].digests if evidence.here in copies else dict(common)
    found = []
    for name, copy in copies.items():
        names = sorted(key for key in wanted.keys() | copy.digests.keys() if wanted.get(key) != copy.digests.get(key))
        if names:
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            found.append(Finding("model", "fail", name, f"its copy differs: {shown}", _copy(evidence, name)))
    return found


def _copy(evidence: Evidence, name: str) -> str:
    source = next((facts.model.path for facts in (evidence.facts.get(evidence.here),)
                   if facts is not None and facts.model is not None and facts.model.path), evidence.model)
    if name == evidence.here:
        return f"name a model that is on {name}"
    return f"rsync -a {source}/ {name}:{source}/   (or serve with --weights-from head)"


def memory(evidence: Evidence) -> list[Finding]:
    """Every machine has the memory that the layout asks of it, and has it free."""
    planned = evidence.planned
    if not isinstance(planned, Planned):
        return [Finding("memory", "skip", "", planned or "no model was named, so there is nothing to plan for")]
    found = []
    for name, need in planned.needs.items():
        free = available_bytes(evidence.facts[name])
        text = f"{planned.label} needs {need.needed / GIB:.2f} GiB"
        if need.needed > need.budget:
            remedy = planned.command + (f"   ({planned.remedies[0]})" if planned.remedies else "")
            found.append(Finding("memory", "fail", name, f"{text}, may use {need.budget / GIB:.2f} GiB", remedy))
        elif need.needed > free:
            found.append(Finding("memory", "warn", name, f"{text}, {free / GIB:.2f} GiB are free just now",
                                 on(evidence, name, "ps -axo rss,comm | sort -rn | head") + "   (end what you can)"))
    most = max(need.needed / need.budget for need in planned.needs.values())
    return alike("memory", found, f"{planned.label}: at most {most:.0%} of what a machine may use")
