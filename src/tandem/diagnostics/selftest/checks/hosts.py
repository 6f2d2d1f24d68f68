"""Checks over the machines of a hosts file: doctor, links, layouts, and killed ranks."""

from __future__ import annotations

import os
import signal
import time

from tandem.diagnostics.doctor.evidence import Evidence, Finding
from tandem.diagnostics.doctor.examine import Question, examine, findings, hostfile_hosts
from tandem.diagnostics.selftest.check import Differs, NotApplicable, judged
from tandem.diagnostics.selftest.checks.faults import RANDOM_TOKENS
from tandem.diagnostics.selftest.server import Server, all_under_way, ask, descendants, prompt_of, seconds, serving, until
from tandem.diagnostics.tasks import Figures, Task
from tandem.launchers.hostfile import Hostfile, read_hostfile

START_S, BACK_S = 180.0, 120.0
TOKENS = 64
DEATHS = 3


def doctor(task: Task) -> Figures:
    """Check that the doctor finds no fault between the machines; report the speed of each link."""
    evidence = _examined(task, None)
    figures: Figures = {}
    for number, link in enumerate(evidence.links.values(), 1):
        if link.bandwidth:
            figures[f"way {number}, MB/s"] = round(link.bandwidth / 1e6)
            figures[f"way {number}, latency, us"] = round(1e6 * link.latency_s)
    problems = []
    for finding in findings(evidence):
        if finding.verdict == "warn":
            name = f"warning: {finding.check}"
            figures[name] = "; ".join([*([str(figures[name])] if name in figures else []), _of_whom(finding)])
        elif finding.verdict == "fail":
            problems.append(f"{finding.check}: {_of_whom(finding)}")
    if problems:
        raise Differs(f"nothing wrong, expected; {'; '.join(problems)}, seen", figures)
    return figures


def _of_whom(finding: Finding) -> str:
    """Return a finding's detail, prefixed with the machine."""
    where, detail = finding.where, finding.detail
    return f"{where}: {detail}" if where and where not in detail else detail


def _examined(task: Task, backend: str | None) -> Evidence:
    file = read_hostfile(task.hostfile)
    return examine(
        Question(hosts=hostfile_hosts(file), backend=backend or file.backend or "ring", variables=dict(file.envs), port=0)
    )


def links(task: Task) -> Figures:
    """Check sums over all machines with the ring backend and, where the hosts file has RDMA devices, jaccl."""
    figures: Figures = {}
    problems = []
    for backend in ("ring", *(["jaccl"] if _has_rdma(read_hostfile(task.hostfile)) else [])):
        evidence = _examined(task, backend)
        sums = evidence.collected
        if not sums or any(times.error for times in sums.values()):
            errors = [f"{name}: {times.error}" for name, times in sums.items() if times.error]
            errors += [_of_whom(finding) for finding in findings(evidence) if finding.verdict == "fail"]
            errors += ["the doctor left it out"]
            problems.append(f"sums over {backend}, expected; {errors[0]}, seen")
            continue
        for size, latency in next(iter(sums.values())).latency_s.items():
            figures[f"{backend}, all_sum of {int(size) >> 10} KiB, us"] = round(1e6 * latency)
    return judged(problems, figures)


def _has_rdma(file: Hostfile) -> bool:
    return any(any(device for device in host.rdma) for host in file.hosts)


def layouts(task: Task) -> Figures:
    """Check that pipeline stages over the machines answer like one rank; report the speed of each layout."""
    count = len(read_hostfile(task.hostfile).hosts)
    prompt = prompt_of(24)
    with serving(task.model, "--executor", "cluster", "--prefix-cache", "0") as server:
        alone = ask(server, prompt, TOKENS)
    figures: Figures = {"one rank, tokens a second": round(alone.decode_rate, 1)}
    problems = []
    for name, options in (("stages", ("-pp", str(count))), ("tensor parallelism", ("-tp", str(count)))):
        with serving(
            task.model, "--hostfile", task.hostfile, "--weights-from", "head", "--prefix-cache", "0", *options, start_s=START_S
        ) as server:
            answer = ask(server, prompt, TOKENS)
        figures[f"{name} over {count} hosts, tokens a second"] = round(answer.decode_rate, 1)
        if name == "stages" and answer.text != alone.text:
            problems.append("the answer of one rank from stages, expected; another, seen")
        elif answer.text != alone.text:
            figures[f"{name}: answer"] = "differs from one rank's, which rounding may explain"
    return judged(problems, figures)


def deaths(task: Task) -> Figures:
    """Check that the rank group recovers from killing a rank under load, three times, over jaccl where there is RDMA."""
    file = read_hostfile(task.hostfile)
    backend = "jaccl" if _has_rdma(file) else "ring"
    count = len(file.hosts)
    tokens = RANDOM_TOKENS if task.random else TOKENS
    with serving(
        task.model,
        "--hostfile",
        task.hostfile,
        "--weights-from",
        "head",
        "-tp",
        str(count),
        "--backend",
        backend,
        "--max-restarts",
        "10",
        start_s=START_S,
    ) as server:
        calm = ask(server, prompt_of(12), tokens).text
        figures: Figures = {"backend": backend}
        for number in range(1, DEATHS + 1):
            # A process id of another machine's rank may also exist here, for an unrelated process.
            victim = next((pid for pid in server.ranks() if pid in descendants(server.process.pid)), None)
            if victim is None:
                raise NotApplicable("no rank is on this machine; start it on one that the hosts file has as localhost")
            [answer] = all_under_way(server, [prompt_of(12)], tokens)
            began = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            if not until(lambda dead=victim: _is_back(server, dead), BACK_S):  # type: ignore[misc]
                raise Differs(f"ranks again within {BACK_S:g} s of death {number}, expected; none, seen", figures)
            figures[f"death {number}: ranks again after, s"] = seconds(began)
            if answer.done().text != calm:
                raise Differs(f"the same answer after death {number}, expected; another, seen", figures)
    return figures


def _is_back(server: Server, dead: int) -> bool:
    return bool(server.health()["status"] == "healthy") and dead not in server.ranks()
