"""One round of a storm: its server, good clients, bad neighbours and faults, and what must hold in the end."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from harness import Server, tandem_server
from soak_bad_clients import BadClients
from soak_clients import Clients, Plain, Way
from soak_durable import Durable
from soak_faults import Disk, move
from soak_processes import Processes
from soak_requests import Request, ask, long_requests, requests, same
from soak_schedule import LAYOUTS, Fault, Round
from soak_tally import BAD, Tally

from tandem.env import runtime_dir

KV_TOKENS = 40_000
"""KV of a server with `--kv-disk`; less than all prompts, so that some of them are on disk alone."""
REST_S = 30.0
"""Seconds after the last request within which the server must have nothing left to do."""
SHARED = 2 / 3
"""Share of a round's time in which clients are added."""


@dataclass(frozen=True)
class Models:
    """Directories of the models that servers of a storm offer."""

    main: Path
    second: Path
    adapter: Path | None
    """None where the model is not the storm's own."""


@dataclass(frozen=True)
class Pace:
    """Load of each round."""

    storm_s: float
    clients: int
    pause_s: float
    requests: int
    """Kinds of requests, out of all."""
    neighbours: dict[str, int]
    """Bad clients by kind."""
    device: str


@dataclass
class Result:
    """Findings of one round."""

    made: Round
    seconds: float = 0.0
    sent: int = 0
    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    refused: collections.Counter[str] = field(default_factory=collections.Counter)
    faults: collections.Counter[str] = field(default_factory=collections.Counter)
    replayed: int = 0
    disk_tokens: int = 0
    deeds: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def well(self) -> bool:
        """Whether everything held."""
        return not self.problems

    def __str__(self) -> str:
        counts = ", ".join(f"{name} {self.counts[name]}" for name in ("identical", "tied", *BAD, "refused", "broken"))
        more = f", asked again {self.replayed}" if self.replayed else ""
        disk = f", {self.disk_tokens} tokens from disk" if self.disk_tokens else ""
        return (
            f"round {self.made.number}: {self.made}: {self.seconds:.0f} s, {sum(self.faults.values())} faults: "
            f"{counts}{more}{disk}{''.join(f'; {problem}' for problem in self.problems)}"
        )


class Known:
    """Undisturbed answers of earlier rounds: layouts that add in the same order give the same."""

    def __init__(self) -> None:
        self._answers: dict[tuple[str, str], tuple[int, dict[str, Any]]] = {}

    def compare(self, made: Round, request: Request, answer: dict[str, Any]) -> tuple[int, dict[str, Any]] | None:
        """Remember an answer, or return the earlier round whose answer was another one, and that."""
        order = made.layout if made.layout in ("tp", "2,1") else "pp"
        number, earlier = self._answers.setdefault((order, repr(request)), (made.number, answer))
        return None if same(answer, earlier) else (number, earlier)


def flags(made: Round, models: Models, folder: Path) -> dict[str, Any]:
    """Options of `tandem serve` for a round."""
    chosen: dict[str, Any] = dict(LAYOUTS[made.layout])
    features = made.names("feature")
    if "journal" in features:
        chosen["journal"] = folder / "journal"
    if "disk" in features:
        chosen |= {"kv_disk": folder / "kv", "kv_disk_gb": 0.02, "kv_tokens": KV_TOKENS}
    if "roles" in features:
        chosen["roles"] = "prefill,decode"
    if "standby" in features:
        chosen["standby_ranks"] = 1
    if "models" in features:
        chosen["also"] = f"second={models.second}"
    if "adapters" in features:
        chosen["lora_modules"] = f"tuned={models.adapter}"
    if "speculation" in features:
        chosen["speculative_method"] = "ngram"
    return chosen


