"""Measured speeds in place of assumed ones: `tandem plan --profile`, and layouts over the machines that remain."""

from __future__ import annotations

import copy
import json
import logging

import pytest

from tandem.cli.main import main
from tandem.config.settings import ModelSettings, ParallelSettings, Settings
from tandem.engine.build_layout import plan_layout
from tandem.engine.degrade import Alternatives
from tandem.errors import ConfigError
from tandem.planner.hardware import GIB
from tandem.protocol.control import Ready
from tandem.testing import tiny_model

HIDDEN = 512


def host(name, metal=True, **step):
    figures = {"weights": "float32", "gb_per_s": 100.0, "tflops": 5.0, "layer_us": 50.0} | step
    return {"name": name, "device": "a GPU", "gpu": metal, "metal": metal, "memory_bytes": 8 * GIB, "steps": [figures]}


def link(a, b, **figures):
    return {
        "hosts": [a, b],
        "backend": "ring",
        "fast_sync": False,
        "sum_us": 400.0,
        "fence_us": 150.0,
        "sum_gb_per_s": 1.0,
        "hop_us": 90.0,
        "hop_gb_per_s": 0.5,
        "sums": [],
    } | figures


def profile(hosts, links):
    return {"tandem_profile": 1, "versions": {"tandem": "0.1.0", "mlx": "0.30"}, "hosts": hosts, "links": links}


TWO = profile([host("a"), host("b")], [link("b", "a")])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(
        tiny_model(
            tmp_path_factory.mktemp("measured") / "tiny",
            layers=6,
            dtype="float32",
            config={
                "hidden_size": HIDDEN,
                "intermediate_size": 4096,
                "num_attention_heads": 8,
                "num_key_value_heads": 8,
                "head_dim": 64,
            },
        )
    )


@pytest.fixture
def planned(model, tmp_path, capsys):
    """`tandem plan` of one layout, with a profile: what it predicts and what it says."""

    def plan(content, *words, layout="tp=2", hosts=("--hosts", "a=8GB:m4", "b=8GB:m4")):
        file = tmp_path / "profile.json"
        file.write_text(json.dumps(content))
        assert main(["plan", model, *hosts, "--profile", str(file), "--layout", layout, "--context", "64", "--json", *words]) == 0
        answer = json.loads(capsys.readouterr().out)
        return answer["candidates"][0]["prediction"], " ".join(answer["notes"]).replace(str(file), "P")

    return plan


def test_a_sum_and_a_hop_take_what_was_measured(planned):
    message = HIDDEN * 4  # bytes of a row's hidden states in float32
    sums, said = planned(TWO)
    assert sums["collective"] == pytest.approx(400e-6 + message / 1e9)
    hops, _ = planned(TWO, layout="pp=2")
    assert hops["communication"] == pytest.approx(2 * 90e-6 + message / 0.5e9)
    assert said == "P gives the speed of a, b. Measured links over ring: a - b."


def test_a_step_takes_what_was_measured(planned, model):
    one = profile([host("a", gb_per_s=0.001, layer_us=1000.0)], [])
    slow, _ = planned(one, layout="single", hosts=("--hosts", "a=8GB:m4"))
    fast, _ = planned(TWO, layout="single", hosts=("--hosts", "a=8GB:m4"))
    weights = 4 * 6 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * 4096)
    assert slow["step_single"] > weights / 1e6 + 6e-3  # and the head and the KV
    assert fast["step_single"] == pytest.approx(slow["step_single"] / 1e5, rel=0.5)


def test_what_a_profile_does_not_know_is_assumed_and_named(planned):
    _, said = planned(TWO, "--link", "10gbe", layout="tp=3 machines=a,b,c", hosts=("--hosts", "a=8GB:m4", "b=8GB:m4", "c=8GB:m4"))
    assert "P does not know c: what is given or assumed of such a host is counted." in said
    assert "P has no link a - c, b - c over ring" in said
    assert "180 us for its own GPU" in said  # counted where no fence was measured
    alone, said = planned(profile([host("a"), host("b")], []), "--link", "10gbe")
    assert alone["collective"] > 2 * 100e-6 + 180e-6
    assert "no link a - b" in said


def test_the_fence_that_is_set_is_counted_where_another_was_measured(planned):
    with_fence, _ = planned(TWO)
    fast, said = planned(TWO, "--fast-sync", "auto")
    assert with_fence["collective"] - fast["collective"] == pytest.approx(146e-6)
    assert "measured without fast fences, and planned with them; a fence of 4 us is assumed" in said
    both = profile(TWO["hosts"], [*TWO["links"], link("a", "b", fast_sync=True, sum_us=260.0, fence_us=10.0)])
    fast, said = planned(both, "--fast-sync", "auto")
    assert fast["collective"] == pytest.approx(260e-6 + HIDDEN * 4 / 1e9)
    assert "assumed" not in said


def test_what_is_given_by_hand_stays(planned):
    given, said = planned(TWO, "--link", "a,b=10gbe:latency=1000", hosts=("--hosts", "a=8GB:m4:bandwidth=1:tflops=1", "b=8GB:m4"))
    assert given["collective"] > 2e-3
    assert "Measured links" not in said
    assert "P gives the speed of b." in said


def test_a_profile_brings_its_own_hosts(planned, model, tmp_path, capsys):
    _, said = planned(TWO, hosts=())
    assert "assumed" not in said
    file = tmp_path / "a profile.json"
    file.write_text(json.dumps(TWO))
    assert main(["plan", model, "--profile", str(file), "--layout", "tp=2", "--context", "64"]) == 0
    out = capsys.readouterr().out
    assert "Estimates from measured figures" in out
    assert "tandem hosts write hosts.json a b\n" in out
    assert f"tandem serve {model} --hardware-profile '{file}' --hostfile hosts.json --tensor-parallel-size 2" in out


