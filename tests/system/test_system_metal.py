"""Metal's memory, and its errors, without Metal."""

from __future__ import annotations

import json
import os
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


FENCES = """
import json, os
from tandem.system.metal import prepare_metal
prepare_metal({fast}, {sums})
print(json.dumps([os.environ.get(one) for one in
                  ("MLX_METAL_FAST_SYNCH", "MLX_MAX_OPS_PER_BUFFER", "MLX_MAX_MB_PER_BUFFER")]))
"""


def fences(fast: bool, environment: dict[str, str], sums: int = 0) -> tuple[list, str]:
    done = subprocess.run(
        [sys.executable, "-c", FENCES.format(fast=fast, sums=sums)], env=environment, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout), done.stderr


def test_fast_fences_are_as_the_setting_says_whatever_the_environment_does(tmp_path):
    assert fences(False, mac_environment(tmp_path)) == ([None, None, None], "")
    found, said = fences(True, mac_environment(tmp_path))
    assert found == ["1", "20", "50"] and "only a restart of the Mac frees it" in said
    small = {"MLX_MAX_OPS_PER_BUFFER": "5", "MLX_MAX_MB_PER_BUFFER": "2000"}
    assert fences(True, mac_environment(tmp_path, **small))[0] == ["1", "5", "50"]
    found, said = fences(False, mac_environment(tmp_path, MLX_METAL_FAST_SYNCH="1"))
    assert found[0] == "0" and "--fast-sync on is how to ask for it" in said and "ms a token" not in said


def test_the_rank_that_reports_it_tells_what_fast_fences_would_gain_where_they_are_asked_for(tmp_path):
    """For Kimi K2.5, with 61 layers."""
    assert fences(False, mac_environment(tmp_path), sums=122) == ([None, None, None], "")
    _, said = fences(False, mac_environment(tmp_path, MLX_METAL_FAST_SYNCH="1"), sums=122)
    assert said.count("--fast-sync on is how to ask for it, and would save 21.5 ms a token in 122 sums over ranks") == 1


def test_off_macos_fast_fences_are_told_to_have_no_effect():
    found, said = fences(True, {name: value for name, value in os.environ.items() if not name.startswith("MLX_")})
    assert found == [None, None, None] and "on this machine it has no effect" in said


def test_a_refresh_interval_of_the_users_own_wins(tmp_path):
    name = "MLX_METAL_RESIDENCY_REFRESH_INTERVAL_MS"
    assert asked(mac_environment(tmp_path, **{name: "0"}))[2] == "0"


def test_without_sysctl_nothing_fails(tmp_path):
    answers(tmp_path, {"sysctl": ""})
    usable, installed, _ = asked(mac_environment(tmp_path))
    assert usable == gpu_memory(installed)


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (f"{FAILED} Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)", "memory"),
        ("[metal::malloc] Unable to allocate 21474836480 bytes.", "memory"),
        ("[metal::malloc] Resource limit (499000) exceeded.", "memory"),
        (f"{FAILED} Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout)", "timeout"),
        (f"{FAILED} Ignored (for causing prior/excessive GPU errors)", None),
        ("weight model.layers.0 is missing", None),
    ],
)
def test_metals_errors_are_told_apart(words, fault):
    assert fault_of(words) == fault
