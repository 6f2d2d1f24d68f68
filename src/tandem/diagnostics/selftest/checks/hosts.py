"""Checks over the machines of a hosts file: doctor, links, layouts, and killed ranks."""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import cast

from tandem.checkpoints.resolve import resolve
from tandem.diagnostics.collectives.measure import HostsBench, profile_of
from tandem.diagnostics.doctor.checks_apple import described
from tandem.diagnostics.doctor.evidence import Evidence, Finding
from tandem.diagnostics.doctor.examine import Question, examine, findings, hostfile_hosts
from tandem.diagnostics.doctor.probe_messages import Facts
from tandem.diagnostics.selftest.check import Differs, NotApplicable, judged
from tandem.diagnostics.selftest.checks.faults import RANDOM_TOKENS
from tandem.diagnostics.selftest.checks.single import agreed, scored
from tandem.diagnostics.selftest.report import PROFILE
from tandem.diagnostics.selftest.server import Server, all_under_way, ask, descendants, prompt_of, rates, seconds, serving, until
from tandem.diagnostics.tasks import Figures, Task
from tandem.errors import LayoutError, OutOfMemory
from tandem.launchers.hostfile import Hostfile, read_hostfile
from tandem.models.description import describe
from tandem.planner.hosts import Hosts, cluster_of, nominal_machine
from tandem.planner.plan import plan
from tandem.planner.presets import planned_files
from tandem.planner.profile import Backend, encode_profile, read_profile
from tandem.planner.types import ManualLayout, Prediction, Request
from tandem.system.files import write_private

START_S, BACK_S = 1800.0, 600.0
"""Seconds until a model of any size serves, and until it does again."""
PAIR_S = 300.0
"""Seconds until two machines have timed one another, or one has timed its steps."""
TOKENS = 64
MOST = 4096
"""Most tokens of a timed answer, which ends earlier."""
DEATHS = 3
STAGES, SHARED = "stages", "tensor parallelism"
SHORTEST, BATCHES = 24, (1, 4)
SIZES, ROUNDS = [4096, 65536, 1 << 20], 50


def doctor(task: Task) -> Figures:
    """Check that the doctor finds no fault between the machines; report the speed of each link."""
    evidence = _examined(task, None)
    figures: Figures = {}
    number = _numbers(evidence)
    for name, row in number.items():
        if facts := evidence.facts.get(name):
            figures |= {f"{row}: {column}": value for column, value in _description(name, facts).items()}
    for (source, target), link in evidence.links.items():
        if link.bandwidth:
            row = f"{number.get(source, 'this machine')} to {number.get(target, 'this machine')}"
            figures[f"{row}: MB/s"] = round(link.bandwidth / 1e6)
            figures[f"{row}: latency, us"] = round(1e6 * link.latency_s)
    problems = []
    for finding in findings(evidence):
        if finding.verdict == "warn":
            name = f"warning: {finding.check}"
            figures[name] = "; ".join([*([str(figures[name])] if name in figures else []), _of_whom(finding, evidence)])
        elif finding.verdict == "fail":
            problems.append(f"{finding.check}: {_of_whom(finding, evidence)}")
    if problems:
        raise Differs(f"nothing wrong, expected; {'; '.join(problems)}, seen", figures)
    return figures


def _description(name: str, facts: Facts) -> dict[str, str]:
    """Return what a report says of a machine."""
    told, mac = described(name, facts), facts.system == "Darwin"
    version = f"macOS {told['macos']} ({told['build']})" if mac else f"{facts.system} {told['macos'].partition('-')[0]}"
    versions = ", ".join(f"{package} {version}" for package, version in facts.versions.items())
    columns = {column: told[column] for column in ("ports", "cables", "fence")} if mac else {}
    memory = f"{facts.memory_bytes / 2**30:.1f} GiB"
    return {"chip": facts.chip, "memory": memory, "system": version, **columns, "versions": versions}


def _numbers(evidence: Evidence) -> dict[str, str]:
    """Return `machine 1`, `machine 2`, ... by the name of the machine."""
    return {host.name: f"machine {index}" for index, host in enumerate(evidence.carriers, 1)}


def _of_whom(finding: Finding, evidence: Evidence) -> str:
    """Return a finding's detail, prefixed with the machine, without host names that only the machines themselves know."""
    where, detail = finding.where, finding.detail
    text = f"{where}: {detail}" if where and where not in detail else detail
    for name, row in _numbers(evidence).items():
        if (facts := evidence.facts.get(name)) and facts.hostname:
            text = re.sub(rf"(?<![\w.-]){re.escape(facts.hostname.partition('.')[0])}(?:\.[\w-]+)*(?![\w-])", row, text)
    return text


