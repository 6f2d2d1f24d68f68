"""What a rank asks of MLX's allocator on a Mac, told from its calls: no Metal is at hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tandem.errors import ConfigError
from tandem.loading import memory

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
        return mlx

    return make


def test_the_weights_alone_are_wired_after_what_was_freed_is_given_back(mac):
    mlx = mac(active=20)
    assert memory.wire_weights(None, 0.85) == 20 * GIB
    assert mlx.calls == [("clear_cache",), ("set_wired_limit", 20 * GIB)]


@pytest.mark.parametrize("installed", MACS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_ranks_of_a_mac_together_never_wire_what_the_mac_needs_itself(mac, installed, ranks):
    mac(installed, active=1000)
    wired = memory.wire_weights(None, 1.0 / ranks) * ranks
    assert wired <= MACS[installed] * GIB
    assert wired <= installed * GIB - max(8 * GIB, installed * GIB // 4)
    assert wired >= 0


def test_a_size_of_the_users_own_is_a_limit_and_off_means_off(mac):
    mlx = mac(active=20)
    assert memory.wire_weights(5 * GIB, 0.85) == 5 * GIB
    assert memory.wire_weights(1000 * GIB, 0.85) == 20 * GIB
    del mlx.calls[:]
    assert memory.wire_weights(0, 0.85) == 0
    assert mlx.calls == []


@pytest.mark.parametrize("how", [{"gpu": False}, {"metal": False}])
def test_nothing_is_wired_on_a_cpu_or_another_gpu(mac, how):
    mlx = mac(**how)
    assert memory.wire_weights(None, 0.85) == 0
    assert mlx.told("set_wired_limit") == []


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
