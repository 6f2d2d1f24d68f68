"""What a rank of a tensor-parallel stage loads: who owns which element, peak memory, errors; and a real ring."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten

from tandem.checkpoints.resolve import resolve
from tandem.errors import BrokenModel, LayoutError, UnsupportedModel
from tandem.loading.shard_modules import layer_cutter
from tandem.loading.stage import load_stage
from tandem.models.description import describe
from tandem.models.families.sharding import SHARDING
from tandem.models.footprint import slice_bytes
from tandem.models.partition import split_layers
from tandem.models.shard import plan_shards
from tandem.testing import tiny_model
from thread_ranks import ThreadGroup, ThreadRank
from wide import LAYERS, OF_FAMILY, alike, wide_figures


def load(files, shard, layers=None, **options):
    d = describe(files)
    tp = ThreadRank(ThreadGroup(shard.size), shard.rank)
    layers = layers or range(d.num_layers)
    return load_stage(files, d, layers, shard=shard, tensor_parallel=tp, **{"dtype": "float32", **options})


def number_elements(path):
    """Give every stored element its own number, from 1 on; the first number and the size of each tensor."""
    file = str(path / "model.safetensors")
    weights = mx.load(file)
    spans, start = {}, 1
    for name, array in sorted(weights.items()):
        spans[name] = (start, array.size)
        weights[name] = mx.arange(start, start + array.size, dtype=mx.float32).reshape(array.shape)
        start += array.size
    assert start < 2**24  # exact in float32
    mx.eval(weights)
    mx.save_safetensors(file, weights)
    return spans, start


def layer_of(name):
    """Path of a stored tensor's layer, and of the tensor in it; without a layer the first is empty."""
    found = re.match(r"(.*?\.(?:layers|h|blocks)\.\d+)\.(.*)", name)
    return found.groups() if found else ("", name)


def copies(name, family, names, size):
    """On how many ranks each element of a stored tensor must be; `names` are those of all tensors."""
    if family in ONE_KV_HEAD and any(word in name for word in ("c_attn", "k_proj", "v_proj")):
        return {1, size} if "c_attn" in name else {size}
    if "fbg_a_proj" in name:  # low ranks beside a row for each head
        return {1, size}
    layer, path = layer_of(name)
    if layer:
        own = SHARDING[family].of([one for at, one in map(layer_of, names) if at == layer])
        listed = any(path.startswith(f"{one}.") for one in own.lists)
        return {1} if listed or not own.keeps(path) else {size}
    head = any(word in name for word in ("embed_out", "lm_head")) or name.startswith("output")
    return {1} if head and "norm" not in name and "lm_head.ln" not in name else {size}