def _examined(task: Task, backend: str | None) -> Evidence:
    file = read_hostfile(task.hostfile)
    return examine(
        Question(hosts=hostfile_hosts(file), backend=backend or file.backend or "ring", variables=dict(file.envs), port=0)
    )


def links(task: Task) -> Figures:
    """Check sums over all machines with the ring backend and, where the hosts file has RDMA devices, jaccl."""
    (Path(task.directory) / PROFILE).unlink(missing_ok=True)
    figures: Figures = {}
    problems = []
    for backend in ("ring", *(["jaccl"] if _has_rdma(read_hostfile(task.hostfile)) else [])):
        evidence = _examined(task, backend)
        sums = evidence.collected
        if not sums or any(times.error for times in sums.values()):
            errors = [f"{name}: {times.error}" for name, times in sums.items() if times.error]
            errors += [_of_whom(finding, evidence) for finding in findings(evidence) if finding.verdict == "fail"]
            errors += ["the doctor left it out"]
            problems.append(f"sums over {backend}, expected; {errors[0]}, seen")
            continue
        for size, latency in next(iter(sums.values())).latency_s.items():
            figures[f"{backend}: all_sum of {int(size) >> 10} KiB, us"] = round(1e6 * latency)
    judged(problems, figures)
    if task.options:
        _write_profile(task, fast=False)
    return figures


def _write_profile(task: Task, *, fast: bool) -> None:
    """Time every pair of machines, and without `fast` fences every machine, as `tandem bench comm` does. Raises RankFailure."""
    file, path = read_hostfile(task.hostfile), Path(task.directory) / PROFILE
    backend = cast("Backend", "ring" if file.backend in (None, "any") else file.backend)
    with HostsBench(file, None, PAIR_S) as bench:
        ends = {(file.hosts[a].ssh, file.hosts[b].ssh): (a, b) for a, b in bench.pairs()}
        joined = {names: bench.joined(pair, backend, SIZES, ROUNDS, fast) for names, pair in ends.items()}
        steps = {} if fast else {name: bench.steps(name) for name in bench.names}
    profile = profile_of(steps, joined, backend, fast)
    write_private(path, encode_profile(read_profile(str(path)).merged(profile) if fast else profile).encode())


def _has_rdma(file: Hostfile) -> bool:
    return any(any(device for device in host.rdma) for host in file.hosts)


def layouts(task: Task) -> Figures:
    """Check that stages and tensor parallelism over the machines answer like one machine; report the speed of each layout."""
    return _compared(task, fast=False)


def fast_fences(task: Task) -> Figures:
    """Check tensor parallelism over the machines with MLX's fast fences."""
    if task.options:
        _write_profile(task, fast=True)
    return _compared(task, fast=True)


def _compared(task: Task, *, fast: bool) -> Figures:
    """Serve with each layout that the plan does not rule out; compare the answers with the first one's. Raises Differs."""
    figures: Figures = {}
    problems = []
    expected, count = None, len(read_hostfile(task.hostfile).hosts)
    for stages in ((1,), *([] if fast else [(1,) * count]), (count,)):
        name = ("one machine" if stages == (1,) else SHARED if len(stages) == 1 else STAGES) + (", fast fences" if fast else "")
        if reason := _ruled_out(task, stages, fast=fast):
            figures[f"{name}: left out"] = reason
            continue
        with serving(task.model, "--prefix-cache", "0", *_options(task, stages, fast=fast), start_s=START_S) as server:
            answer = scored(server, prompt_of(SHORTEST), TOKENS)
            figures |= {} if fast and stages == (1,) else _speeds(task, name, stages, server, fast=fast)
        text, expected = answer.texts[-1], expected or answer
        if text != expected.texts[-1] and max(stages) == 1:
            problems.append(f"the answer of one rank from {name}, expected; another, seen")
        elif text != expected.texts[-1]:  # ranks that share layers add in another order, which may decide a tie
            figures[f"{name}: tokens that agree"] = agreed(expected, text)
    return judged(problems, figures)


def _options(task: Task, stages: tuple[int, ...], *, fast: bool = False) -> list[str]:
    """Return the options of `tandem serve` for stages of these numbers of machines."""
    if stages == (1,):
        return ["--executor", "cluster"]
    sizes = ["-tp", str(stages[0])] if len(stages) == 1 else ["-pp", str(len(stages))]
    return ["--hostfile", task.hostfile, "--weights-from", "head", *sizes, *(["--fast-sync", "auto"] if fast else [])]


