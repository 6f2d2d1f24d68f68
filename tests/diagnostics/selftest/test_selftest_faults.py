"""Every check sees a fault that is planted in what it looks at, and passes without one. Here those without servers."""

from __future__ import annotations

import errno
import json
import socket
import subprocess
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import msgspec
import pytest

from tandem.checkpoints.resolve import resolve as resolve_model
from tandem.descriptors import raise_limit
from tandem.diagnostics.doctor.evidence import Evidence, Host
from tandem.diagnostics.doctor.evidence import Finding as DoctorFinding
from tandem.diagnostics.doctor.examine import Question, examine
from tandem.diagnostics.doctor.facts import gather
from tandem.diagnostics.doctor.probe_messages import GatherFacts, Transferred
from tandem.diagnostics.selftest.check import CHECKS, Differs, NotApplicable, resolve
from tandem.diagnostics.selftest.checks import device, faults, fences, hosts, kv_buffer, machine, risky, sampling, wiring
from tandem.diagnostics.selftest.checks.single import Reference
from tandem.diagnostics.tasks import Figures, RankTimes, Row, Task, TaskResult
from tandem.errors import ModelNotFound, RankFailure
from tandem.loading import dry_run
from tandem.loading.quantized_kv import Quantized
from tandem.models.description import describe
from tandem.planner.profile import HostProfile, LinkProfile, Profile, Step, Versions, encode_profile
from tandem.runner import digest, penalties, sampler
from tandem.runner.kv_buffer import KVBufferLayer
from tandem.runner.kv_layers import RowStep
from tandem.testing import tiny_model

Patch = pytest.MonkeyPatch


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return Task(entry="", result="", directory=str(tmp_path), model=str(tmp_path))


def test_every_check_has_its_function_and_words() -> None:
    assert len({one.name for one in CHECKS}) == len(CHECKS)
    for one in CHECKS:
        assert callable(resolve(one.entry)), one.name
        assert one.proves[0].islower(), one.name


def serves(server: object = None) -> Any:
    """What takes the place of `serving`: a server that is there."""

    @contextmanager
    def serving(*_: object, **__: object) -> Any:
        yield server

    return serving


def differs(check: Callable[[Task], Figures], task: Task, words: str) -> None:
    with pytest.raises(Differs) as caught:
        check(task)
    assert words in caught.value.message
    assert "expected" in caught.value.message


# ---- the machine


def test_machine(task: Task, tmp_path: Path, monkeypatch: Patch) -> None:
    raise_limit()
    task = Task(entry="", result="", directory="", model=str(tiny_model(tmp_path / "m")))
    asked: list[Question] = []
    monkeypatch.setattr(machine, "examine", lambda question: asked.append(question) or examine(question))
    assert machine.machine(task)["system"]
    assert asked[0].port == 0  # a server that runs here on the usual port is nothing wrong
    monkeypatch.setattr(machine, "runtime_dir", lambda: Path("/" + 95 * "x"))
    with pytest.raises(Differs, match="macOS takes 103"):
        machine.machine(task)
    evidence = examine(asked[0])
    monkeypatch.setattr(machine, "examine", lambda _: evidence)
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setattr(machine, "sysctl", lambda name: "17")
    with pytest.raises(Differs, match="hw.memsize is 17, sysconf says [0-9]"):
        machine.machine(task)


def test_network(task: Task, monkeypatch: Patch) -> None:
    monkeypatch.setattr(machine, "address_towards", lambda _: "127.0.0.1")
    assert machine.network(task)["multicast"]

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EHOSTUNREACH, "No route to host")

    monkeypatch.setattr(socket, "create_connection", refuse)
    with pytest.raises(Differs, match="own address: No route to host"):
        machine.network(task)
    monkeypatch.setattr(machine, "address_towards", refuse)
    with pytest.raises(NotApplicable, match="no network"):
        machine.network(task)


