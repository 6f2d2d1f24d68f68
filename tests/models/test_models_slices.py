"""A rank gets the bytes of its slice, each once, and nothing else; what it gets loads like the whole model."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_hub import COMMIT, FakeHub
from planted_head import add_mtp_head
from seeing import prompt_with, seeing_model
from tandem.checkpoints.files import METADATA, ModelFiles, read_headers, weight_files
from tandem.checkpoints.resolve import resolve
from tandem.checkpoints.safetensors import TensorInfo, header_length, read_header
from tandem.errors import BrokenModel, TransportError, UsageError
from tandem.loading.stage import StageModel, load_stage
from tandem.models.description import ModelDescription, describe, part_of_tensor
from tandem.models.slice_cache import fetch_slice
from tandem.models.slices import chunks, owned_files, owned_parts, plan_parts
from tandem.models.sources import has_mlx_vlm
from tandem.protocol.blob_messages import BlobFile, Range
from tandem.runner.heads.mtp import load_mtp_head
from tandem.runner.pictures import Encoder
from tandem.testing import tiny_model
from tandem.transport.blobs import checksum

FAMILIES = ["llama", "qwen2", "qwen3", "qwen3_moe", "gemma3_text", "gpt_oss", "mistral", "phi3", "mixtral", "gpt_neox"]
LIMIT = 5000  # bytes of a chunk: parts of tiny models have many
LAYER_NAMES = [f"model.layers.{i}.{w}" for i in range(5) for w in "ab"]
NAMES = ["embed_tokens.weight", "norm.weight", "lm_head.weight", *LAYER_NAMES]


def description_of(layers: int, tied: bool) -> ModelDescription:
    return ModelDescription(
        family="llama",
        num_layers=layers,
        hidden_size=8,
        vocab_size=8,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        max_context=8,
        dtype="float32",
        quantization=None,
        tied_head=tied,
        layer_bytes=(1,) * layers,
        embed_bytes=1,
        head_bytes=1,
        eos_token_ids=(),
    )


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_byte_of_the_slice_once_and_no_other(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 4))
    files: dict[str, dict[str, TensorInfo]] = {f"model-{i}.safetensors": {} for i in range(count)}
    ends = dict.fromkeys(files, 100)
    for name in data.draw(st.permutations(NAMES)):
        file = data.draw(st.sampled_from(sorted(files)))
        size = data.draw(st.integers(0, 50))
        files[file][name] = TensorInfo("U8", (size,), size, ends[file])
        ends[file] += size
    stop = data.draw(st.integers(1, 4))
    layers = range(data.draw(st.integers(0, stop - 1)), stop)
    model = description_of(4, data.draw(st.booleans()))
    limit = data.draw(st.integers(1, 40))
    wanted = set(owned_parts(layers, model))
    needed = Counter(
        (file, info.offset + i)
        for file, tensors in files.items()
        for name, info in tensors.items()
        if part_of_tensor(name, 4) in wanted
        for i in range(info.nbytes)
    )
    plans = plan_parts(files, layers, model)
    got: Counter[tuple[str, int]] = Counter()
    for plan in plans:
        at = len(plan.header)
        for span in chunks(plan.spans, limit):
            assert 0 < span.length <= limit and span.target == at
            at += span.length
            got.update((span.file, span.start + i) for i in range(span.length))
        assert at == plan.size
    assert got == needed
    assert set(owned_files(files, layers, model)) >= {file for file, _ in needed}


class FakeSource:
    """A model directory, read directly. Counts what is read; `fail_after` answers it is gone."""

    def __init__(self, directory: Path) -> None:
        self.paths = {p.name: p for pattern in METADATA for p in directory.glob(pattern)}
        self.paths |= {p.name: p for p in weight_files(directory)}
        self._times = {name: np.zeros(path.stat().st_size, np.int32) for name, path in self.paths.items()}
        """How often each byte was read."""
        self.fail_after: int | None = None
        self.names: list[str] = []
        self.lock = threading.Lock()

    def files(self) -> list[BlobFile]:
        stats = {name: path.stat() for name, path in self.paths.items()}
        return [BlobFile(name, s.st_size, s.st_mtime_ns, "") for name, s in stats.items()] + [
            BlobFile(name, 1, 1, "") for name in self.names
        ]

    def read(self, ranges: Sequence[Range]) -> Iterator[tuple[int, memoryview, bytes]]:
        for index, one in reversed(list(enumerate(ranges))):
            if one.name.endswith(".safetensors") and self.fail_after is not None:
                self.fail_after -= 1
                if self.fail_after < 0:
                    raise TransportError("gone")
            data = self.paths[one.name].read_bytes()[one.offset : one.offset + one.length]
            with self.lock:
                self._times[one.name][one.offset : one.offset + one.length] += 1
            yield index, memoryview(data), checksum(data)

    def expected(self, *slices: range) -> dict[str, bytes]:
        """Headers, and the tensors of `slices`, once each: as `read_of_weights` gives it."""
        first = next(path for name, path in self.paths.items() if name.endswith(".safetensors"))
        files = ModelFiles(first.parent, "m")
        model, wanted = describe(files), {}
        for file, tensors in read_headers(files).items():
            times = wanted[file] = np.zeros_like(self._times[file])
            with self.paths[file].open("rb") as opened:
                times[: header_length(opened.read(8))] = 1
            for name, info in tensors.items():
                if any(part_of_tensor(name, model.num_layers) in owned_parts(one, model) for one in slices):
                    times[info.offset : info.offset + info.nbytes] = 1
        return {name: times.tobytes() for name, times in wanted.items()}

    def read_of_weights(self, most: int | None = None) -> dict[str, bytes]:
        """How often each byte of the weights was read, with more than `most` times as so many."""
        weights = {name: times for name, times in self._times.items() if name.endswith(".safetensors")}
        return {name: (times if most is None else np.minimum(times, most)).tobytes() for name, times in weights.items()}

    def read_again(self) -> int:
        """Bytes of the weights that were read more than once."""
        return sum(int(np.maximum(times - 1, 0).sum()) for name, times in self._times.items() if "safetensors" in name)

    def read_in_all(self) -> int:
        return sum(int(times.sum()) for times in self._times.values())


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def logits(stages: list[StageModel]) -> mx.array:
    h = mx.array([[5, 9, 70, 3, 111]], dtype=mx.int32)
    for stage in stages:
        h = stage.forward(h, stage.make_caches())
    return stages[-1].head(h)


def stage_of(files: ModelFiles, layers: range) -> StageModel:
    return load_stage(files, describe(files), layers, dtype="float32")


def per_expert(directory: Path) -> None:
    """Store the experts of a tiny model one by one, as the hub has them."""
    names = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    path = directory / "model.safetensors"
    arrays = {}
    for name, array in mx.load(str(path)).items():
        before, found, after = name.partition(".switch_mlp.")
        if not found:
            arrays[name] = array
            continue
        for i, expert in enumerate(array):
            module = names[after.split(".")[0]] if "block_sparse" in name else after.split(".")[0]
            arrays[f"{before}.experts.{i}.{module}.weight"] = expert
    half = dict(sorted(arrays.items())[: len(arrays) // 2])
    rest = {name: array for name, array in arrays.items() if name not in half}
    mx.eval(arrays)
    path.unlink()
    index = {}
    for i, part in enumerate((half, rest)):
        file = f"model-{i + 1:05d}-of-00002.safetensors"
        mx.save_safetensors(str(directory / file), part, {"format": "mlx"})
        index |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


@pytest.mark.parametrize(
    ("family", "stored"),
    [
        *((family, stored) for family in FAMILIES for stored in ("plain", "quantized")),
        ("qwen3_moe", "per expert"),
        ("mixtral", "per expert"),
    ],
)
def test_slices_load_like_the_whole_model(tmp_path: Path, cache: Path, family: str, stored: str) -> None:
    path = tiny_model(tmp_path / "m", family, shards=1 if stored == "per expert" else 3, quantized=stored == "quantized")
    if stored == "per expert":
        per_expert(path)
    source = FakeSource(path)
    ranges = [range(0, 1), range(1, 3), range(3, 4)]
    whole = resolve(str(path))
    slices = [fetch_slice(source, "m", one, limit=LIMIT) for one in ranges]
    assert [describe(one) for one in slices] == [describe(whole)] * 3
    got = logits([stage_of(one, layers) for one, layers in zip(slices, ranges, strict=True)])
    assert mx.array_equal(got, logits([stage_of(whole, range(4))])).item()


def test_the_slice_of_the_rank_that_samples_has_the_draft_head(tmp_path: Path, cache: Path) -> None:
    path = add_mtp_head(tiny_model(tmp_path / "m", "glm4_moe", layers=2))
    tokens, states = mx.array([[7, 8, 9]]), mx.random.normal((1, 3, 64))
    found = []
    for files, layers in (
        (fetch_slice(FakeSource(path), "m", range(1, 2), mtp=True), range(1, 2)),
        (resolve(str(path)), range(2)),
    ):
        head = load_mtp_head(files, describe(files), stage_of(files, layers), dequantize=False)
        found.append(head.head(head.join(tokens, states, head.make_caches())))
    assert mx.array_equal(*found).item()


@pytest.mark.skipif(not has_mlx_vlm(), reason="mlx-vlm is not installed")
def test_the_slice_of_the_first_stage_has_the_vision_tower(tmp_path: Path, cache: Path) -> None:
    path = seeing_model(tmp_path / "m", "mistral3")
    whole = ModelFiles(path, "m")
    first, second = (fetch_slice(FakeSource(path), "m", one) for one in (range(2), range(2, 4)))
    blind = fetch_slice(FakeSource(path), "m", range(2), vision=False)
    towers = [[file.stem for file in one.weights if file.stem == "vision"] for one in (first, second, blind)]
    assert towers == [["vision"], [], []]
    tokens, [picture] = prompt_with("mistral3", 1)
    found = [Encoder(files, mx.float32).encode(tokens, picture.inputs)["features"] for files in (whole, first)]
    assert mx.array_equal(*found).item() and mx.any(found[0] != 0).item()
    stored = mx.load(str(path / "model.safetensors"))
    assert isinstance(stored, dict)
    tower = sum(array.nbytes for name, array in stored.items() if not name.startswith("language_model"))
    assert describe(whole).vision_bytes == describe(second).vision_bytes == tower > 0


def test_only_the_slice_is_read_once_and_other_layouts_use_it(tmp_path: Path, cache: Path) -> None:
    source = FakeSource(tiny_model(tmp_path / "m", shards=3))
    seen: list[tuple[int, int]] = []
    fetch_slice(source, "m", range(0, 2), lambda *progress: seen.append(progress), limit=LIMIT)
    assert source.read_of_weights() == source.expected(range(0, 2))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen) and len(seen) > 5
    assert seen[-1][0] == seen[-1][1] and len({total for _, total in seen}) == 1

    before = source.read_in_all()
    fetch_slice(source, "m", range(0, 2), limit=LIMIT)
    fetch_slice(source, "m", range(1, 2), limit=LIMIT)
    assert source.read_in_all() == before  # here already

    files = fetch_slice(source, "m", range(1, 4), limit=LIMIT)
    assert source.read_of_weights() == source.expected(range(0, 2), range(1, 4))
    assert sorted(p.name for p in files.path.iterdir() if p.is_file()) == sorted(
        name for name in source.paths if not name.endswith(".safetensors")
    )
    (part,) = [p for p in files.weights if p.name == "layer-00002.safetensors"]
    whole = {name for tensors in read_headers(resolve(str(tmp_path / "m"))).values() for name in tensors}
    assert set(read_header(part)) == {name for name in whole if ".layers.2." in name}
    assert {p.suffix for p in part.parent.iterdir()} == {".safetensors"}


def test_a_changed_config_is_brought_anew_without_the_weights(tmp_path: Path, cache: Path) -> None:
    path = tiny_model(tmp_path / "m")
    source = FakeSource(path)
    first = fetch_slice(source, "m", range(0, 2))
    before = source.read_of_weights()
    config = (path / "config.json").read_text()
    (path / "config.json").write_text(config.replace('"eos_token_id": 2', '"eos_token_id": 7'))
    again = fetch_slice(source, "m", range(0, 2))
    assert again == first and describe(again).eos_token_ids == (7,)
    assert source.read_of_weights() == before


def test_changed_weights_are_another_model(tmp_path: Path, cache: Path) -> None:
    path = tiny_model(tmp_path / "m")
    first = fetch_slice(FakeSource(path), "m", range(0, 2))
    os.utime(path / "model.safetensors", ns=(5, 5))
    assert fetch_slice(FakeSource(path), "m", range(0, 2)).path != first.path


@pytest.mark.parametrize("damage", [False, True])
def test_an_interrupted_fetch_goes_on_where_it_stopped(tmp_path: Path, cache: Path, damage: bool) -> None:
    path = tiny_model(tmp_path / "m", shards=2)
    source = FakeSource(path)
    source.fail_after = 30
    with pytest.raises(TransportError):
        fetch_slice(source, "m", range(0, 4), limit=LIMIT)
    (partial,) = cache.rglob("*.partial")
    journal = partial.with_name(partial.name.replace(".partial", ".journal"))
    offset, _ = journal.read_text().splitlines()[-1].split()
    with journal.open("a") as file:
        file.write("77 torn")  # as a crash may leave it
    if damage:
        with partial.open("r+b") as opened:
            opened.seek(int(offset))
            byte = opened.read(1)
            opened.seek(int(offset))
            opened.write(bytes([byte[0] ^ 255]))
    source.fail_after = None
    started: list[int] = []
    files = fetch_slice(source, "m", range(0, 4), lambda done, total: started.append(done), limit=LIMIT)
    assert started[0] > 0
    assert (0 < source.read_again() <= LIMIT) if damage else source.read_again() == 0
    assert source.read_of_weights(most=1) == source.expected(range(0, 4))
    assert mx.array_equal(logits([stage_of(files, range(4))]), logits([stage_of(resolve(str(path)), range(4))])).item()


def test_ranks_of_one_machine_share_the_work(tmp_path: Path, cache: Path) -> None:
    source = FakeSource(tiny_model(tmp_path / "m", shards=2))
    fetch_slice(source, "m", range(0, 1), limit=LIMIT)  # headers and config
    found: list[ModelFiles] = []
    threads = [
        threading.Thread(target=lambda: found.append(fetch_slice(source, "m", range(0, 4), limit=LIMIT))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    assert len(found) == 3 and found[0] == found[1] == found[2]
    assert source.read_of_weights() == source.expected(range(0, 4))
    assert not list(cache.rglob("*.partial")) and not list(cache.rglob("*.journal"))


def test_a_part_that_is_cut_off_is_fetched_again(tmp_path: Path, cache: Path) -> None:
    source = FakeSource(tiny_model(tmp_path / "m"))
    files = fetch_slice(source, "m", range(0, 2))
    os.truncate(files.weights[1], 1000)
    fetch_slice(source, "m", range(0, 2))
    read_header(files.weights[1])


def test_weights_that_are_not_here_are_never_taken_for_zeros(tmp_path: Path, cache: Path) -> None:
    source = FakeSource(tiny_model(tmp_path / "m"))
    files = fetch_slice(source, "m", range(0, 2))
    with pytest.raises(BrokenModel, match=r"weight \S+: cannot be read"):
        stage_of(files, range(2, 4))
    with pytest.raises(BrokenModel, match="cannot be read"):
        stage_of(replace(files, weights=()), range(0, 2))


@pytest.mark.parametrize("name", ["../x.json", "/tmp/x.json", "a/b.json", "..", ".hidden", "", "a\0"])
def test_names_that_lead_elsewhere_are_refused(tmp_path: Path, cache: Path, name: str) -> None:
    source = FakeSource(tiny_model(tmp_path / "m"))
    source.names = [name]
    with pytest.raises(BrokenModel, match="is not a name for a file of a model"):
        fetch_slice(source, "m", range(0, 2))
    assert not cache.exists()


def test_a_cache_that_cannot_be_written_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "file"))
    with pytest.raises(UsageError, match=r"cannot keep the weights here.*TANDEM_CACHE"):
        fetch_slice(FakeSource(tiny_model(tmp_path / "m")), "m", range(0, 2))


# --- the hub ---

HUB_RANK = """
import json, sys
from tandem.executors.weight_source import obtain_files
from tandem.executors.executor import StageSpec
from tandem.models.description import describe
from tandem.checkpoints.resolve import resolve
from tandem.loading.stage import load_stage
import msgspec
files = resolve("org/tiny", weights=False)
d = describe(files)
spec = msgspec.convert(dict(model_path=str(files.path), model_name=files.name, rank=0, stage=0, stage_sizes=(1, 1),
    layers=(int(sys.argv[1]), int(sys.argv[2])), tensor_split=None, micro_batches=1, dtype="float32", dequantize="no",
    vocab_size=d.vocab_size, memory_share=1.0, eos_token_ids=(), channel="tcp", backend="ring", blas="none",
    log_level="INFO", hub=files.hub), StageSpec)
