"""What a rank asks of MLX's allocator on a Mac, told from its calls: no Metal is at hand."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from tandem.errors import ConfigError
from tandem.loading import memory
from tandem.system import metal

GIB = 2**30
MACS = {8: 5.3, 16: 10.7, 24: 16.0, 36: 27.0, 64: 48.0, 128: 107.5, 512: 464.0}
"""Installed GiB, and GiB that Metal recommends (on the last two, as newer systems report)."""


class Mlx:
    """MLX on a GPU, or without one, that keeps what it is told."""

    gpu, cpu = "gpu", "cpu"
    DeviceType = SimpleNamespace(gpu="gpu", cpu="cpu")

    def __init__(self, *, gpu: bool = True, metal: bool = True, recommended: float = 48, active: float = 20) -> None:
        self.device, self.calls = ("gpu" if gpu else "cpu"), []
        self.metal = SimpleNamespace(is_available=lambda: metal)
        self.recommended, self.active = int(recommended * GIB), int(active * GIB)

    def default_device(self):
        return SimpleNamespace(type=self.device)

    def set_default_device(self, device):
        self.device = device

    def is_available(self, device):
        return device == "cpu" or self.metal.is_available()

    def device_info(self):
        return {"max_recommended_working_set_size": self.recommended}

    def get_active_memory(self):
        return self.active

    def __getattr__(self, name):
        if not name.startswith(("set_", "clear_")):
            raise AttributeError(name)
        return lambda *given: self.calls.append((name, *given))

    def told(self, name):
        return [call[1] for call in self.calls if call[0] == name]


@pytest.fixture
def mac(monkeypatch):
    def make(installed=64, **how):
        mlx = Mlx(recommended=MACS[installed], **how)
        monkeypatch.setattr(memory, "mx", mlx)
        monkeypatch.setattr(memory, "machine_memory", lambda: installed * GIB)
        monkeypatch.setattr(memory, "wires_memory", lambda: True)
        return mlx

    return make


class Buffers(Mlx):
    """MLX's allocator and its residency set on Metal (0.32.4), as `allocator.cpp` and `resident.cpp` have them.

    Arrays of at most 256 bytes are in a heap of 1 MiB. The allocator counts bytes, in whole pages above one page; the
    set counts pages. A new limit has a dict of what is not wired walked in its own order, and what does not fit is
    left out. A new buffer enters the set if it fits.
    """

    def __init__(self, sizes, order: random.Random, **how) -> None:
        super().__init__(**how)
        self.buffers: dict[object, int] = {"heap": HEAP}
        self.active, self.wired, self.limit = 0, {}, 0
        for name, size in enumerate(sizes):
            self.active += size if size <= PAGE else pages(size)
            if size > 256:
                self.buffers[name] = pages(size)
        self.order = order

    def set_wired_limit(self, limit):
        super().__getattr__("set_wired_limit")(limit)
        self.limit = limit
        names = list(self.buffers)
        self.order.shuffle(names)  # an unordered_map of pointers
        for name in names:
            if sum(self.wired.values()) + self.buffers[name] <= limit:
                self.wired[name] = self.buffers[name]

    def enters(self, size: int) -> bool:
        """True if a new buffer would become part of the wired set."""
        return sum(self.wired.values()) + pages(size) <= self.limit


def pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


PAGE, HEAP = 16384, 1 << 20


def sizes_of(hidden: int, inner: int, layers: int, head: int = 128, kv: int = 8, vocabulary: int = 1000) -> list[int]:
    """Bytes of the arrays of a model in 4 bits, groups of 64, with norms of heads and one odd tensor."""
    found = [2 * hidden, 777_777, 4 * head // 2]
    for _ in range(layers):
        for rows, columns in (
            (hidden, hidden),
            (kv * head, hidden),
            (kv * head, hidden),
            (hidden, hidden),
            (inner, hidden),
            (inner, hidden),
            (hidden, inner),
        ):
            found += [rows * columns // 2, rows * columns // 32, rows * columns // 32]
        found += [2 * hidden, 2 * hidden, 2 * head, 2 * head]
    return [*found, vocabulary * hidden // 2, vocabulary * hidden // 32, vocabulary * hidden // 32]


def arrays(sizes):
    return [SimpleNamespace(nbytes=size) for size in sizes]


WEIGHTS = arrays([2 * GIB] * 10)
SET = 20 * GIB + HEAP


@pytest.mark.parametrize("active", ["as MLX counts it", "bytes alone"])
def test_all_weights_and_nothing_else_are_wired_whatever_the_order_of_the_set(monkeypatch, active):
    """With the sum of bytes for a limit, some tensor was left out in every order, and temporaries took its place."""
    sizes, order = sizes_of(4096, 12288, 3), random.Random(7)
    bytes_alone = sum(sizes)
    for _ in range(3000):
        mlx = Buffers(sizes, order, recommended=107.5)
        if active == "bytes alone":
            mlx.active = bytes_alone
        monkeypatch.setattr(memory, "mx", mlx)
        monkeypatch.setattr(memory, "machine_memory", lambda: 128 * GIB)
        monkeypatch.setattr(memory, "wires_memory", lambda: True)
        assert memory.wire_weights(arrays(sizes), None, 0.85).trouble == ""
        assert mlx.wired.keys() == mlx.buffers.keys()
        assert not mlx.enters(257)


def test_the_stand_in_leaves_something_out_with_the_sum_of_bytes():
    """So that the test before cannot pass by a stand-in that takes everything."""
    sizes, order = sizes_of(4096, 12288, 3), random.Random(7)
    for _ in range(100):
        mlx = Buffers(sizes, order)
        mlx.set_wired_limit(mlx.get_active_memory())
        assert mlx.wired.keys() < mlx.buffers.keys()


def test_arrays_that_share_a_buffer_and_tables_of_no_file_count_once():
    assert memory.resident_size([3 * PAGE] * 4, 3 * PAGE) == 3 * PAGE + HEAP
    assert memory.resident_size([3 * PAGE, 300, 200], 3 * PAGE + 500) == 4 * PAGE + HEAP
    assert memory.resident_size([3 * PAGE], 3 * PAGE + 100) == 4 * PAGE + HEAP


def test_the_weights_alone_are_wired_after_what_was_freed_is_given_back(mac):
    mlx = mac(active=20)
    assert memory.wire_weights(WEIGHTS, None, 0.85) == (SET, "")
    assert mlx.calls == [("clear_cache",), ("set_wired_limit", SET)]


@pytest.mark.parametrize("installed", MACS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_ranks_of_a_mac_together_never_wire_what_the_mac_needs_itself(mac, installed, ranks):
    mac(installed, active=1000)
    found = memory.wire_weights(arrays([GIB] * 1000), None, 1.0 / ranks)
    wired = found.bytes * ranks
    assert wired <= MACS[installed] * GIB
    assert wired <= installed * GIB - max(8 * GIB, installed * GIB // 4)
    assert wired >= 0
    assert f"{found.bytes / GIB:.1f} of 1000.0 GiB of weights are wired" in found.trouble


def test_a_size_of_the_users_own_is_a_limit_and_off_means_off(mac):
    mlx = mac(active=20)
    assert memory.wire_weights(WEIGHTS, 5 * GIB, 0.85) == (5 * GIB, "")
    assert memory.wire_weights(WEIGHTS, 1000 * GIB, 0.85) == (SET, "")
    del mlx.calls[:]
    assert memory.wire_weights(WEIGHTS, 0, 0.85) == (0, "")
    assert mlx.calls == []


@pytest.mark.parametrize("how", [{"gpu": False}, {"metal": False}])
def test_nothing_is_wired_on_a_cpu_or_another_gpu(mac, how):
    mlx = mac(**how)
    assert memory.wire_weights(WEIGHTS, None, 0.85) == (0, "")
    assert mlx.told("set_wired_limit") == []


@pytest.mark.parametrize(("version", "wires"), [("14.7.1", False), ("15.0", True), ("26.3", True), ("", False)])
def test_macos_14_wires_nothing_and_that_is_said(mac, monkeypatch, version, wires):
    monkeypatch.setattr(metal.platform, "mac_ver", lambda: (version, ("", "", ""), "arm64"))
    assert metal.wires_memory() == wires
    mlx = mac(active=20)
    monkeypatch.setattr(memory, "wires_memory", metal.wires_memory)
    found = memory.wire_weights(WEIGHTS, None, 0.85)
    assert (found.bytes, mlx.told("set_wired_limit")) == ((SET, [SET]) if wires else (0, []))
    assert ("macOS 14 wires no memory" in found.trouble) != wires


def test_what_a_cpu_takes_is_not_limited(mac):
    mlx = mac(gpu=False)
    memory.limit_memory(0.85, 1)
    assert mlx.told("set_memory_limit") == []


@pytest.mark.parametrize(("share", "sharing", "part"), [(0.85, 1, 0.95), (0.425, 2, 0.475), (0.3, 1, 0.45)])
def test_ranks_of_an_nvidia_gpu_leave_cuda_its_part(mac, share, sharing, part):
    mlx = mac(metal=False)
    memory.limit_memory(share, sharing)
    assert mlx.told("set_memory_limit") == [pytest.approx(48 * GIB * part, rel=1e-6)]


@pytest.mark.parametrize("installed", MACS)
def test_two_ranks_of_a_mac_do_not_take_its_memory_twice(mac, installed):
    mlx = mac(installed)
    memory.limit_memory(0.425, 2)
    assert mlx.told("set_memory_limit") == [pytest.approx(MACS[installed] * GIB / 2, rel=1e-6)]
    assert mlx.told("set_cache_limit") == [memory.cache_bytes(2)]
    assert 2 * memory.cache_bytes(2) <= min(2, MACS[installed] / 16) * GIB


@pytest.mark.parametrize(("share", "sharing"), [(0.85, 1), (0.425, 2), (0.0001, 1)])
def test_ranks_of_a_machine_take_at_most_what_is_named(mac, share, sharing):
    mac()
    whole = memory.memory_bytes()
    try:
        memory.limit_memory(share, sharing, "10GB")
        assert memory.memory_bytes() * share * sharing == pytest.approx(min(10 * GIB, whole * share * sharing))
    finally:
        memory.limit_memory(share, sharing)
    assert memory.memory_bytes() == whole


def test_the_device_is_what_is_asked_for(mac):
    mlx = mac()
    memory.choose_device("auto")
    assert memory.on_gpu()
    memory.choose_device("cpu")
    assert not memory.on_gpu()
    memory.choose_device("gpu")
    assert memory.on_metal()
    assert mlx.device == "gpu"


def test_a_machine_may_say_what_its_ranks_compute_on(mac, monkeypatch):
    mac()
    monkeypatch.setenv("TANDEM_DEVICE", "cpu")
    memory.choose_device("auto")
    assert not memory.on_gpu()
    memory.choose_device("gpu")
    assert memory.on_gpu()
    monkeypatch.setenv("TANDEM_DEVICE", "tpu")
    with pytest.raises(ConfigError, match="TANDEM_DEVICE: 'tpu' is not one of auto, cpu, gpu"):
        memory.choose_device("auto")


def test_a_gpu_that_is_not_there_is_named(mac):
    mac(gpu=False, metal=False)
    with pytest.raises(ConfigError, match="--device gpu: MLX has no GPU on this machine"):
        memory.choose_device("gpu")