def test_model(tmp_path: Path) -> None:
    made = Task(entry="", result="", directory="", model=str(tmp_path / "new"), random=True)
    assert machine.model(made)["name"] == "tiny, with random weights"
    with pytest.raises(ModelNotFound):
        machine.model(Task(entry="", result="", directory="", model=str(tmp_path / "none")))


# ---- the device


def test_threads(task: Task, monkeypatch: Patch) -> None:
    monkeypatch.setattr(device, "ROUNDS", 60)
    assert device.threads(task)["streams of other threads"]
    eye = mx.eye
    monkeypatch.setattr(mx, "eye", lambda side: eye(side) * 1.5)
    differs(device.threads, task, "step 1 gave 1, expected; 2.25, seen")


def test_broken_kernel(task: Task, monkeypatch: Patch) -> None:
    if not mx.is_available(mx.gpu):
        with pytest.raises(NotApplicable, match="on GPUs alone"):
            device.broken_kernel(task)
    monkeypatch.setattr(device, "on_gpu", lambda: True)
    monkeypatch.setattr(device, "on_metal", lambda: True)

    def refuses(*, name: str, **_: object) -> Callable[..., list[mx.array]]:
        assert name == "selftest_broken"

        def call(**_: object) -> list[mx.array]:
            raise RuntimeError("does not compile")

        return call

    monkeypatch.setattr(mx.fast, "metal_kernel", refuses)
    assert device.broken_kernel(task) == {"exception": "RuntimeError"}
    monkeypatch.setattr(mx.fast, "metal_kernel", lambda **_: lambda **_: [mx.zeros(4)])
    differs(device.broken_kernel, task, "nothing, seen")


@pytest.mark.parametrize(
    ("place", "name", "broken", "words"),
    [
        (sampler, "filtered_weights", lambda scaled, filters, top_p: mx.exp(scaled), "draws of others"),
        (sampler, "draw", lambda weights, uniforms: mx.argmax(weights, axis=-1).astype(mx.int32), "of all draws"),
        (penalties.TokenHistory, "penalise", lambda self, logits, rows: logits, "log probability"),
        (penalties.TokenHistory, "count", lambda self, tokens, rows: None, "log probability"),
    ],
)
def test_sampler(place: Any, name: str, broken: Any, words: str, task: Task, monkeypatch: Patch) -> None:
    monkeypatch.setattr(sampling, "LARGE_VOCAB", 2000)
    assert sampling.sampler(task)
    monkeypatch.setattr(place, name, broken)
    differs(sampling.sampler, task, words)


def test_digests(task: Task, monkeypatch: Patch) -> None:
    assert sampling.digests(task) == {}
    monkeypatch.setattr(digest, "_SPREAD", 2654435763)
    differs(sampling.digests, task, "digest")


# ---- the KV buffer


def no_mask(self: KVBufferLayer, N: int, window_size: int | None = None, return_array: bool = False) -> None:
    return None


def test_windows_without_a_fault(task: Task) -> None:
    assert kv_buffer.windows(task)["largest difference, share of the largest logit"] < 1e-4  # type: ignore[operator]


def test_rows(task: Task, monkeypatch: Patch) -> None:
    monkeypatch.setattr(KVBufferLayer, "make_mask", no_mask)
    differs(kv_buffer.rows, task, "rows of unequal length: logits within 2% of mlx-lm's")


def test_windows(task: Task, monkeypatch: Patch) -> None:
    monkeypatch.setattr(KVBufferLayer, "_used", lambda self, length: length)  # rings that do not end
    with pytest.raises((Differs, ValueError)):
        kv_buffer.windows(task)


def test_drafts(task: Task, monkeypatch: Patch) -> None:
    assert kv_buffer.drafts(task)
    places = RowStep.places

    def one_too_early(self: RowStep, ring: int, heads: int) -> tuple[mx.array, mx.array, mx.array]:
        rows, each, slots = places(self, ring, heads)
        return rows, each, mx.maximum(slots, 1) - 1

    monkeypatch.setattr(RowStep, "places", one_too_early)
    differs(kv_buffer.drafts, task, "drafts, all positions")


