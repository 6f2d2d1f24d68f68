"""What the benchmarks share: server processes started and ended, a model that both sides can load, printed tables.

Two things are only ever compared side by side: same run, same weights, dtype, BLAS library and threads per process.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import psutil
from prometheus_client.parser import text_string_to_metric_families

from tandem.env import cache_dir, child_environment

Outcome = TypeVar("Outcome")
START_S = 600.0
"""Seconds within which a server must answer."""


def arguments(description: str | None, *, rounds: int = 0) -> argparse.ArgumentParser:
    """Parser with the options that every benchmark has; with `rounds`, of those that play so many by default."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", required=True, help="model directory (safetensors)")
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="type that both sides compute in; auto: float32 on a CPU, as stored on a GPU",
    )
    parser.add_argument("--threads", type=int, default=1, help="BLAS threads of each process that computes")
    parser.add_argument(
        "--blas", default="libopenblas.so.0", help="library preloaded into the peer's processes on a CPU; Tandem finds its own"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the numbers to FILE")
    if rounds:
        parser.add_argument("--rounds", type=int, default=rounds, help="runs of each side and setting, in turns")
        parser.add_argument(
            "--disturbance",
            type=float,
            default=0.15,
            help="share of a core that other programs may take during a round; else it is repeated",
        )
        parser.add_argument("--retries", type=int, default=rounds, help="rounds that may be repeated")
    return parser


def threads_environment(threads: int) -> dict[str, str]:
    """Variables that limit the BLAS libraries to `threads` threads."""
    return {name: str(threads) for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")}


def on_gpu() -> bool:
    """True when MLX computes on a GPU here; asked of a child, so that this process holds no device."""
    code = "import mlx.core as mx; print(mx.default_device().type == mx.DeviceType.gpu)"
    return subprocess.check_output([sys.executable, "-P", "-c", code], text=True).strip().endswith("True")


def peer_environment(args: argparse.Namespace, gpu: bool) -> dict[str, str]:
    """The environment for mlx-lm's processes: the same BLAS library, kernels of it and threads as ours."""
    preload = {}
    if not gpu and sys.platform == "linux":
        name = "OPENBLAS_CORETYPE"
        code = "import os, sys; import tandem.comm.blas as b; b.preload_blas(sys.argv[1]); print(os.getenv(sys.argv[2], ''))"
        kernels = subprocess.check_output([sys.executable, "-P", "-c", code, args.blas, name], text=True).strip()
        preload = {"LD_PRELOAD": args.blas} | ({name: kernels} if kernels else {})
    return child_environment({**threads_environment(args.threads), **preload, "HF_HUB_OFFLINE": "1"})


def prepared(model: str, dtype: str, gpu: bool) -> Path:
    """A copy of the model that both sides load alike, in the cache: not quantised, in `dtype`, and without an end.

    The copy's end-of-sequence id is the last of the vocabulary, so that outputs have the lengths that were asked for.
    """
    kind = dtype if dtype != "auto" else "stored" if gpu else "float32"
    source = Path(model).resolve()
    state = f"{source}:{kind}:{(source / 'config.json').stat().st_mtime_ns}"
    target = cache_dir() / "benchmarks" / f"{source.name}-{kind}-{hashlib.sha256(state.encode()).hexdigest()[:8]}"
    if not (target / "config.json").exists():
        script = Path(__file__).with_name("plain_copy.py")
        subprocess.run([sys.executable, script, source, target, "--dtype", kind], check=True, env=child_environment())
    return target


@contextlib.contextmanager
def sources(against: str | None) -> Iterator[dict[str, Path]]:
    """Directories whose `src` is compared, by name: that of `against`, a commit or a directory, if any, and this working tree."""
    here = Path(__file__).parents[1]
    with tempfile.TemporaryDirectory() as folder:
        old = Path(against or "")
        if against and not old.is_dir():
            old = Path(folder)
            shot = subprocess.run(["git", "-C", here, "archive", against, "src"], check=True, capture_output=True)
            subprocess.run(["tar", "-x", "-C", old], input=shot.stdout, check=True)
        yield ({against: old.resolve()} if against else {}) | {"now": here}


def source_path(tree: Path) -> dict[str, str]:
    """The variable with which a child of Python imports the `src` of this directory."""
    return {"PYTHONPATH": os.pathsep.join([f"{tree}/src", *filter(None, sys.path[1:])])}


def free_port() -> int:
    """A port that nobody listens on now, below those that systems give to outgoing connections."""
    while True:
        port = random.SystemRandom().randrange(12_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


END_WITH_PARENT = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)
os.execvp(sys.argv[1], sys.argv[1:])
"""
"""Runs a command that the kernel kills when the benchmark dies, so that no server outlives it (prctl(2))."""


class Server:
    """Child processes that serve HTTP on 127.0.0.1 together. A context manager: ready inside, ended after."""

    def __init__(
        self,
        name: str,
        commands: Sequence[Sequence[str]],
        env: Mapping[str, str],
        *,
        port: int,
        health: str,
        model: str,
        log: Path | None = None,
    ) -> None:
        self.name, self.port, self.model = name, port, model
        self._commands, self._env, self._health = commands, dict(env), health
        self._log = log.open("a+b") if log else tempfile.TemporaryFile()  # noqa: SIM115 - closed in __exit__
        self.processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        self.start()
        return self

    def start(self) -> None:
        """Start its processes and wait until they serve; also again, after all of them were killed."""
        for command in self._commands:
            whole = [sys.executable, "-P", "-c", END_WITH_PARENT, *command]
            self.processes.append(
                subprocess.Popen(
                    whole, env=self._env, stdout=self._log, stderr=self._log, stdin=subprocess.DEVNULL, start_new_session=True
                )
            )
        try:
            self._wait()
        except BaseException:
            self.__exit__()
            raise

    def _wait(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if any(process.poll() is not None for process in self.processes):
                break
            address = f"http://127.0.0.1:{self.port}{self._health}"
            with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=2):
                return
            time.sleep(0.2)
        raise SystemExit(f"{self.name} did not start:\n{self.log()}")

    def log(self) -> str:
        """The end of what its processes have printed."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-4000:]

    def end(self) -> list[int | None]:
        """Ask all to end as an administrator would (SIGTERM), and wait; their exit codes, None where one does not."""
        processes, self.processes = self.processes, []
        codes: list[int | None] = []
        for process in reversed(processes):
            process.send_signal(signal.SIGTERM)
            try:
                codes.append(process.wait(60))
            except subprocess.TimeoutExpired:
                codes.append(None)
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return codes

    def __exit__(self, *exc: object) -> None:
        processes, self.processes = self.processes, []
        dead = [process.returncode for process in processes if process.poll() is not None]
        if dead:
            print(f"{self.name}: processes ended early with {dead}:\n{self.log()}", file=sys.stderr)
        for process in reversed(processes):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what a launcher has left behind
        self._log.close()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Its processes are stopped inside, and go on after."""
        family = [
            one
            for process in self.processes
            for one in (psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True))
        ]
        for one in family:
            one.suspend()
        try:
            yield
        finally:
            for one in family:
                one.resume()

    def get(self, path: str) -> Any:
        """JSON answer of a GET."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as answer:
            return json.load(answer)


def tandem_server(
    model: Path,
    threads: int,
    name: str = "tandem",
    *,
    log: Path | None = None,
    beside: Sequence[Sequence[str]] = (),
    tree: Path | None = None,
    **flags: object,
) -> Server:
    """`tandem serve`; `flags` are its options with underscores, True for those without a value. `log`: a file for what it
    prints, which is kept. `beside`: other commands that run as long as it does, and end after it. `tree`: the directory
    whose `src` it runs, of `sources`."""
    port = free_port()
    chosen = {"model": model, "port": port, "threads_per_rank": threads, "dequantize": "no", "log_level": "WARNING", **flags}
    options = []
    for key, value in chosen.items():
        options += ["--" + key.replace("_", "-"), *(() if value is True else (str(value),))]
    command = [sys.executable, "-P", "-m", "tandem.cli.main", "serve", *options]
    return Server(
        name,
        [*beside, command],
        child_environment(threads_environment(threads) | (source_path(tree) if tree else {})),
        port=port,
        health="/health/ready",
        model="default",
        log=log,
    )


def mlx_lm_server(model: Path, env: Mapping[str, str]) -> Server:
    """mlx-lm's own server with its own defaults."""
    port = free_port()
    command = [sys.executable, "-P", "-m", "mlx_lm", "server", "--model", str(model), "--port", str(port), "--log-level", "ERROR"]
    return Server("mlx_lm.server", [command], env, port=port, health="/health", model="default_model")


def now() -> float:
    """Seconds of the clock that all times here are of."""
    return time.perf_counter()


class Others:
    """How much of the processors other programs took while a block ran: `share`, 1 being one whole core.

    Two sides that are measured in turns are only comparable while the rest of the machine is quiet.
    """

    share = 0.0

    def __enter__(self) -> Self:
        self._before, self._started = _foreign_seconds(), now()
        return self

    def __exit__(self, *exc: object) -> None:
        self.share = max(_foreign_seconds() - self._before, 0.0) / (now() - self._started)


def _foreign_seconds() -> float:
    """Processor seconds of everything but this process and what it started. Time stolen by a host counts too."""
    total = psutil.cpu_times()
    idle = ("idle", "iowait", "guest", "guest_nice")  # guests are in "user" already
    busy = sum(value for name, value in total._asdict().items() if name not in idle)
    me = psutil.Process()
    for one in (me, *me.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = one.cpu_times()
            busy -= times.user + times.system
    return float(busy)


def rounds(args: argparse.Namespace, play: Callable[[], Outcome]) -> list[tuple[Outcome, float]]:
    """What `args.rounds` calls of `play` returned, each with the share of a core that others took meanwhile.

    A round in which others took more than `args.disturbance` is played again, up to `args.retries` times in all.
    """
    outcomes: list[tuple[Outcome, float]] = []
    retries = args.retries
    while len(outcomes) < args.rounds:
        with Others() as others:
            outcome = play()
        if retries and others.share > args.disturbance:
            retries -= 1
            print(f"(a round is repeated: others took {others.share:.2f} of a core)", flush=True)
        else:
            outcomes.append((outcome, others.share))
    return outcomes


def metric(server: Server, name: str) -> dict[str, float]:
    """One of Tandem's Prometheus metrics, by rank; under "" where it is not of ranks."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=30) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    found: dict[str, float] = {}
    for sample in (one for family in families for one in family.samples if one.name == name):
        rank = sample.labels.get("rank", "")
        found[rank] = found.get(rank, 0.0) + sample.value
    return found


@contextlib.contextmanager
def heading(text: str) -> Iterator[None]:
    """Print a title and, afterwards, how long the part took."""
    print(f"\n## {text}\n", flush=True)
    started = time.monotonic()
    yield
    print(f"\n({time.monotonic() - started:.0f} s)", flush=True)


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a Markdown table."""
    texts = [[_text(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [list(columns), *texts]) for i in range(len(columns))]
    for row in [list(columns), ["-" * width for width in widths], *texts]:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")
    sys.stdout.flush()


def _text(cell: object) -> str:
    if not isinstance(cell, float):
        return str(cell)
    return f"{cell:.2f}" if abs(cell) < 10 else f"{cell:.1f}"


def verdict(name: str, value: float, goal: float, *, at_most: bool = False) -> dict[str, Any]:
    """Print a ratio against its goal, and return both for the JSON file."""
    met = value <= goal if at_most else value >= goal
    print(f"{name}: {value:.3f} (goal {'<=' if at_most else '>='} {goal:g}: {'met' if met else 'MISSED'})", flush=True)
    return {"name": name, "value": value, "goal": goal, "met": met}


def middle(values: Sequence[float]) -> float:
    """Median."""
    return float(statistics.median(values))


def write_json(path: str | None, args: argparse.Namespace, results: Mapping[str, Any]) -> None:
    """Write what was measured, and with what, if a file was asked for."""
    if not path:
        return
    versions = {name: importlib.metadata.version(name) for name in ("mlx", "mlx-lm")}
    facts = {
        "arguments": vars(args),
        "versions": versions,
        "machine": platform.machine(),
        "python": platform.python_version(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S"),
    }
    Path(path).write_text(json.dumps({**facts, **results}, indent=2) + "\n")
