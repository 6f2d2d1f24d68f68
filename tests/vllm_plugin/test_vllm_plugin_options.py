"""Environment variables, when the plugin applies, layouts, and what a worker tells vLLM. Without vLLM."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import tandem.vllm_plugin as plugin
from tandem.errors import ConfigError, TransportError
from tandem.launchers.process_groups import free_ports
from tandem.vllm_plugin.params import check, translate
from tandem.vllm_plugin.rendezvous import Rendezvous, add_keys, free_port
from tandem.vllm_plugin.variables import DEVICES, Options, check_devices, read_options

NAMES = (
    "TANDEM_MEMORY_FRACTION",
    "VLLM_METAL_MEMORY_FRACTION",
    "TANDEM_BASE_PORT",
    "VLLM_METAL_RING_BASE_PORT",
    "TANDEM_LAYER_SPLIT",
    "VLLM_PP_LAYER_PARTITION",
    "TANDEM_DTYPE",
    "TANDEM_BLAS",
    "TANDEM_THREADS_PER_RANK",
)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NAMES, "TANDEM_VLLM"):
        monkeypatch.delenv(name, raising=False)


def test_nothing_set_is_the_default() -> None:
    assert read_options() == Options()


@pytest.mark.parametrize(
    ("name", "value", "field", "expected"),
    [
        ("VLLM_METAL_MEMORY_FRACTION", "0.5", "memory_fraction", 0.5),
        ("VLLM_METAL_MEMORY_FRACTION", "auto", "memory_fraction", None),
        ("TANDEM_MEMORY_FRACTION", "1", "memory_fraction", 1.0),
        ("VLLM_METAL_RING_BASE_PORT", "32323", "base_port", 32323),
        ("VLLM_PP_LAYER_PARTITION", "20,16", "layer_split", (20, 16)),
        ("TANDEM_THREADS_PER_RANK", "3", "threads", 3),
    ],
)
def test_names_of_vllm_metal_and_ours(monkeypatch: pytest.MonkeyPatch, name: str, value: str, field: str, expected: Any) -> None:
    monkeypatch.setenv(name, value)
    assert getattr(read_options(), field) == expected


def test_our_name_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_MEMORY_FRACTION", "0.25")
    monkeypatch.setenv("VLLM_METAL_MEMORY_FRACTION", "0.5")
    assert read_options().memory_fraction == 0.25


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("VLLM_METAL_MEMORY_FRACTION", "lots", "VLLM_METAL_MEMORY_FRACTION=lots is not a number"),
        ("TANDEM_MEMORY_FRACTION", "1.5", "above 0 and be at most 1"),
        ("VLLM_METAL_RING_BASE_PORT", "80", "1024 to 65535"),
        ("TANDEM_LAYER_SPLIT", "a,b", "layers per stage"),
    ],
)
def test_wrong_values_are_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str, words: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=words):
        read_options()


@pytest.mark.parametrize("value", [None, "0", "0,0"])
def test_the_one_device_may_be_named(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    monkeypatch.delenv(DEVICES, raising=False)
    if value is not None:
        monkeypatch.setenv(DEVICES, value)
    check_devices()


@pytest.mark.parametrize("value", ["1", "0,1", "first"])
def test_other_devices_are_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(DEVICES, value)
    with pytest.raises(ConfigError, match=f"VLLM_METAL_VISIBLE_DEVICES={value}: MLX has one device, number 0"):
        check_devices()


def test_the_plugin_applies_by_hardware_and_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"mlx": True, "vllm._C": False}
    monkeypatch.setattr(plugin, "find_spec", lambda name: found[name] or None)
    monkeypatch.setattr(sys, "platform", "linux")
    assert plugin.applies()
    found["vllm._C"] = True
    assert not plugin.applies()
    monkeypatch.setenv("TANDEM_VLLM", "1")
    assert plugin.applies()
    monkeypatch.setenv("TANDEM_VLLM", "0")
    assert plugin.register() is None


def vllm_params(**changes: Any) -> SimpleNamespace:
    values: dict[str, Any] = {
        "max_tokens": 9,
        "min_tokens": 1,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.3,
        "logit_bias": {3: 1.0},
        "seed": 4,
        "all_stop_token_ids": {7, 2},
        "ignore_eos": False,
        "logprobs": 2,
    }
    return SimpleNamespace(**{**values, **changes})


def test_sampling_parameters_keep_their_meaning() -> None:
    params = translate(vllm_params())
    assert (params.temperature, params.top_k, params.stop_token_ids, params.logprobs) == (0.5, 0, (2, 7), 2)
    assert (params.logit_bias, params.seed, params.min_tokens) == ({3: 1.0}, 4, 1)


@pytest.mark.parametrize(
    ("name", "value"),
    [("prompt_logprobs", 0), ("bad_words", ["x"]), ("allowed_token_ids", [1]), ("logprobs", -1), ("thinking_token_budget", 0)],
)
def test_what_is_not_supported_is_refused(name: str, value: object) -> None:
    check(vllm_params())
    with pytest.raises(ValueError, match="not supported by Tandem"):
        check(vllm_params(**{name: value}))


def engine_of(ranks: int, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(parallel_config=SimpleNamespace(world_size=ranks), additional_config=more)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What stands in the store, for whoever reaches its port to read and to write."""
    values: dict[str, str] = {}

    class Store:
        def __init__(self, *_: object) -> None:
            self.set = values.__setitem__

        def get(self, key: str) -> bytes:
            return values[key].encode()

    module = ModuleType("torch.distributed")
    module.FileStore = module.TCPStore = Store  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    monkeypatch.setitem(sys.modules, "torch.distributed", module)
    return values


def test_no_secret_stands_in_the_store_and_what_others_write_there_is_refused(store: dict[str, str]) -> None:
    engine = engine_of(2, tandem_units=1)
    add_keys(engine)
    placed = engine.additional_config
    add_keys(engine)  # vLLM may look at a configuration again
    assert engine.additional_config == placed
    second, first = (Rendezvous("file:///nowhere", rank, 2, placed) for rank in (1, 0))
    with pytest.raises(KeyError):
        second.gather("channel", "10.0.0.2:6")
    assert first.gather("channel", "10.0.0.1:5") == ["10.0.0.1:5", "10.0.0.2:6"]
    assert first.keys == second.keys
    secrets = (first.keys.bind_secret, first.keys.connect_secret)
    assert not any(secret in value for secret in secrets for value in store.values())
    store["tandem/channel/1"] = store["tandem/channel/1"].replace("10.0.0.2", "10.6.6.6")
    with pytest.raises(TransportError, match="channel of rank 1 was not written by this engine"):
        first.gather("channel", "10.0.0.1:5")


def test_an_engine_of_one_rank_has_no_keys() -> None:
    engine = engine_of(1)
    add_keys(engine)
    assert engine.additional_config == {}


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's range of ports for outgoing connections")
def test_a_ring_listens_where_no_outgoing_connection_is_put() -> None:
    given = range(*map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()))
    assert not any(free_port("127.0.0.1", given.start) in given for _ in range(20))


def test_a_port_that_firewalls_name_is_taken_where_it_is_free(caplog: pytest.LogCaptureFixture) -> None:
    [wanted] = free_ports(1, "0.0.0.0")
    assert free_port("0.0.0.0", wanted) == wanted and not caplog.records
    with socket.create_server(("0.0.0.0", wanted)):
        other = free_port("0.0.0.0", wanted)
    assert other != wanted
    assert f"Port {wanted} of 0.0.0.0 is in use: listening on {other}, which a firewall must let through" in caplog.text