def test_attention(task: Task, monkeypatch: Patch) -> None:
    if not mx.cuda.is_available():
        with pytest.raises(NotApplicable, match="CUDA alone"):
            kv_buffer.attention(task)

    def attend(
        queries: mx.array, keys: mx.array | Quantized, values: mx.array | Quantized, lengths: mx.array, longest: int, scale: float
    ) -> mx.array:
        keys, values = (side.expanded() if isinstance(side, Quantized) else side for side in (keys, values))
        mask = (mx.arange(keys.shape[2]) <= lengths[:, None])[:, None, None]
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)

    monkeypatch.setattr(kv_buffer, "decode_attention", lambda: attend)
    monkeypatch.setattr("tandem.runner.ragged_attention.HEAD_DIMS", (64,))
    monkeypatch.setattr("tandem.runner.ragged_attention.attend", attend)
    assert kv_buffer.attention(task)["largest difference"] < 0.03  # type: ignore[operator]
    monkeypatch.setattr(
        "tandem.runner.ragged_attention.attend", lambda *a: attend(*a[:3], a[3] * 0 + a[4], *a[4:])
    )  # all rows as long as the longest
    differs(kv_buffer.attention, task, "heads of 64")


def test_donation(task: Task, monkeypatch: Patch) -> None:
    monkeypatch.setattr(kv_buffer, "SMALL", kv_buffer.Shape(64, 2, 2, 1, 64, 2, 512))
    assert kv_buffer.donation(task)
    held: dict[int, object] = {}
    write = KVBufferLayer.update_and_fetch

    def referred(self: KVBufferLayer, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        found = write(self, keys, values)
        views = [part[:1] for part in self._parts]
        mx.eval(views)  # while there is a second reference to what it writes to, so that it has to copy
        held[id(self)] = views
        return found

    monkeypatch.setattr(KVBufferLayer, "update_and_fetch", referred)
    differs(kv_buffer.donation, task, "so that a layer's keys are copied")


def test_types(task: Task, monkeypatch: Patch) -> None:
    from tandem.diagnostics.selftest.checks import layouts

    monkeypatch.setattr(layouts, "TYPES", ("qwen3",))
    assert layouts.types(task) == {"types": "qwen3"}
    run = dry_run.PipelineModel.run
    monkeypatch.setattr(dry_run.PipelineModel, "run", lambda self, x, caches: run(self, x, caches) + 0.01)
    differs(layouts.types, task, "qwen3: over 1 stages the logits of call 1 differ")


# ---- waiting for one another


def test_fence(task: Task, monkeypatch: Patch) -> None:
    assert fences.fence(task)
    monkeypatch.setattr(mx, "add", lambda x, y, stream=None: x + 2)
    with pytest.raises(Differs, match="crossings count to"):
        fences.fence(task)


def ranks_that_find(found: TaskResult) -> Any:
    """What takes the place of two ranks."""

    @contextmanager
    def made(entry: str, **_: object) -> Any:
        yield SimpleNamespace(finding=lambda seconds: found), None

    return made


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (TaskResult(verdict="ok", figures={"seconds": 0.01}), "a sum after as long"),
        (TaskResult(verdict="failed", detail="RuntimeError: odd words"), "odd words, seen"),
        (TaskResult(verdict="no answer", detail="its process crashed (SIGABRT)"), "(SIGABRT), seen"),
        (TaskResult(verdict="no answer", detail="its process crashed (SIGABRT): Caused GPU Timeout Error"), "SIGABRT"),
    ],
)
def test_late(found: TaskResult, words: str, task: Task, monkeypatch: Patch) -> None:
    monkeypatch.setattr(fences, "ring_ranks", ranks_that_find(found))
    differs(fences.late, task, words)