def work_of(made: Round, seed: int, count: int) -> list[Request]:
    """Draw requests for a round: of all kinds, some to each model that it has, and long ones where KV is on disk."""
    rng, every = random.Random(f"{seed}/{made.number}/work"), requests(random.Random(seed))
    features = made.names("feature")
    names = ["second"] * ("models" in features) + ["tuned"] * ("adapters" in features)
    if "disk" in features or "roles" in features:
        every += long_requests(random.Random(seed))
    must = (
        [
            one
            for one in every
            if one.path == "/v1/responses"
            or one.path == "/v1/completions"
            and not one.body.get("stream")
            and "logprobs" not in one.body
        ][:6]
        if "journal" in features
        else []
    )
    work = must + rng.sample([one for one in every if one not in must], max(count - len(must), 1))
    others = rng.sample(every, min(len(every), len(names) * count // 4))
    return work + [Request(one.path, {**one.body, "model": names[place % len(names)]}) for place, one in enumerate(others)]


class _Play:
    """A round that is being played."""

    def __init__(self, made: Round, seed: int, pace: Pace, server: Server, folder: Path, result: Result) -> None:
        self._made, self._seed, self._pace, self._server, self._result = made, seed, pace, server, result
        self._url = f"http://127.0.0.1:{server.port}"
        self._rng = random.Random(f"{seed}/{made.number}/faults")
        self._folder = folder
        self.processes = Processes(server)
        self.tally = Tally(folder)
        self._disk = Disk(folder)

    def play(self, known: Known) -> None:
        """Play it to the server's end."""
        try:
            self._learn(known)
            self._storm()
            self._judge_rest()
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                self.processes.living()
        if (codes := self._server.end()) != [0]:
            self._result.problems.append(f"after SIGTERM the server ended with {codes} in place of 0")

    def _learn(self, known: Known) -> None:
        """Take the undisturbed answers."""
        self._work = work_of(self._made, self._seed, self._pace.requests)
        answers = [ask(self._url, one) for one in self._work]
        for one, got in zip(self._work, answers, strict=True):
            if got.kind != "answered":
                raise RuntimeError(f"before the first fault: {one.name} {got.kind}: {got.detail}")
            if (differs := known.compare(self._made, one, got.answer)) is not None:
                self.tally.blame(
                    "wrong",
                    detail=f"answered otherwise in round {differs[0]}",
                    expected=differs[1],
                    request=dataclasses.asdict(one),
                    got=dataclasses.asdict(got),
                )
        self._expected = [got.answer for got in answers]

    def _storm(self) -> None:
        """Rising load, bad neighbours, faults; then all finish."""
        ways: list[Way] = [Plain(self._url, self._work, self._expected, self.tally)]
        features, durable = self._made.names("feature"), None
        if "journal" in features:
            durable = Durable(self._url, self._work, self._expected, self.tally)
            ways = [ways[0], ways[0], ways[0], durable.keyed, durable.later, durable.background]
            if "batches" in features:
                durable.begin_batch(self._rng)
        clients = Clients(ways, self._pace.pause_s, f"{self._seed}/{self._made.number}")
        kinds = {kind: self._pace.neighbours[kind] for kind in self._made.names("neighbour")}
        bad_clients = BadClients(self._server.port, f"{self._seed}/{self._made.number}", kinds, self._folder / "bad-clients.log")
        try:
            with bad_clients:
                self._disturb(clients)
        finally:
            hanging = clients.end()
        self._result.deeds = bad_clients.deeds
        for _ in range(hanging):
            self.tally.blame("hung", detail="a client never ended")
        if durable is not None:
            durable.settle()

    def _disturb(self, clients: Clients) -> None:
        began, waiting = time.monotonic(), list(self._made.faults)
        while (spent := time.monotonic() - began) < self._pace.storm_s:
            clients.rise(1 + int((self._pace.clients - 1) * min(spent / (self._pace.storm_s * SHARED), 1.0)))
            while waiting and waiting[0].second <= spent:
                what = self._hurt(waiting.pop(0))
                if not what.startswith("no "):
                    self._result.faults[what] += 1
                with (self._folder / "faults.log").open("a") as log:
                    print(time.strftime("%X"), what, file=log)
            time.sleep(0.1)

    def _hurt(self, fault: Fault) -> str:
        if fault.target in ("api", "server"):
            self.tally.excuse()
        if fault.target == "server":
            self.processes.kill_all()
            self._server.start()
            self.tally.excuse()
            return "SIGKILL of all processes"
        if fault.target == "files":
            return self._disk.hurt(self._rng)
        if fault.target == "replica":
            return move(self._server.port, self._rng)
        return self.processes.hurt(self._rng, fault.target, fault.signal)

    def _judge_rest(self) -> None:
        """Wait until nothing is left to do."""
        deadline, left = time.monotonic() + REST_S, "no answer"
        while left and time.monotonic() < deadline:
            time.sleep(0.5)
            try:
                status = httpx.get(f"{self._url}/v1/status", timeout=10).json()
                left = f"{status['num_running']} running, {status['num_waiting']} waiting"
                left = "" if left == "0 running, 0 waiting" else left
            except (httpx.HTTPError, ValueError, KeyError) as error:
                left = f"/v1/status: {type(error).__name__}"
        if left:
            self._result.problems.append(f"not at rest after all clients have gone: {left}")


def play(made: Round, seed: int, pace: Pace, models: Models, known: Known, folder: Path) -> Result:
    """Play one round in a folder of its own; whatever happens, no process of it is left."""
    result, began = Result(made), time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "server.log"
    server = tandem_server(
        models.main,
        1,
        log=log,
        log_level="INFO",
        max_restarts=1000,
        start_timeout=120,
        device=pace.device,
        **flags(made, models, folder),
    )
    one = None
    try:
        with server:
            one = _Play(made, seed, pace, server, folder, result)
            one.play(known)
    except (RuntimeError, SystemExit, OSError, httpx.HTTPError, psutil.Error) as error:
        result.problems.append(f"{type(error).__name__}: {error}"[:2000])
    finally:
        if one is not None and (orphans := one.processes.left(end=True)):
            result.problems.append(f"left running: {', '.join(orphans)}")
    if one is not None:
        one.tally.settle(Path(models.main))
        _count(one.tally, result)
    if "Traceback" in (text := log.read_text(errors="replace")):
        result.problems.append(f"{text.count('Traceback')} traceback(s) in {log}")
    if socket_files := [path.name for path in runtime_dir().glob(f"*{server.port}*")]:
        result.problems.append(f"left in {runtime_dir()}: {', '.join(socket_files)}")
    result.seconds = time.monotonic() - began
    return result


def _count(tally: Tally, result: Result) -> None:
    result.sent, result.counts, result.refused = tally.sent, tally.counts, tally.refused
    result.replayed, result.disk_tokens = tally.replayed, tally.disk_tokens
    result.problems += [f"{tally.counts[kind]} x {kind}" for kind in BAD if tally.counts[kind]]