def test_another_type_of_weights_is_said(planned):
    other = profile([host("a", weights="4bit"), host("b", weights="float32")], [link("a", "b")])
    _, said = planned(other)
    assert "a was measured with weights of 4bit, not of float32." in said
    assert "b was measured" not in said


def broken(**changes):
    content = copy.deepcopy(TWO)
    for path, value in changes.items():
        place = content
        *steps, last = path.split("__")
        for step in steps:
            place = place[int(step) if step.isdigit() else step]
        place[last] = value
    return json.dumps(content)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read: No such file or directory; `tandem bench comm --write-profile FILE` writes one"),
        ("{", "is no profile of `tandem bench comm`: Input data was truncated"),
        ("[1]", "is no profile of `tandem bench comm`: Expected `object`, got `array`"),
        ('{"tandem_profile": 1}', "missing required field `versions`"),
        (broken(tandem_profile=2), "has version 2, and this Tandem reads version 1; write it anew"),
        (broken(colour="red"), "unknown field `colour`"),
        (broken(links__0__sum_us=0), "Expected `float` >= 1e-09 - at `$.links[0].sum_us`"),
        (broken(hosts__0__steps__0__tflops=5e-324), "Expected `float` >= 1e-09 - at `$.hosts[0].steps[0].tflops`"),
        (broken(hosts=[host("a\x1b[2J")], links=[]), r"host 'a\x1b[2J': the name has characters that cannot be printed"),
        (broken(hosts=[host(f"h{i}") for i in range(65)], links=[]), "has 65 hosts; leave all out but the 64"),
        (broken(links__0__hop_gb_per_s="fast"), "Expected `float`, got `str`"),
        (broken(links__0__backend="carrier pigeon"), "Invalid enum value 'carrier pigeon'"),
        (broken(links__0__hosts=["a", "c"]), "a link names c, which is not one of its hosts (a, b)"),
        (broken(links=[link("a", "b"), link("b", "a")]), "the link b-a over ring is there twice"),
        (broken(hosts=[host("a"), host("a")]), "host 'a' is there twice"),
        (broken(hosts__0__steps=[]), "`array` of length >= 1"),
        (broken(hosts__0__steps=2 * host("a")["steps"]), "host a has float32 twice"),
        (broken(hosts__0__memory_bytes=-1), "Expected `int` >= 1"),
        ("[" * 100_000, "is no profile of `tandem bench comm`"),
    ],
)
def test_bad_profiles_are_refused_in_one_line(model, tmp_path, capsys, text, words):
    file = tmp_path / "profile.json"
    if text is not None:
        file.write_text(text)
    assert main(["plan", model, "--profile", str(file)]) == 2
    error = capsys.readouterr().err
    assert f"--profile {file}: " in error and words in error
    assert len(error.splitlines()) == 1
    with pytest.raises(ConfigError, match=r"--hardware-profile .*profile\.json: "):
        plan_layout(Settings(model=ModelSettings(model=model), parallel=ParallelSettings(hardware_profile=str(file))))


def ready(rank, **more):
    return Ready(
        rank=rank,
        weight_bytes=1,
        kv_bytes_per_token=1,
        memory_bytes=8 * GIB,
        peak_bytes=1,
        gpu=False,
        host="vm",
        pid=1,
        trimmable=True,
        **more,
    )


@pytest.mark.parametrize(
    ("figures", "sizes"),
    [
        ({"sum_us": 10.0, "fence_us": 0.0, "sum_gb_per_s": 100.0}, (2,)),
        ({"sum_us": 50_000.0, "fence_us": 0.0, "hop_us": 10.0}, (1,)),
    ],
)
def test_what_remains_is_laid_out_by_measured_speeds(model, tmp_path, caplog, figures, sizes):
    """The same machines, whose sums are quick or slow: they share layers, or one of them has all."""
    names = ["a", "b", "c"]
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps([{"ssh": name} for name in names]))
    measured = tmp_path / "profile.json"
    measured.write_text(
        json.dumps(
            profile([host(name, metal=False, gb_per_s=1.0, layer_us=1.0) for name in names[:2]], [link("a", "b", **figures)])
        )
    )
    settings = Settings(
        model=ModelSettings(model=model),
        parallel=ParallelSettings(pipeline_parallel_size=3, hostfile=str(hosts), hardware_profile=str(measured)),
    )
    alternatives = Alternatives(settings, plan_layout(settings), [ready(rank) for rank in range(3)])
    measured.unlink()  # it was read when the engine started
    caplog.set_level(logging.INFO, logger="tandem")
    found = alternatives.next([0, 1])
    assert found.layout.ranks[0].stage_sizes == sizes
    assert "gives the speed of a, b." in caplog.text
    assert "Measured links over ring: a - b." in caplog.text
    caplog.clear()
    alternatives.next([0, 2])
    assert "does not know c: " in caplog.text


def test_what_remains_of_macs_is_laid_out_with_the_fence_that_is_set(model, tmp_path, caplog):
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps([{"ssh": name} for name in "abc"]))
    caplog.set_level(logging.INFO, logger="tandem")
    for fast, words in (("off", "waits 180 us"), ("auto", "waits 4 us")):
        settings = Settings(
            model=ModelSettings(model=model),
            parallel=ParallelSettings(pipeline_parallel_size=3, hostfile=str(hosts), fast_sync=fast),
        )
        facts = [ready(rank, metal=True) for rank in range(3)]
        assert Alternatives(settings, plan_layout(settings), facts).next([0, 1]) is not None
        assert words in caplog.text