def test_late_knows_the_error_of_a_gpu_that_waited_too_long(task: Task, monkeypatch: Patch) -> None:
    words = "RuntimeError: [METAL] Command buffer execution failed: (kIOGPUCommandBufferCallbackErrorTimeout)"
    monkeypatch.setattr(fences, "ring_ranks", ranks_that_find(TaskResult(verdict="failed", detail=words)))
    assert fences.late(task)["1 s late"] == words


@pytest.mark.slow
def test_a_rank_that_is_late_is_waited_for(task: Task, monkeypatch: Patch) -> None:
    monkeypatch.setattr(fences, "LATE", (4.0,))  # the check itself asks for half of it
    assert str(fences.late(task)["4 s late"]).startswith("waited ")


def test_wiring(task: Task, monkeypatch: Patch) -> None:
    monkeypatch.setattr(wiring, "CPU_MB", 1)
    monkeypatch.setattr(wiring, "PAUSES", [0.0])
    assert wiring.wiring(task)["MiB of weights"] == 1
    monkeypatch.setattr(wiring, "this_device", lambda: type("Device", (), {"gpu": True, "memory_bytes": 2**34}))
    monkeypatch.setattr("sys.platform", "darwin")
    asked: list[tuple[int, bool, str]] = []

    def measured(megabytes: int, wired: bool, refresh: str) -> dict[str, float]:
        asked.append((megabytes, wired, refresh))
        return {"warm": 10.0, "after 5 s": 12.0 if wired else 300.0}

    monkeypatch.setattr(wiring, "_measured", measured)
    assert wiring.wiring(task)["not wired, after 5 s, ms"] == 300.0
    assert asked == [(8192, False, "0"), (8192, True, "0"), (8192, True, "1000")]
    monkeypatch.setattr(wiring, "_measured", lambda *_: {"warm": 10.0, "after 5 s": 300.0})
    differs(wiring.wiring, task, "wired and refreshed")


ASSERTIONS = """Assertion status system-wide:
   PreventUserIdleSystemSleep     1
Listed by owning process:
   pid 95(powerd): [0x0000000d000183aa] 00:00:09 PreventUserIdleDisplaySleep named: "Powerd"
   pid 501(caffeinate): [0x0000011500018c2e] 00:00:12 PreventUserIdleSystemSleep named: "caffeinate command-line tool"
\tDetails: caffeinate asserting on behalf of Process ID 500
   pid 502(caffeinate): [0x0000011500078c2f] 00:00:12 PreventSystemSleep named: "caffeinate command-line tool"
"""
"""In the form that Apple's tool prints."""


def test_who_holds_sleep_off(monkeypatch: Patch) -> None:
    monkeypatch.setattr(faults, "output_of", lambda words: ASSERTIONS)
    assert faults.holders() == {"501", "502"}


def test_awake(task: Task, monkeypatch: Patch) -> None:
    with pytest.raises(NotApplicable, match="macOS alone"):
        faults.awake(task)
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setattr(faults, "serving", serves())
    monkeypatch.setattr(faults, "ask", lambda *_: None)
    seen = iter([set(), {"caffeinate, pid 1"}, set()])
    monkeypatch.setattr(faults, "holders", lambda: next(seen))
    assert faults.awake(task) == {"assertions of the server": 1}
    monkeypatch.setattr(faults, "holders", set)
    differs(faults.awake, task, "an assertion against sleep")
    monkeypatch.setattr(faults, "GONE_S", 0.1)
    held = iter([set()] + [{"caffeinate, pid 1"}] * 99)
    monkeypatch.setattr(faults, "holders", lambda: next(held))
    differs(faults.awake, task, "it is still held")


# ---- several machines


