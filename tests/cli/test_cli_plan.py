from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from planted_head import add_mtp_head
from tandem.cli.main import build_parser, main
from tandem.config.settings import ModelSettings, ParallelSettings, Settings
from tandem.config.sizes import memory_size
from tandem.engine.build_layout import plan_layout
from tandem.errors import ConfigError
from tandem.launchers.agent.trust import Peer, Trust
from tandem.models.footprint import rank_position, rank_states, rank_weights
from tandem.planner.explain import Named, commands
from tandem.planner.hardware import CHIPS, GIB, machine
from tandem.planner.hosts import Hosts, read_hosts, read_links, this_name
from tandem.testing import tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_model(tmp_path_factory.mktemp("plan") / "tiny", layers=6))


@pytest.mark.parametrize(
    ("text", "size"),
    [("64GB", 64 * GIB), ("64GiB", 64 * GIB), ("64g", 64 * GIB), ("512MB", 2**29), ("1.5TB", 1536 * GIB), ("2000000", 2000000)],
)
def test_memory_sizes(text, size):
    assert memory_size(text, "host a") == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "0", "64XB", "nan", "1e9", "24"])
def test_bad_memory_sizes(text):
    with pytest.raises(ConfigError, match="host a"):
        memory_size(text, "host a")


def test_hosts_with_presets_and_measured_figures():
    hosts = read_hosts(["a=64GB:m4-max", "b=128GB:m4-max:gpu=112GB,c=24GB:cpu:bandwidth=40:tflops=0.5", "d=36GB"], None)
    a, b, c, d = hosts.machines
    assert (a.name, a.memory, a.bandwidth, a.measured) == ("a", 48 * GIB, 546e9, False)
    assert b.memory == 112 * GIB
    assert (c.memory, c.gpu, c.bandwidth, c.flops, c.measured) == (24 * GIB, False, 40e9, 0.5e12, True)
    assert d.chip == "m4-pro"
    assert hosts.notes == ["host d: no chip is given, m4-pro is assumed."]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("a", "write NAME=MEMORY"),
        ("=64GB", "write NAME=MEMORY"),
        ("a=lots", "'lots' is not a memory size"),
        ("a=64GB:m4-max:m3", "'m3' is not"),
        ("a=64GB:colour=red", "'colour=red' is not"),
        ("a=64GB:gpu=65GB", "more than its memory"),
        ("a=64GB:bandwidth=fast", "bandwidth=fast must be a number"),
        ("a=64GB,a=32GB", "a is there twice"),
    ],
)
def test_bad_hosts(spec, words):
    with pytest.raises(ConfigError, match=words):
        read_hosts([spec], None)


def test_hosts_file_of_mlx(tmp_path):
    path = tmp_path / "hosts.json"
    hosts = [
        {"ssh": "one", "ips": ["10.0.0.1"], "memory": "128GB", "chip": "m4-max"},
        {"ssh": "two", "ips": ["10.0.0.2"], "rdma": [None, "rdma_en2"]},
    ]
    path.write_text(json.dumps({"backend": "jaccl", "envs": [], "hosts": hosts}))
    found = read_hosts(["two=64GB:m4-pro"], str(path))
    assert [(m.name, m.chip) for m in found.machines] == [("one", "m4-max"), ("two", "m4-pro")]
    links, notes = read_links([], found)
    assert [x.name for x in links] == ["thunderbolt5-rdma"]
    assert notes == []
    with pytest.raises(ConfigError, match=r"host two: its memory is not known.*--hosts two=64GB"):
        read_hosts([], str(path))


def test_a_machine_that_the_hosts_file_tells_nothing_of_is_asked(tmp_path, capsys, model):
    path = tmp_path / "hosts.json"
    path.write_text(json.dumps({"hosts": [{"ssh": "localhost", "ips": ["127.0.0.1"]}]}))
    assert main(["plan", str(model), "--hostfile", str(path), "--json"]) == 0
    [one] = json.loads(capsys.readouterr().out)["machines"]
    assert (one["name"], one["memory"] > 2**30) == ("localhost", True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not valid JSON"),
        ("{}", '"hosts" must be a list with at least one host'),
        ("[1]", "host 0 is 1; must be an object such as"),
        ('[{"ssh": "a"}, {"ssh": "a"}]', "a is there twice"),
        ('[{"ssh": "a", "memory": [1]}]', r"host 0 \(a\): memory is \[1\]; must be a text or a number"),
    ],
)
def test_bad_hosts_files(tmp_path, text, words):
    path = tmp_path / "hosts.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_hosts([], str(path))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_hosts([], str(tmp_path / "none.json"))