seen = []
mine = obtain_files(spec, None, lambda done, total: seen.append((done, total)))
stage = load_stage(mine, d, range(*spec.layers), dtype="float32")
again = obtain_files(spec, None, lambda done, total: None)
assert again == mine
print(json.dumps({"nbytes": stage.nbytes, "files": [p.name for p in mine.weights], "hub": files.hub, "seen": seen[-1]}))
"""


def in_hub_process(script: str, *arguments: str, home: Path, url: str) -> subprocess.CompletedProcess[str]:
    env = {
        **os.environ,
        "HF_HOME": str(home / "hf"),
        "TANDEM_CACHE": str(home / "cache"),
        "HF_ENDPOINT": url,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OPENBLAS_NUM_THREADS": "1",
    }
    env.pop("HF_HUB_OFFLINE", None)
    return subprocess.run(
        [sys.executable, "-c", script, *arguments], env=env, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    path = tiny_model(tmp_path / "m", shards=3, layers=6, dtype="float32", config={"hidden_size": 256})
    server = FakeHub(path)
    yield server
    server.shutdown()
    server.server_close()


def test_a_rank_downloads_only_files_with_tensors_of_its_slice(tmp_path: Path, hub: FakeHub) -> None:
    files = resolve(str(hub.directory))
    for layers in (range(0, 2), range(2, 6)):
        hub.sent.clear()
        done = in_hub_process(HUB_RANK, str(layers.start), str(layers.stop), home=tmp_path / str(layers), url=hub.url)
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)
        owned = owned_files(read_headers(files), layers, describe(files))
        assert told["files"] == owned and told["hub"] == f"org/tiny@{COMMIT}"
        assert told["nbytes"] == stage_of(files, layers).nbytes
        for path in weight_files(files.path):
            sent, size = hub.sent[path.name], path.stat().st_size
            assert sent > 0 and (size <= sent <= size + 140_000 if path.name in owned else sent <= 131072 < size)
        assert hub.sent["tokenizer.json"] == (files.path / "tokenizer.json").stat().st_size
        assert told["seen"][0] == told["seen"][1] == sum((files.path / name).stat().st_size for name in owned)


HUB_LLM = """
import sys
from tandem import LLM, SamplingParams
if __name__ == "__main__":
    with LLM(sys.argv[1], pipeline_parallel_size=2) as llm:
        params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        print(llm.generate([[5, 9, 70, 3]], params)[0].token_ids)