@pytest.fixture
def cluster(task: Task, tmp_path: Path) -> Task:
    file = tmp_path / "hosts.json"
    file.write_text(
        json.dumps(
            [
                {"ssh": "localhost", "ips": ["10.0.0.1"], "rdma": [None, "rdma_en2"]},
                {"ssh": "mac-b", "ips": ["10.0.0.2"], "rdma": ["rdma_en2", None]},
            ]
        )
    )
    return msgspec.structs.replace(task, hostfile=str(file))


def doctor_says(monkeypatch: Patch, *found: DoctorFinding, **gathered: Any) -> None:
    evidence = Evidence([Host("a"), Host("b")], "a", **gathered)
    monkeypatch.setattr(hosts, "examine", lambda question: evidence)
    monkeypatch.setattr(hosts, "findings", lambda _: list(found))


def test_doctor(cluster: Task, monkeypatch: Patch) -> None:
    doctor_says(monkeypatch, links={("a", "b"): Transferred(bandwidth=2e9, latency_s=3e-5)})
    assert hosts.doctor(cluster) == {"machine 1 to machine 2: MB/s": 2000, "machine 1 to machine 2: latency, us": 30}
    doctor_says(monkeypatch, DoctorFinding("speed", "fail", "", "slow"))
    differs(hosts.doctor, cluster, "speed: slow, seen")
    mac = msgspec.structs.replace(
        gather(GatherFacts()), hostname="anns-mac.local", system="Darwin", outputs={"os_version": "26.3\n", "os_build": "25D60\n"}
    )
    named = DoctorFinding("hostname", "warn", "b", "its name anns-mac.local resolves to 127.0.0.1")
    doctor_says(monkeypatch, named, facts={"b": mac})
    found = hosts.doctor(cluster)
    assert found["warning: hostname"] == "b: its name machine 2 resolves to 127.0.0.1"
    assert (found["machine 2: system"], found["machine 2: fence"]) == ("macOS 26.3 (25D60)", "MLX's own")
    assert "machine 1: system" not in found


def test_links(cluster: Task, monkeypatch: Patch) -> None:
    row = Row(operation="all_sum", bytes=4096, median_us=20, p99_us=20, gb_per_s=1)
    doctor_says(monkeypatch, collected={"a": RankTimes(rows=[row])})
    assert hosts.links(cluster) == {"ring: all_sum of 4 KiB, us": 20, "jaccl: all_sum of 4 KiB, us": 20}

    def wrong(self: hosts.HostsBench, *_: object) -> RankTimes:
        raise RankFailure("mac-b: a sum of 65536 bytes is wrong")

    monkeypatch.setattr(hosts.HostsBench, "joined", wrong)
    with pytest.raises(RankFailure, match="mac-b: a sum"):  # what cannot be timed is in no profile
        hosts.links(msgspec.structs.replace(cluster, options={"prompts": [64]}))
    assert not (Path(cluster.directory) / hosts.PROFILE).exists()
    doctor_says(monkeypatch, collected={"a": RankTimes(), "b": RankTimes(error="a wrong sum")})
    differs(hosts.links, cluster, "sums over jaccl, expected; b: a wrong sum, seen")
    doctor_says(monkeypatch)
    differs(hosts.links, cluster, "the doctor left it out")


class Struck:
    """In place of a server over machines: a rank is a process of this one, or has gone and does not come back."""

    def __init__(self, rank: subprocess.Popen[bytes]) -> None:
        self.process = rank
        self.healthy = True

    def ranks(self) -> list[int]:
        return [self.process.pid] if self.process.poll() is None else []

    def health(self) -> dict[str, str]:
        return {"status": "healthy" if self.healthy else "recovering"}

    def under_way(self) -> bool:
        return True

    def done(self) -> Any:
        return SimpleNamespace(text="other words", gaps=[0.5])


