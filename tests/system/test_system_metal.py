"""Metal's memory, and its errors, without Metal."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from macs import answers, mac_environment, recorded
from tandem.system.metal import GIB, fault_of, gpu_memory

FAILED = "[METAL] Command buffer execution failed:"
ASK = """
import json, os
from tandem.system.metal import prepare_metal, usable_memory
from tandem.env import machine_memory
prepare_metal()
print(json.dumps([usable_memory(), machine_memory(), os.environ.get("MLX_METAL_RESIDENCY_REFRESH_INTERVAL_MS")]))
"""


def asked(environment: dict[str, str]) -> list:
    done = subprocess.run([sys.executable, "-c", ASK], env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize(("installed", "usable"), [(8, 5.3), (16, 10.7), (24, 16), (36, 27), (64, 48), (512, 384)])
def test_a_gpu_has_two_thirds_of_a_small_macs_memory_and_three_quarters_of_a_large_ones(installed, usable):
    assert gpu_memory(installed * GIB) == pytest.approx(usable * GIB, rel=0.01)


def test_a_mac_tells_the_memory_of_its_gpu_and_not_what_is_installed(tmp_path):
    usable, installed, refresh = asked(mac_environment(tmp_path))
    assert usable == gpu_memory(installed) < installed
    assert refresh == "1000"


def test_a_limit_that_the_user_has_raised_counts(tmp_path):
    answers(tmp_path, {"sysctl": recorded("sysctl").replace("iogpu.wired_limit_mb=0", "iogpu.wired_limit_mb=120000")})
    assert asked(mac_environment(tmp_path))[0] == 120000 * 2**20


def test_a_refresh_interval_of_the_users_own_wins(tmp_path):
    name = "MLX_METAL_RESIDENCY_REFRESH_INTERVAL_MS"
    assert asked(mac_environment(tmp_path, **{name: "0"}))[2] == "0"


def test_without_sysctl_nothing_fails(tmp_path):
    answers(tmp_path, {"sysctl": ""})
    usable, installed, _ = asked(mac_environment(tmp_path))
    assert usable == gpu_memory(installed)


@pytest.mark.parametrize(("words", "fault"), [
    (f"{FAILED} Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)", "memory"),
    ("[metal::malloc] Unable to allocate 21474836480 bytes.", "memory"),
    ("[metal::malloc] Resource limit (499000) exceeded.", "memory"),
    (f"{FAILED} Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout)", "timeout"),
    (f"{FAILED} Ignored (for causing prior/excessive GPU errors)", None),
    ("weight model.layers.0 is missing", None)])
def test_metals_errors_are_told_apart(words, fault):
    assert fault_of(words) == fault