def test_links():
    hosts = read_hosts(["a=64GB:m4", "b=64GB:m4"], None)
    links, notes = read_links([], hosts)
    assert [x.name for x in links] == ["thunderbolt5-tcp"]
    assert "assumed" in notes[0]
    links, notes = read_links(["10gbe", "a,b=thunderbolt5-rdma:latency=30:bandwidth=7"], hosts)
    assert [(x.name, x.between) for x in links] == [("10gbe", None), ("thunderbolt5-rdma", ("a", "b"))]
    assert (links[1].latency, links[1].bandwidth) == (30e-6, 7e9)
    assert notes == []
    assert read_links([], Hosts(machines=hosts.machines[:1])) == ([], [])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("5gbe", "5gbe: is not one of"),
        ("10gbe:cost=3", "'cost=3' is not"),
        ("10gbe:latency=none", "--link 10gbe:latency=none: latency=none must be a number"),
        ("a,a=10gbe", "name two"),
    ],
)
def test_bad_links(text, words):
    with pytest.raises(ConfigError, match=words) as caught:
        read_links([text], read_hosts(["a=64GB:m4", "b=64GB:m4"], None))
    assert caught.value.param == "link"


def test_table_reasons_and_flags(model, capsys):
    hosts = ["a=2GB:m4", "b=2GB:m4"]
    assert main(["plan", model, "--hosts", *hosts, "--link", "thunderbolt5-rdma", "--layout", "pp=2 layers=4,2"]) == 0
    out = capsys.readouterr().out
    for words in ("layers shared out (-pp 2: a | b)", "4 + 2", "as asked for", "Machines in order: a, b.", "Estimates"):
        assert words in out
    assert "\ntandem hosts write hosts.json a b\n" in out
    assert f"tandem serve {model} --hostfile hosts.json --pipeline-parallel-size 2 --layer-split 4,2" in out