def served_layouts(wrong: str | None, model: Path, task: Task, monkeypatch: Patch) -> Task:
    """The task with a tiny model, whose answers are others wherever `tandem serve` is given the option `wrong`."""

    @contextmanager
    def serving(model: str, *options: str, **_: object) -> Any:
        yield wrong in options

    def scored(broken: bool, *_: object) -> Reference:
        texts = ["", "a", "ab", "abc"] if not broken else ["", "a", "aX", "aXY"]
        return Reference(texts, [2.0, 2.0, 2.0], 0.0, 0.01, "one rank's")

    monkeypatch.setattr(hosts, "serving", serving)
    monkeypatch.setattr(hosts, "scored", scored)
    monkeypatch.setattr(hosts, "rates", lambda *_: (5.0, 60.0))
    return msgspec.structs.replace(task, model=str(tiny_model(model)))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("-pp", "the answer of one rank from stages"),
        ("-tp", "3 tokens of one rank's, expected; another after 1"),
        ("--fast-sync", ""),
        (None, ""),
    ],
)
def test_layouts_of_hosts(wrong: str | None, words: str, cluster: Task, tmp_path: Path, monkeypatch: Patch) -> None:
    cluster = served_layouts(wrong, tmp_path / "tiny", cluster, monkeypatch)
    if words:
        differs(hosts.layouts, cluster, words)
    else:
        found = hosts.layouts(cluster)
        assert found["stages, 1 x 24: tokens/s"] == 5.0
        assert found["tensor parallelism, 1 x 24: prompt tokens/s"] == 60.0


def machine_profile(name: str, device: str) -> HostProfile:
    step = Step(weights="float32", gb_per_s=10, tflops=0.1, layer_us=50)
    return HostProfile(name=name, device=device, gpu=True, metal=True, memory_bytes=48 << 30, steps=[step])


def test_speeds_stand_beside_the_plan_which_rules_layouts_out(cluster: Task, tmp_path: Path, monkeypatch: Patch) -> None:
    cluster = msgspec.structs.replace(cluster, model=str(tiny_model(tmp_path / "tiny")), options={"prompts": [64, 9**9]})
    link = LinkProfile(
        hosts=("localhost", "mac-b"), backend="ring", fast_sync=False, sum_us=300, fence_us=180, sum_gb_per_s=1, hop_us=90,
        hop_gb_per_s=1, sums=[],
    )  # fmt: skip
    machines = [machine_profile(name, "Apple M4 Pro") for name in ("localhost", "mac-b")]
    profile = Profile(tandem_profile=1, versions=Versions(tandem="1", mlx="1"), hosts=machines, links=[link])
    (tmp_path / hosts.PROFILE).write_text(encode_profile(profile))
    monkeypatch.setattr(hosts, "serving", serves())
    monkeypatch.setattr(hosts, "scored", lambda *_: Reference(["a"], [], 0.0, 0.0))
    monkeypatch.setattr(hosts, "rates", lambda *_: (5.0, 60.0))
    monkeypatch.setattr(hosts, "MOST", 100)
    found = hosts.layouts(cluster)
    rows = {name.partition(":")[0] for name in found}
    limit = describe(resolve_model(cluster.model)).max_context - 100  # room for the answer
    assert rows == {
        f"{name}, {batch} x {length}"
        for name in ("one machine", "stages", "tensor parallelism")
        for batch in (1, 4)
        for length in (64, limit)
    }
    nominal, measured = (float(found[f"one machine, 1 x 64: tokens/s, {words}"]) for words in ("plan", "plan with profile"))
    assert nominal > measured > 0
    crowded = msgspec.structs.replace(profile, hosts=[msgspec.structs.replace(one, memory_bytes=9 << 20) for one in machines])
    (tmp_path / hosts.PROFILE).write_text(encode_profile(crowded))
    assert set(hosts.layouts(cluster)) == {f"{name}: left out" for name in ("one machine", "stages", "tensor parallelism")}


