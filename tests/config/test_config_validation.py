"""Ranges and what must agree between fields."""

from __future__ import annotations

import pytest

from tandem.config.loading import build, load
from tandem.config.options import options
from tandem.config.settings import ProcessSettings, SchedulerSettings, Settings
from tandem.config.sizes import counted_memory, wired_bytes
from tandem.config.validation import api_keys, is_loopback, validate
from tandem.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", 65536), ("port", -1), ("max_batch_size", 0), ("memory_fraction", 0.0), ("memory_fraction", 1.1),
        ("memory_fraction", float("nan")), ("step_timeout", float("inf")), ("step_timeout", 0.0),
        ("layer_split", (0,)), ("max_restarts", -1), ("max_restarts", 10**400), ("prefix_cache", 1.5), ("host", ""),
        ("served_name", ""),
        ("api_key", ("good", " ")), ("tensor_parallel_size", 0), ("tensor_split", (1.0, -1.0)),
        ("data_parallel_size", 1000),
    ],
)  # fmt: skip
def test_out_of_range(name, value):
    with pytest.raises(ConfigError) as caught:
        validate(build({name: value}))
    assert caught.value.param == name
    assert caught.value.message.startswith("--" + name.replace("_", "-"))


@pytest.mark.parametrize("option", [o for o in options() if o.base in (int, float)], ids=lambda option: option.name)
def test_every_number_has_a_range(option):
    value = (-1,) if option.repeated else -1
    with pytest.raises(ConfigError):
        validate(build({option.name: value}))


def test_layer_split_must_fit_the_stages():
    validate(build({"layer_split": (2, 3), "pipeline_parallel_size": 2}))
    validate(build({"layer_split": (2, 3), "parallel": (2, 1)}))
    with pytest.raises(ConfigError, match=r"--layer-split: 2,3 is for 2 .*--pipeline-parallel-size asks for 3"):
        validate(build({"layer_split": (2, 3), "pipeline_parallel_size": 3}))


@pytest.mark.parametrize(("roles", "changes", "words"), [
    ("prefill", {}, "has nobody to decode; make one of them decode or both"),
    ("decode,decode", {}, "has nobody to prefill"),
    ("prefill,decode", {"data_parallel_size": 3}, r"is for 2 replica\(s\), but --data-parallel-size asks for 3"),
    ("prefill,decode", {"kv_disk": None}, "needs --kv-disk DIR"),
    ("prefill,decode", {"draft_model": "small"}, "with --draft-model: a draft model's KV does not go"),
    ("", {"data_parallel_size": 1}, "is not one of prefill, decode, both"),
])  # fmt: skip
def test_roles_need_counterparts_replicas_and_a_disk(roles, changes, words):
    values = {"data_parallel_size": len(roles.split(",")), "kv_disk": "kv", **changes}
    with pytest.raises(ConfigError, match=f"^--roles: .*{words}"):
        load({"roles": [roles]} | {key: [str(value)] for key, value in values.items() if value is not None})


def test_a_limit_of_the_kv_directory_needs_one():
    with pytest.raises(ConfigError, match="^--kv-disk-gb: limits the directory of --kv-disk, which is not set; add"):
        load({"kv_disk_gb": ["20"]})
    assert load({"kv_disk_gb": ["20"], "kv_disk": ["kv"]}).settings.scheduler.kv_disk_gb == 20


def test_roles_that_can_be():
    for roles in ("prefill,decode", "prefill,both", "decode,both", "both,both", "Prefill, decode"):
        assert load({"roles": [roles], "data_parallel_size": ["2"], "kv_disk": ["kv"]}).settings.parallel.roles
    assert load({"roles": ["both,both"], "data_parallel_size": ["2"]}).settings.parallel.roles == ("both", "both")


def test_open_server_warns():
    assert "0.0.0.0" in validate(build({"host": "0.0.0.0"}))[0]
    assert validate(build({"host": "0.0.0.0", "api_key": ("k",)})) == []
    assert validate(build({"host": "::1"})) == []


def test_loopback():
    assert all(map(is_loopback, ("127.0.0.1", "127.1.2.3", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.168.1.2", "mac.local")))


def test_key_file(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# mine\none\n\n two \n")
    file.chmod(0o600)
    assert list(api_keys(build({"api_key_file": str(file)}))) == ["one", "two"]
    assert load({"api_key_file": [str(file)], "host": ["0.0.0.0"]}).warnings == ()
    file.chmod(0o644)
    (warning,) = load({"api_key_file": [str(file)]}).warnings
    assert "chmod 600" in warning
    assert "one" not in warning.split(str(file))[0]


def test_key_files_that_cannot_be(tmp_path):
    empty = tmp_path / "empty"
    empty.write_text("\n# nothing\n")
    for path in (str(empty), str(tmp_path / "none"), str(tmp_path)):
        with pytest.raises(ConfigError, match="--api-key-file"):
            load({"api_key_file": [path]})


def test_remote_code_warns():
    assert "will run" in load({"trust_remote_code": ["yes"]}).warnings[0]


@pytest.mark.parametrize(("text", "size"), [("auto", None), ("off", 0), ("40GB", 40 << 30), ("1.5 GiB", 3 << 29)])
def test_what_is_wired_is_a_word_or_a_size(text, size):
    validate(Settings(scheduler=SchedulerSettings(wired=text)))
    assert wired_bytes(text) == size


def test_most_memory_is_a_size():
    with pytest.raises(ConfigError, match="--max-memory: 'half' is not a memory size such as 64GB"):
        validate(Settings(scheduler=SchedulerSettings(max_memory="half")))
    assert counted_memory(64 << 30, 0.5, "16GB") == 32 << 30 and counted_memory(8 << 30, 0.5, "16GB") == 8 << 30


@pytest.mark.parametrize("text", ["much", "", "0", "-1GB"])
def test_another_word_is_refused(text):
    with pytest.raises(ConfigError, match=r"--wired: .* is not a memory size such as 64GB; give auto, off or a size"):
        validate(Settings(scheduler=SchedulerSettings(wired=text)))


def test_a_socket_that_macos_could_not_bind_is_refused_everywhere():
    validate(Settings(process=ProcessSettings(engine_socket="/" + "s" * 97)))
    with pytest.raises(ConfigError, match=r"--engine-socket: /s+ has 99 bytes, and macOS takes 98"):
        validate(Settings(process=ProcessSettings(engine_socket="/" + "s" * 98)))
