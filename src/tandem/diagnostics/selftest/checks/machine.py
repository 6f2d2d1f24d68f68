"""Checks of the machine: the doctor's findings, limits, network permissions and model files."""

from __future__ import annotations

import json
import os
import resource
import socket
import sys
from pathlib import Path

from tandem.checkpoints.files import read_headers
from tandem.checkpoints.resolve import resolve
from tandem.descriptors import WANTED
from tandem.diagnostics.doctor.examine import Question, examine, findings
from tandem.diagnostics.selftest.check import NotApplicable, judged
from tandem.diagnostics.selftest.report import facts
from tandem.diagnostics.tasks import Figures, Task
from tandem.env import machine_memory, runtime_dir
from tandem.launchers.host_facts import address_towards
from tandem.launchers.hostfile import read_hostfile
from tandem.system.privacy import connect_trouble, refusal
from tandem.system.tools import output_of, sysctl
from tandem.testing import tiny_model

MULTICAST = ("224.0.0.251", 5353)
LONGEST_SOCKET = 103
"""Longest path of a Unix socket on macOS, in bytes."""
OUTSIDE = "192.0.2.1"
"""Unused address of TEST-NET-1 (RFC 5737), for the local address of the default route."""
CONTEXT = 40960
"""Context length of the random model in tokens."""
FOLDERS = ("Documents", "Desktop", "Downloads")


def machine(task: Task) -> Figures:
    """Describe the machine, and check that the doctor finds no fault and limits suffice."""
    figures = facts()
    figures["load of the last minute"] = round(os.getloadavg()[0], 1)
    problems = []
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    figures["open files"] = f"{limit[0]} of {limit[1]}" if limit[1] != resource.RLIM_INFINITY else str(limit[0])
    if limit[0] < min(WANTED, limit[1] if limit[1] != resource.RLIM_INFINITY else WANTED):
        problems.append(f"{WANTED} files may be open, expected; {limit[0]}, seen")
    longest = len(str(runtime_dir() / "engine-65535.sock").encode())
    figures["longest socket path"] = longest
    if longest > LONGEST_SOCKET:
        problems.append(f"sockets have paths of {longest} bytes, and macOS takes {LONGEST_SOCKET}")
    if sys.platform == "darwin":
        figures |= _mac()
        if (installed := sysctl("hw.memsize")).isdigit() and int(installed) != machine_memory():
            problems.append(f"hw.memsize is {installed}, sysconf says {machine_memory()}")
    seen = findings(examine(Question(hosts=[], model=task.model, port=0)))
    figures |= {f"doctor: {finding.check}": finding.detail for finding in seen if finding.verdict == "warn"}
    problems += [f"doctor, {finding.check}: {finding.detail}" for finding in seen if finding.verdict == "fail"]
    return judged(problems, figures)


def _mac() -> Figures:
    """Return the figures that exist only on Macs."""
    reports = Path("/Library/Logs/DiagnosticReports")
    try:
        panics = len([file for file in reports.iterdir() if file.suffix == ".panic" or "panic-full" in file.name])
    except OSError:
        panics = 0
    names = {
        socket.gethostname(),
        *((output_of(["scutil", "--get", name]) or "").strip() for name in ("ComputerName", "LocalHostName", "HostName")),
    }
    return {
        "iogpu.wired_limit_mb": sysctl("iogpu.wired_limit_mb"),
        "kernel panics on record": panics,
        "different names of this machine": len(names),
    }


def network(task: Task) -> Figures:
    """Check that this process may use the local network, which macOS can deny; report the folders that it may read."""
    try:
        own = address_towards(OUTSIDE)
    except OSError as error:
        raise NotApplicable(f"this machine has no network: {error.strerror or error}") from None
    problems = []
    figures: Figures = {}
    with socket.create_server((own, 0)) as listener:
        if trouble := _connects(own, listener.getsockname()[1]):
            problems.append(f"a connection to this machine's own address: {trouble}")
    for host in read_hostfile(task.hostfile).hosts if task.hostfile else ():
        address = host.reached_at or host.ssh
        if not host.is_here and (trouble := _connects(address, 22)):
            problems.append(f"a connection to {address}, port 22: {trouble}")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        try:
            sender.sendto(b"", MULTICAST)
            figures["multicast"] = "goes out"
        except OSError as error:
            figures["multicast"] = connect_trouble(error, MULTICAST[0])
    for name in FOLDERS:
        try:
            next((Path.home() / name).iterdir(), None)
            figures[f"folder {name}"] = "open"
        except FileNotFoundError:
            continue
        except OSError as error:
            figures[f"folder {name}"] = f"closed to this process ({error.strerror}): keep no models there"
    return judged(problems, figures)


def _connects(address: str, port: int) -> str:
    """Return why a connection fails; empty if it succeeds."""
    error = refusal(address, port, 3.0)
    return connect_trouble(error, address) if error else ""


def model(task: Task) -> Figures:
    """Check that the model's files are complete; generate them first if the model is random."""
    if task.random:
        make_random(Path(task.model))
    files = resolve(task.model)
    read_headers(files)
    size = sum(path.stat().st_size for path in files.path.glob("*.safetensors"))
    return {"name": "tiny, with random weights" if task.random else files.name, "MiB": round(size / 2**20)}


def make_random(directory: Path) -> None:
    """Write the tiny random model that is served without a real one (mlx). The tokenizer's settings are written last and mark it
    as complete; a complete model is kept."""
    last = directory / "tokenizer_config.json"
    if last.exists():
        return
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 32}
    tiny_model(directory, "llama", layers=4, dtype="float32", config={**shape, "max_position_embeddings": CONTEXT})
    last.write_text(json.dumps({**json.loads(last.read_text()), "model_max_length": CONTEXT}, indent=2))