def test_the_hosts_file_of_paired_machines_is_not_written_over(model, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TANDEM_STATE_DIR", str(tmp_path))
    Trust("head").add("b", Peer(""))
    Path("hosts.json").write_text("[]")
    assert main(["plan", model, "--hosts", f"{this_name()}=2GB:m4", "b=2GB:m4", "--layout", "tp=2"]) == 0
    out = capsys.readouterr().out
    assert "\ntandem hosts write plan-hosts.json localhost agent:b\n" in out
    assert f"\ntandem serve {model} --hostfile plan-hosts.json --tensor-parallel-size 2" in out


def test_adapters_are_counted_as_the_engine_counts_them(model, capsys):
    """Whole on each rank, as their parts may differ from the layers'."""
    flags = ("--max-loras", "3", "--max-lora-rank", "8")

    def weights(*more):
        hosts = ("--hosts", "a=4GB:cpu", "b=4GB:cpu", "--layout", "pp=2 layers=4,2", "--context", "128")
        assert main(["plan", model, *hosts, "--json", *more]) == 0
        [plan] = (answer := json.loads(capsys.readouterr().out))["candidates"]
        return [one["weights"] for one in plan["prediction"]["memory"]], " ".join(answer["serve"])

    (without, _), (planned, serve) = weights(), weights(*flags)
    settings = ModelSettings(model=model, enable_lora=True, max_loras=3, max_lora_rank=8)
    stages = ParallelSettings(pipeline_parallel_size=2, layer_split=(4, 2))
    ranks = plan_layout(Settings(model=settings, parallel=stages)).ranks
    counted = [spec.lora_elements * 4 for spec in ranks]  # of float32, as on each CPU
    assert [more - less for more, less in zip(planned, without, strict=True)] == pytest.approx(counted, abs=1) and min(
        counted
    ) > 0
    assert "--enable-lora --max-loras 3 --max-lora-rank 8" in serve


def test_a_draft_head_is_counted_as_the_engine_counts_it(tmp_path, capsys):
    path = str(add_mtp_head(tiny_model(tmp_path, "qwen3_5", layers=4)))
    hosts = ("--hosts", "a=4GB:cpu", "b=4GB:cpu", "--layout", "pp=2 layers=2,2", "--context", "128")
    assert main(["plan", path, *hosts, "--json"]) == 0
    [plan] = json.loads(capsys.readouterr().out)["candidates"]
    stages = ParallelSettings(pipeline_parallel_size=2, layer_split=(2, 2))
    layout = plan_layout(Settings(model=ModelSettings(model=path), parallel=stages))
    about, ranks, memory = layout.description, layout.ranks, plan["prediction"]["memory"]
    weights = [rank_weights(about, spec, None, gpu=False) for spec in ranks]
    kv = [128 * rank_position(about, spec, None, gpu=False) + rank_states(about, spec, 1, gpu=False) for spec in ranks]
    assert about.mtp_bytes > 0 and [one["weights"] for one in memory] == pytest.approx(weights, abs=1)
    assert [one["kv"] for one in memory] == pytest.approx(kv, abs=1)


def test_adapters_of_a_preset_are_refused_as_they_are_counted_from_files(capsys):
    assert main(["plan", "Qwen/Qwen3-8B", "--hosts", "a=64GB:m4-max", "--max-loras", "2"]) == 2
    assert "--max-loras 2: adapters are counted from a model's files" in " ".join(capsys.readouterr().err.split())
    assert main(["plan", "Qwen/Qwen3-8B", "--hosts", "a=64GB:m4-max", "--max-loras", "-1"]) == 2
    assert "--max-loras -1: must be at least 0" in " ".join(capsys.readouterr().err.split())


def test_json(model, capsys):
    hosts = ["--hosts", "a=2GB:m4", "b=3GB:m4-pro", "c=2GB:m4", "--link", "10gbe"]
    assert main(["plan", model, *hosts, "--context", "128", "--streams", "3", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["goal"] == "throughput"
    assert [m["name"] for m in answer["machines"]] == ["a", "b", "c"]
    chosen = answer["candidates"][0]
    assert chosen["label"] == answer["chosen"]
    assert chosen["fits"]
    assert chosen["prediction"]["memory"][0]["needed"] > 0
    assert "--max-batch-size" in answer["serve"]
    assert {c["reason"] for c in answer["candidates"]} != {""}


def test_quantised_kv_takes_less(tmp_path, capsys):
    directory = str(tiny_model(tmp_path / "wide", config={"head_dim": 64}))

    def kv(*flags):
        assert main(["plan", directory, "--hosts", "a=64GB:m4-max", "--context", "512", "--json", *flags]) == 0
        plan = json.loads(capsys.readouterr().out)
        assert not flags or "--kv-dtype" in plan["serve"]
        return plan["candidates"][0]["prediction"]["memory"][0]["kv"]

    assert kv("--kv-dtype", "8bit") / kv() == pytest.approx((8 + 32 / 64) / 16)
    assert main(["plan", str(tiny_model(tmp_path / "narrow")), "--kv-dtype", "8bit"]) == 2
    assert "--kv-dtype 8bit: llama has no layer that it would change" in capsys.readouterr().err


def test_this_machine(model, capsys):
    assert main(["plan", model, "--context", "128"]) == 0
    out = capsys.readouterr().out
    assert "Without --hosts, this machine is planned for" in out
    assert "one machine (" in out


def test_shapes_become_flags(model, capsys):
    hosts = ["--hosts", *(f"{x}=2GB:m4" for x in "abcd"), "--context", "128", "--link", "10gbe"]
    expected = {
        "tp=2": "--tensor-parallel-size 2",
        "tp=2 pp=2 layers=3,3": "--tensor-parallel-size 2 --pipeline-parallel-size 2 --layer-split 3,3",
        "tp=2,1 layers=3,3": "--parallel 2,1 --layer-split 3,3",
        "dp=4": "--data-parallel-size 4",
    }
    for layout, flags in expected.items():
        assert main(["plan", model, *hosts, "--layout", layout]) == 0
        out = capsys.readouterr().out
        assert f"tandem serve {model} --hostfile hosts.json {flags}" in out
        (command,) = re.findall("^tandem (serve .*)$", out, re.MULTILINE)
        build_parser().parse_args(shlex.split(command))


def test_the_command_names_what_can_be_served(model, capsys, tmp_path):
    assert main(["plan", "qwen3-8b", "--quant", "4bit", "--hosts", "a=64GB:m4-max"]) == 0
    assert "tandem serve mlx-community/Qwen3-8B-4bit --hostfile" in capsys.readouterr().out, "not the 16-bit weights"
    for name, quant, served in (
        ("qwen3-8b", "bf16", "Qwen/Qwen3-8B"),
        ("gpt-oss-20b", "native", "openai/gpt-oss-20b"),
        ("gpt-oss-20b", "bf16", "mlx-community/gpt-oss-20b-bf16"),
    ):
        assert main(["plan", name, "--quant", quant, "--hosts", "a=64GB:m4-max"]) == 0
        assert f"tandem serve {served} --hostfile" in capsys.readouterr().out
    place = tmp_path / "my models"
    place.symlink_to(model)
    assert main(["plan", str(place), "--hosts", "a=2GB:m4", "--context", "128"]) == 0
    assert f"tandem serve '{place}' --hostfile" in capsys.readouterr().out
    asked = Named(model="org/name", revision="v1")
    assert commands(SimpleNamespace(machines=(0,)), [], [], asked) == ["tandem serve org/name --revision v1"]


def test_what_does_not_fit_ends_with_one_line(model, capsys):
    assert main(["plan", model, "--hosts", "a=512MB:m4", "b=700MB:m4", "--link", "10gbe"]) == 2
    captured = capsys.readouterr()
    assert "does not fit" in captured.out
    assert captured.err.startswith("tandem: nothing fits")
    assert captured.err.count("\n") == 1


def test_a_model_that_is_known_by_name_is_planned_for_offline(capsys, monkeypatch):
    monkeypatch.setattr("tandem.cli.plan.resolve", lambda *args, **kwargs: pytest.fail("files were asked for"))
    hosts = ["--hosts", "a=512GB:m3-ultra", "b=512GB:m3-ultra"]
    assert main(["plan", "deepseek-ai/DeepSeek-V3.2", "--quant", "4bit", "--json", *hosts]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["chosen"] == "PP 2 (a | b)"
    assert "from its published config.json, with weights of 4 bits" in told["notes"][0]
    assert main(["plan", "deepseek-ai/DeepSeek-V3.2", *hosts]) == 2, "16 bits do not fit"


@pytest.mark.parametrize(
    ("model", "quant", "words"),
    [
        ("gpt-oss-20b", "5it", "--quant 5it: is not one of native, bf16, 2bit"),
        ("demo:latest", "4bit", "demo is planned for as its files are; leave --quant out"),
    ],
)
def test_quant_that_cannot_be_is_refused(model, quant, words, capsys):
    assert main(["plan", model, "--quant", quant, "--hosts", "a=64GB"]) == 2
    assert words in capsys.readouterr().err


def test_chips_that_no_mac_is_known_with_are_marked_and_gb10_is_known(tmp_path, capsys):
    model = str(tiny_model(tmp_path / "m"))
    assert main(["plan", model, "--hosts", "a=512GB:m5-ultra", "b=128GB:gb10"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "host a: the figures of m5-ultra are inferred: twice m5-max; no such Mac is known." in said
    assert "host b: the figures" not in said
    assert CHIPS["m5-ultra"].bandwidth == 2 * CHIPS["m5-max"].bandwidth
    assert machine("b", 128 * GIB, "gb10").memory == 128 * GIB  # no Mac's share of it


@pytest.mark.parametrize(
    ("name", "preset", "quant"),
    [
        ("mlx-community/Qwen3-14B-4bit", "Qwen3-14B", "4bit"),
        ("mlx-community/DeepSeek-Coder-V2-Lite-Instruct-8bit", "DeepSeek-Coder-V2-Lite-Instruct", "8bit"),
        ("mlx-community/Llama-3.2-3B-Instruct-4bit", "Llama-3.2-3B-Instruct", "4bit"),
    ],
)
def test_a_copy_by_its_usual_name_is_its_model_in_that_format(name, preset, quant, capsys):
    hosts = ["--hosts", "a=24GB:m4", "b=24GB:m4", "--json"]
    assert main(["plan", name, *hosts]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"] == name
    assert main(["plan", preset, "--quant", quant, *hosts]) == 0
    assert json.loads(capsys.readouterr().out) == found
    assert main(["plan", name, "--quant", "6bit", *hosts]) == 2
    assert "--quant 6bit" in capsys.readouterr().err