def _ruled_out(task: Task, stages: tuple[int, ...], *, fast: bool = False) -> str:
    """Return why the plan rules a layout out; empty if it does not."""
    try:
        _planned(task, stages, context=SHORTEST, streams=1, fast=fast)
    except (LayoutError, OutOfMemory) as error:
        return error.message
    return ""


def _planned(task: Task, stages: tuple[int, ...], *, context: int, streams: int, fast: bool) -> dict[str, Prediction]:
    """Return what `tandem plan` predicts with nominal figures and with the measured profile; empty without a profile.

    Raises LayoutError, and NothingFits if a machine has too little memory.
    """
    path = Path(task.directory) / PROFILE
    profile = read_profile(str(path)) if path.exists() else None
    if profile is None or len(profile.hosts) < sum(stages):  # a machine with several ranks cannot be planned for
        return {}
    model, found = planned_files(resolve(task.model)), dict[str, Prediction]()
    request = Request(context=context, streams=streams, layouts=(ManualLayout(stages=stages),))
    hosts = Hosts(machines=list(map(nominal_machine, profile.hosts)), backend=profile.backend)
    links = ["thunderbolt5-rdma"] if profile.backend.startswith("jaccl") else []
    for words, measured in ((", plan", None), (", plan with profile", profile)):
        cluster = cluster_of(hosts, links, description=model.description, request=request, fast=fast, profile=measured)
        answer = plan(model.description, cluster.machines, cluster.links, request, experts=model.experts)
        if (prediction := answer.candidates[0].prediction) is not None:
            found[words] = prediction
    return found


def _speeds(task: Task, name: str, stages: tuple[int, ...], server: Server, *, fast: bool) -> Figures:
    """Return tokens a second by batch and prompt, beside what the plan predicts."""
    context = describe(resolve(task.model)).max_context
    lengths = dict.fromkeys(min(int(n), max(context - MOST, context // 2)) for n in task.options.get("prompts", [SHORTEST]))
    figures: Figures = {}
    for length, batch in product(lengths, BATCHES if task.options else (1,)):
        found = {"": rates(server, [prompt_of(length, seed) for seed in range(batch)], min(MOST, context - length))}
        with suppress(OutOfMemory):
            for words, one in _planned(task, stages, context=length + TOKENS, streams=batch, fast=fast).items():
                found[words] = one.tokens, one.prefill
        for index, unit in enumerate(("tokens/s", "prompt tokens/s")):
            figures |= {f"{name}, {batch} x {length}: {unit}{words}": round(x[index], 1) for words, x in found.items()}
    return figures


def deaths(task: Task) -> Figures:
    """Check that the rank group recovers from killing a rank under load, three times, over jaccl where there is RDMA."""
    file = read_hostfile(task.hostfile)
    backend = "jaccl" if _has_rdma(file) else "ring"
    count = len(file.hosts)
    stages = (1,) * count if _ruled_out(task, (count,)) else (count,)
    tokens = RANDOM_TOKENS if task.random else TOKENS
    options = (*_options(task, stages), "--backend", backend, "--max-restarts", "10")
    with serving(task.model, *options, start_s=START_S) as server:
        calm = ask(server, prompt_of(12), tokens).text
        figures: Figures = {"layout": STAGES if len(stages) > 1 else SHARED, "backend": backend}
        for number in range(1, DEATHS + 1):
            # A process id of another machine's rank may also exist here, for an unrelated process.
            victim = next((pid for pid in server.ranks() if pid in descendants(server.process.pid)), None)
            if victim is None:
                raise NotApplicable("no rank is on this machine; start it on one that the hosts file has as localhost")
            [answer] = all_under_way(server, [prompt_of(12)], tokens)
            began = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            if not until(lambda: server.health()["status"] == "healthy" and victim not in server.ranks(), BACK_S):  # noqa: B023 - at once
                raise Differs(f"ranks again within {BACK_S:g} s of death {number}, expected; none, seen", figures)
            figures[f"death {number}: ranks again after, s"] = seconds(began)
            if (done := answer.done()).text != calm:
                raise Differs(f"the same answer after death {number}, expected; another, seen", figures)
            figures[f"death {number}: pause of the answer, s"] = round(max(done.gaps, default=0.0), 2)
    return figures