@st.composite
def shapes(draw, families):
    """A family, figures of a model, ranks and their weights. Plain attention takes any figures."""
    family = draw(st.sampled_from(families))
    plain = SHARDING[family].axes is None and family not in OF_FAMILY
    kv = draw(st.integers(2, 4)) if plain else 3
    heads = kv * draw(st.integers(1, 2))
    head_dim = draw(st.sampled_from([4, 8]))
    size = draw(st.integers(2, kv))
    widths = st.integers(size, 40)
    config = {
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": head_dim,
        "rotary_dim": head_dim,
        "hidden_size": heads * head_dim,
        "intermediate_size": draw(widths),
        "moe_intermediate_size": draw(widths),
        "shared_expert_intermediate_size": draw(widths),
    }
    if family == "phimoe":
        config["rope_scaling"] = {
            "type": "longrope",
            "short_factor": [1.0] * (head_dim // 2),
            "long_factor": [2.0] * (head_dim // 2),
            "short_mscale": 1.1,
            "long_mscale": 1.2,
        }
    weights = draw(st.none() | st.lists(st.floats(0.2, 5), min_size=size, max_size=size))
    return family, config if plain else wide_figures(family), size, weights


EMBEDDING = "model.embed_tokens"
ONE_KV_HEAD = ("gpt_bigcode", "recurrent_gemma")
"""Which is on every rank."""


@pytest.mark.parametrize("families", alike().values(), ids=alike())
@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_every_element_is_owned_as_planned(families, data):
    family, config, size, weights = data.draw(shapes(families))
    with tempfile.TemporaryDirectory() as directory:
        layers = LAYERS.get(family, 2)
        path = tiny_model(directory, family, layers=layers, vocab=301, dtype="float32", config=config)
        spans, end = number_elements(path)
        files = resolve(str(path))
        seen = np.zeros(end, np.int64)
        for shard in plan_shards(describe(files), size, weights=weights):
            modules = filter(None, load(files, shard).modules.values())
            held = [np.array(array).reshape(-1) for module in modules for _, array in tree_flatten(module.parameters())]
            seen += np.bincount(np.concatenate(held).astype(np.int64), minlength=end)
    for name, (start, count) in spans.items():
        assert set(seen[start : start + count]) == copies(name, family, spans, size), name


def test_a_tied_head_on_the_last_stage_is_rows_of_the_embedding(tmp_path):
    files = resolve(str(tiny_model(tmp_path, "llama")))
    d = describe(files)
    shards = plan_shards(d, 2, weights=(3, 1))
    _, last = split_layers(d.num_layers, 2)
    whole = load_stage(files, d, last, dtype="float32")
    stages = [load(files, shard, last) for shard in shards]
    assert [stage.modules[EMBEDDING].weight.shape for stage in stages] == [(384, 64), (128, 64)]
    tied = mx.concatenate([stage.modules[EMBEDDING].weight for stage in stages])
    assert mx.array_equal(tied, whole.modules[EMBEDDING].weight).item()
    both = load(files, shards[0])  # first and last: the embedding once, its rows are a view
    assert both.modules[EMBEDDING].weight.shape == (512, 64)
    assert both.nbytes < load_stage(files, d, range(4), dtype="float32").nbytes


def test_figures_of_a_stage(tmp_path):
    files = resolve(str(tiny_model(tmp_path, "qwen3")))
    d = describe(files)
    seen = []
    stage = load(files, plan_shards(d, 2)[1], progress=lambda done, total: seen.append((done, total)))
    assert stage.cache_bytes == (2 * 16 * 4 * len(stage.layers), 0)
    assert seen[-1][0] == seen[-1][1] == sum(d.layer_bytes) + d.embed_bytes + d.head_bytes
    undivided = load_stage(files, d, range(4), shard=plan_shards(d, 1)[0], dtype="float32")
    assert undivided.cache_bytes == (2 * 32 * 4 * 4, 0) and undivided.shard is None
    assert stage.nbytes < 0.75 * undivided.nbytes


@pytest.mark.parametrize(
    "family",
    [
        "bailing_hybrid",
        "deepseek_v32",
        "deepseek_v4",
        "gemma4",
        "glm4_moe_lite",
        "kimi_k3",
        "kimi_linear",
        "llama4",
        "longcat_flash",
        "minimax_m2",
        "minimax_m3_vl",
        "nemotron_h",
    ],
)
@pytest.mark.parametrize("quantized", [False, True])
def test_bytes_of_a_rank_are_told_before_it_loads(family, quantized, tmp_path):
    """Latents, routers and norms are whole on each rank: in small models a tenth of it."""
    files = resolve(str(tiny_model(tmp_path, family, quantized=quantized)))
    d = describe(files)
    told = slice_bytes(d, range(d.num_layers), "bfloat16", False, 0.5, gpu=True)
    for shard in plan_shards(d, 2):
        assert load(files, shard, dtype="bfloat16").nbytes == pytest.approx(told, rel=2e-3)


def test_raw_experts_are_stacked_then_cut(tmp_path):
    path = tiny_model(tmp_path, "qwen3_moe")
    files = resolve(str(path))
    shard = plan_shards(describe(files), 2)[1]
    before = [a for _, a in tree_flatten(load(files, shard).modules[0].parameters())]
    raw = {}
    for name, array in mx.load(str(path / "model.safetensors")).items():
        if ".switch_mlp." in name:
            raw |= {name.replace("switch_mlp", f"experts.{e}"): array[e] for e in range(array.shape[0])}
        else:
            raw[name] = array
    mx.eval(raw)
    mx.save_safetensors(str(path / "model.safetensors"), raw)
    after = [a for _, a in tree_flatten(load(files, shard).modules[0].parameters())]
    assert all(mx.array_equal(a, b).item() for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("expand", [False, True])
def test_a_file_is_read_before_a_gpu_is_made_to_wait_for_it(monkeypatch, tmp_path, expand):
    """Metal ends a command that waits for a slow disk for some seconds: the first evaluation is of what was loaded."""
    files = resolve(str(tiny_model(tmp_path / "m", "llama", quantized=True)))
    unread, evaluated = {}, []
    load_file, evaluate = mx.load, mx.eval

    def loaded(path):
        found = load_file(path)
        unread.update({id(array): array for array in found.values()})
        return found

    def seen(*arrays):
        evaluated.append([id(array) in unread for array in arrays])
        for array in arrays:
            unread.pop(id(array), None)
        evaluate(*arrays)

    monkeypatch.setattr(mx, "load", loaded)
    monkeypatch.setattr(mx, "eval", seen)
    load(files, plan_shards(describe(files), 2, dequantize=expand)[0], dequantize=expand)
    assert [True] in evaluated
    firsts = [all(one) for one in evaluated[::2]]
    assert all(firsts), "something computed waited for a file"


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("dequantize", [False, True])
def test_weights_that_contradict_the_config(quantized, dequantize, tmp_path):
    path = tiny_model(tmp_path, "llama", quantized=quantized)
    files = resolve(str(path))
    d = describe(files)
    shard = plan_shards(d, 2)[0]
    weights = mx.load(str(path / "model.safetensors"))
    suffixes = ("weight", "scales", "biases") if quantized else ("weight",)
    taller = {n: mx.concatenate([weights[n], weights[n]]) for s in suffixes if (n := f"model.layers.1.mlp.up_proj.{s}")}
    mx.eval(weights, taller)
    mx.save_safetensors(str(path / "model.safetensors"), weights | taller)
    with pytest.raises(BrokenModel, match=r"model\.layers\.1\.mlp\.up_proj\.\w+ has shape \(256"):
        load(files, shard, dequantize=dequantize)
    (path / "config.json").write_text(json.dumps(json.loads((path / "config.json").read_text()) | {"x": 1}))
    wrong = dataclasses.replace(d, mlp_width=256)
    with pytest.raises(LayoutError, match=r"mlp\.(gate|up)_proj\.\w+: 128 rows, where config\.json makes 256"):
        load_stage(files, wrong, range(1), shard=plan_shards(wrong, 2)[0], tensor_parallel=ThreadGroup(2), dequantize=dequantize)


def test_what_is_refused(tmp_path):
    files = resolve(str(tiny_model(tmp_path, "llama", quantized=True)))
    d = describe(files)
    first, second = plan_shards(d, 2, dequantize=True)
    with pytest.raises(LayoutError, match="rank 1 of 2 needs the other ranks"):
        load_stage(files, d, range(4), shard=second)
    crooked = dataclasses.replace(first, mlp=range(40))
    with pytest.raises(LayoutError, match=r"down_proj\.\w+: elements 0 to 40 of 128 do not end with a quantisation"):
        load(files, crooked)
    assert len(load(files, crooked, dequantize=True).shard.kv_heads) == 1
    plamo = resolve(str(tiny_model(tmp_path / "plamo", "plamo")))
    with pytest.raises(UnsupportedModel, match="plamo does not run tensor-parallel"):
        load(plamo, first)
    with pytest.raises(UnsupportedModel, match=r"layers\.0\.mlp\.extra\.weight: how to divide it is not known"):
        layer_cutter("layers.0", nn.Module(), first, d).take("mlp.extra.weight", mx.zeros((2, 2)))


_PEAK = """
import pathlib, re, resource, sys
import mlx.core as mx
from tandem.models.description import describe
from tandem.checkpoints.resolve import resolve
from tandem.models.shard import plan_shards
from tandem.loading.stage import load_stage
from thread_ranks import ThreadGroup, ThreadRank
def peak():  # Linux's ru_maxrss starts with what the parent had, VmHWM does not
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(re.search(r"VmHWM:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1]) * 1024
files = resolve(sys.argv[1])
description = describe(files)
expand = sys.argv[3] == "1"
shard = plan_shards(description, 2, dequantize=expand)[0]
mx.eval(mx.zeros((8, 8)) @ mx.zeros((8, 8)))
before = peak()
stage = load_stage(files, description, range(12), dtype=sys.argv[2], dequantize=expand, shard=shard,
                   tensor_parallel=ThreadRank(ThreadGroup(2), 0))
print(peak() - before, stage.nbytes, sum(description.layer_bytes))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "quantized", "dtype", "expand"),
    [
        ("mistral", False, "bfloat16", 0),
        ("mistral", False, "float32", 0),
        ("phi3", False, "bfloat16", 0),
        ("mistral", True, "float32", 1),
        ("qwen3_moe", False, "bfloat16", 0),
    ],
)
def test_peak_memory_is_the_shard_and_few_tensors(family, quantized, dtype, expand, tmp_path):
    big = {"hidden_size": 512, "intermediate_size": 2048, "moe_intermediate_size": 512, "head_dim": 128}
    path = tiny_model(tmp_path, family, layers=12, quantized=quantized, config=big)
    command = [sys.executable, "-c", _PEAK, str(path), dtype, str(expand)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )
    peak, owned, stored = map(int, done.stdout.split())
    tensor = 512 * 2048 * 4
    assert peak < owned + 4 * tensor + 8e6, (peak, owned, stored)


_RANK = """
import json, sys
import mlx.core as mx, numpy as np
from tandem.comm.group import StageGroup
from tandem.models.description import describe
from tandem.checkpoints.resolve import resolve
from tandem.models.shard import plan_shards
from tandem.loading.stage import load_stage
path, size, steps, out = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4]
group = StageGroup("ring", size)
files = resolve(path)
description = describe(files)
shard = plan_shards(description, size)[group.rank]
stage = load_stage(files, description, range(description.num_layers), dtype="float32", shard=shard,
                   tensor_parallel=group)
caches, logits = stage.make_caches(), []
for tokens in steps:
    got = stage.head(stage.forward(mx.array([tokens], mx.int32), caches))
    mx.eval(got)
    logits.append(np.array(got)[0, -1])
np.save(out, np.stack(logits))
"""


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_in_processes_over_a_ring(size, tmp_path):
    config = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16}
    path = tiny_model(tmp_path / "model", "qwen3", layers=2, vocab=509, config=config)
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(size)]
    hosts = [[f"127.0.0.1:{s.getsockname()[1]}"] for s in sockets]
    (tmp_path / "hosts.json").write_text(json.dumps(hosts))
    for s in sockets:
        s.close()
    steps = [list(range(3, 14)), list(range(40, 56)), [7], [300], [8]]
    processes = []
    for rank in range(size):
        env = os.environ | {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(tmp_path / "hosts.json")}
        command = [sys.executable, "-c", _RANK, str(path), str(size), json.dumps(steps), str(tmp_path / f"{rank}.npy")]
        processes.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True))
    try:
        for process in processes:
            _, errors = process.communicate(timeout=240)
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()
            process.wait()
    files = resolve(str(path))
    stage = load_stage(files, describe(files), range(2), dtype="float32")
    caches = stage.make_caches()
    got = [np.load(tmp_path / f"{rank}.npy") for rank in range(size)]
    for i, tokens in enumerate(steps):
        want = np.array(stage.head(stage.forward(mx.array([tokens], mx.int32), caches)))[0, -1]
        assert np.abs(got[0][i] - want).max() < 1e-4 * np.abs(want).max()
        assert all((g[i] == got[0][i]).all() for g in got)