"""


@pytest.mark.slow
def test_ranks_download_their_slices_and_answer(tmp_path: Path, hub: FakeHub) -> None:
    local = in_hub_process(HUB_LLM, str(hub.directory), home=tmp_path / "a", url="http://127.0.0.1:9")
    remote = in_hub_process(HUB_LLM, "org/tiny", home=tmp_path / "b", url=hub.url)
    assert remote.stdout == local.stdout != "", remote.stderr


def test_planning_for_a_hub_model_downloads_headers_alone(tmp_path: Path, hub: FakeHub) -> None:
    script = "import sys; from tandem.cli.main import main; sys.exit(main(sys.argv[1:]))"
    hub.repo = "mlx-community/phi-4-4bit"  # the copy that the name stands for, at a mirror
    done = in_hub_process(script, "plan", "phi4", "--hosts", "a=8GB:m4", "--json", home=tmp_path, url=hub.url)
    assert done.returncode == 0 and json.loads(done.stdout)["chosen"], done.stderr
    assert json.loads(done.stdout)["model"] == hub.repo
    for path in weight_files(hub.directory):
        assert 0 < hub.sent[path.name] <= 131072 < path.stat().st_size


def test_a_hub_that_cannot_be_reached_is_one_clear_error_unless_all_is_here(tmp_path: Path, hub: FakeHub) -> None:
    script = """
from tandem.errors import ModelNotFound
from tandem.checkpoints.resolve import resolve
import sys
for weights in (False, True):
    try:
        print(resolve(sys.argv[1], weights=weights).path.name)
    except ModelNotFound as error:
        print(error)
"""
    online = in_hub_process(script, "org/tiny", home=tmp_path / "a", url=hub.url)
    assert online.stdout.split() == [COMMIT, COMMIT], online.stderr
    missing = in_hub_process(script, "org/none", home=tmp_path / "a", url=hub.url)
    assert missing.stdout.count("org/none: no such directory here, and no such model on the hub") == 2, missing.stderr
    hub.shutdown()
    hub.server_close()
    offline = in_hub_process(script, "org/tiny", home=tmp_path / "a", url=hub.url)
    assert offline.stdout.split() == [COMMIT, COMMIT], offline.stdout + offline.stderr
    shutil.rmtree(tmp_path / "a")
    nothing = in_hub_process(script, "org/tiny", home=tmp_path / "a", url=hub.url)
    assert nothing.stdout.count("the hub cannot be reached") == 2, nothing.stdout + nothing.stderr