def test_deaths(cluster: Task, monkeypatch: Patch) -> None:
    with subprocess.Popen(["sleep", "600"]) as rank:
        try:
            server = Struck(rank)
            monkeypatch.setattr(hosts, "serving", serves(server))
            monkeypatch.setattr(hosts, "ask", lambda *_: SimpleNamespace(text="words"))
            monkeypatch.setattr(hosts, "all_under_way", lambda *_: [server])
            monkeypatch.setattr(hosts, "descendants", lambda _: set[int]())
            with pytest.raises(NotApplicable, match="no rank is on this machine"):
                hosts.deaths(cluster)
            monkeypatch.setattr(hosts, "descendants", lambda pid: {pid})
            monkeypatch.setattr(hosts, "BACK_S", 0.1)
            server.healthy = False
            differs(hosts.deaths, cluster, "ranks again within 0.1 s of death 1, expected; none")
        finally:
            rank.kill()
    with subprocess.Popen(["sleep", "600"]) as rank:
        try:
            server = Struck(rank)
            monkeypatch.setattr(hosts, "serving", serves(server))
            monkeypatch.setattr(hosts, "all_under_way", lambda *_: [server])
            monkeypatch.setattr(hosts, "BACK_S", 60.0)
            differs(hosts.deaths, cluster, "the same answer after death 1, expected; another")
        finally:
            rank.kill()


# ---- what is risky


def test_full_memory(task: Task, monkeypatch: Patch) -> None:
    if not mx.is_available(mx.gpu):
        with pytest.raises(NotApplicable, match="a CPU's memory"):
            risky.memory(task)
    monkeypatch.setattr("tandem.loading.memory.on_gpu", lambda: True)
    monkeypatch.setattr("tandem.loading.memory.memory_bytes", lambda: 2**31)
    ones = mx.ones

    def full(words: str) -> Callable[..., mx.array]:
        def make(shape: Any, *rest: Any) -> mx.array:
            if shape == (risky.STEP // 4,):
                raise RuntimeError(words)
            return ones(shape, *rest)

        return make

    monkeypatch.setattr(mx, "ones", full("[metal::malloc] Unable to allocate 9 bytes"))
    assert "Unable to allocate" in str(risky.memory(task)["exception"])
    monkeypatch.setattr(mx, "ones", full("odd words"))
    differs(risky.memory, task, "odd words, seen")
    small = ones(4)
    monkeypatch.setattr(mx, "ones", lambda *_: small)
    with pytest.raises(NotApplicable, match="4 times its memory without an exception"):
        risky.memory(task)


def test_fast_fences(task: Task, monkeypatch: Patch) -> None:
    with pytest.raises(NotApplicable, match="Metal's"):
        risky.fast_fences(task)
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setattr(risky, "this_device", lambda: type("Device", (), {"gpu": True}))
    monkeypatch.setattr(risky, "serving", serves())
    monkeypatch.setattr(risky, "sums", lambda fast_sync: {"us": 1.0} if fast_sync else {})
    assert risky.fast_fences(task)["us"] == 1.0

    def late(fast_sync: bool) -> Figures:
        raise RankFailure("ranks [0, 1] have not ended in time")

    monkeypatch.setattr(risky, "sums", late)
    differs(risky.fast_fences, task, "ranks [0, 1] have not ended in time, seen")


@pytest.mark.parametrize("wrong", ["--fast-sync", None])
def test_fast_fences_over_machines(wrong: str | None, cluster: Task, tmp_path: Path, monkeypatch: Patch) -> None:
    """A fault that only ranks with fast fences have, over the machines: sums of two ranks here are right."""
    cluster = served_layouts(wrong, tmp_path / "tiny", cluster, monkeypatch)
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setattr(risky, "this_device", lambda: SimpleNamespace(gpu=True))
    monkeypatch.setattr(risky, "serving", serves())
    monkeypatch.setattr(risky, "sums", lambda fast_sync: {"us": 1.0})
    if wrong:
        differs(risky.fast_fences, cluster, "3 tokens of one rank's, expected; another after 1")
    else:
        assert risky.fast_fences(cluster)["tensor parallelism, fast fences, 1 x 24: tokens/s"] == 5.0
