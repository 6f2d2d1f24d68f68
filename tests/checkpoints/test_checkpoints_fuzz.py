"""Files of a model that are damaged or made to harm: an error that names the file, never a crash or a hang."""

from __future__ import annotations

import json
import random
import shutil
import struct
import tempfile
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.checkpoints.config import read_config
from tandem.checkpoints.files import ModelFiles
from tandem.checkpoints.gguf.convert import convert_gguf
from tandem.checkpoints.gguf.header import read_gguf
from tandem.checkpoints.safetensors import read_header
from tandem.errors import BrokenModel, ModelError
from tandem.models.description import describe
from tandem.testing import tiny_model
from tandem.text.tokenizer import load_tokenizer

FUZZ = settings(max_examples=80, derandomize=True, deadline=None, database=None)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.just(10**30), st.floats(), st.text(max_size=8)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
DEEP = "[" * 100_000


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"), layers=2, vocab=300)


def changed(text, edits):
    """`text` or bytes with pieces put in, replaced and left out."""
    for place, length, piece in edits:
        at = place % (len(text) + 1)
        text = text[:at] + piece + text[at + length :]
    return text


def edits(pieces):
    return st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 6), pieces), min_size=1, max_size=3)


# --- safetensors ---------------------------------------------------------------------------------------------------


def header_of(data):
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.safetensors"
        path.write_bytes(data)
        try:
            tensors = read_header(path)
        except BrokenModel as error:
            assert str(path) in error.message
            return None
        assert all(8 <= t.offset <= t.offset + t.nbytes <= len(data) for t in tensors.values())
        return tensors


@FUZZ
@given(st.binary(max_size=100), st.integers(0, 2**64 - 1))
def test_safetensors_of_any_bytes(data, length):
    header_of(data)
    header_of(struct.pack("<Q", length) + data)
    header_of(struct.pack("<Q", len(data)) + data)


@FUZZ
@given(edits(st.sampled_from(["-", "0", "1e400", "9" * 30, '"', "[", "]", "{", ",", "null", "NaN", "BF16", "\ud800"])))
def test_safetensors_with_damaged_json(changes):
    whole = '{"__metadata__":{"format":"mlx"},"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}}'
    text = changed(whole, changes).encode("utf-8", "surrogatepass")
    header_of(struct.pack("<Q", len(text)) + text + bytes(16))


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2, 2], "data_offsets": [16, 0]},
        {"dtype": "F32", "shape": [2, 2], "data_offsets": [-16, 0]},
        {"dtype": "F32", "shape": [-2, -2], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [3], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": "22", "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16, 32]},
        {"dtype": ["F32"], "shape": [2, 2], "data_offsets": [0, 16]},
        [],
    ],
)
def test_safetensors_that_contradict_themselves(entry):
    text = json.dumps({"a": entry}).encode()
    assert header_of(struct.pack("<Q", len(text)) + text + bytes(16)) is None
    deep = f'{{"a": {DEEP}'.encode()
    assert header_of(struct.pack("<Q", len(deep)) + deep) is None


# --- GGUF ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def gguf_file(request, tmp_path_factory):
    """A file of one layer with a vocabulary of `params`' kind, and the length of its header."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model(request.param)
    writer.add_token_list(["<unk>", "<s>", "</s>", "a", "b", "ab"])
    writer.add_token_scores([0.0, 0.0, 0.0, -1.0, -2.0, -3.0])
    writer.add_token_types([2, 3, 3, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages }}")
    for name, shape in (
        ("token_embd", (6, 32)),
        ("output_norm", (32,)),
        ("blk.0.attn_q", (32, 32)),
        ("blk.0.attn_k", (16, 32)),
        ("blk.0.ffn_up", (64, 32)),
    ):
        array = np.ones(shape, np.float32)
        kind = gguf.GGMLQuantizationType.F32 if len(shape) == 1 else gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(f"{name}.weight", array if len(shape) == 1 else gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes(), min(tensor.offset for tensor in read_gguf(path).tensors)


def convert(data):
    """True when it converts; a refusal must be a ModelError."""
    with tempfile.TemporaryDirectory() as directory:
        source, target = Path(directory) / "m.gguf", Path(directory) / "out"
        target.mkdir()
        source.write_bytes(data)
        try:
            convert_gguf(source, target)
        except ModelError as error:
            assert str(source) in error.message
            return False
        return True


def test_the_gguf_file_converts(gguf_file):
    assert convert(gguf_file[0])


@FUZZ
@given(changes=edits(st.binary(max_size=8)))
def test_gguf_with_a_damaged_header(gguf_file, changes):
    data, end = gguf_file
    convert(changed(data[:end], changes) + data[end:])


@FUZZ
@given(at=st.integers(0, 10**6), value=st.sampled_from([0, 1, 8, 9, 255, 2**31, 2**32 - 1, 2**63, 2**64 - 1]))
def test_gguf_with_wrong_numbers(gguf_file, at, value):
    data, end = gguf_file
    at %= end - 8
    for size in (4, 8):
        convert(data[:at] + (value % 256**size).to_bytes(size, "little") + data[at + size :])


@FUZZ
@given(data=st.binary(max_size=80))
def test_gguf_of_any_bytes(data):
    for version in (b"\2\0\0\0", b"\3\0\0\0"):
        convert(b"GGUF" + version + data)


def test_gguf_made_to_harm():
    def text(value):
        return struct.pack("<Q", len(value)) + value

    def file(*entries, tensors=0):
        return b"GGUF" + struct.pack("<IQQ", 3, tensors, len(entries)) + b"".join(entries)

    nested = text(b"a") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 50_000
    endless = [text(b"a") + struct.pack("<IIQ", 9, kind, 2**62) for kind in (0, 8, 9, 10)]
    zero = text(b"general.alignment") + struct.pack("<II", 4, 0)
    word = text(b"general.alignment") + struct.pack("<I", 8) + text(b"x")
    huge = text(b"t.weight") + struct.pack("<IQQIQ", 2, 2**40, 2**40, 0, 0)
    empty = text(b"t.weight") + struct.pack("<IIQ", 0, 2, 0)
    many = text(b"t.weight") + struct.pack("<I", 2**31) + bytes(64)
    for data in (file(nested), *map(file, endless), file(zero), file(word), *(file(tensors=1) + x for x in (huge, empty, many))):
        assert not convert(data + bytes(64))


@pytest.mark.parametrize("gguf_file", ["llama"], indirect=True)
def test_gguf_with_a_token_that_takes_for_ever(gguf_file):
    # Merges are derived by cutting a token at every place: for one of some megabytes that would never end.
    longer = struct.pack("<Q", 3_000_002) + b"ab" * 1_500_001
    assert not convert(gguf_file[0].replace(struct.pack("<Q", 2) + b"ab", longer, 1))


# --- config.json and the tokenizer's files ----------------------------------------------------------------------------


@FUZZ
@given(data=st.data())
def test_config_with_values_of_any_kind(model, data):
    config = read_config(model)
    names = [*config, "quantization", "quantization_config", "text_config", "eos_token_id", "num_experts"]
    config |= data.draw(st.dictionaries(st.sampled_from(names), JSON, min_size=1, max_size=3))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        (path / "model.safetensors").symlink_to(model / "model.safetensors")
        (path / "config.json").write_text(json.dumps(config))
        try:
            describe(ModelFiles(path, "m"))
        except ModelError as error:
            assert error.message


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "tokenizer_config.json",
        "tokenizer.json",
        "generation_config.json",
        "chat_template.json",
        "chat_template.jinja",
        "special_tokens_map.json",
        "model.safetensors.index.json",
    ],
)
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        DEEP.encode(),
        b"null",
        b"[]",
        b'{"a": ' * 10_000,
        b'{"weight_map": {"a": "../../x"}}',
        b"{% for %}",
        b'{"num_hidden_layers": 1000000000000}',
        b'{"version":"1.0","model":{"type":"BPE","vocab":{"a":0},"merges":["b c"]}}',
        b'{"chat_template": [{"name": 5}], "eos_token": {"content": 5}}',
        b'{"eos_token_id": [[], {}, "x", -5, 1e30]}',
    ],
)
def test_files_of_other_content(model, tmp_path, name, content):
    path = tmp_path / "m"
    shutil.copytree(model, path)
    (path / name).write_bytes(content)
    if name == "chat_template.json":
        (path / "tokenizer_config.json").write_text("{}")
    for read in (lambda: describe(ModelFiles(path, "m")), lambda: load_tokenizer(ModelFiles(path, "m"))):
        try:
            read()
        except ModelError as error:
            assert str(path) in error.message or "m: model_type" in error.message


def test_a_model_of_absurd_numbers_takes_no_memory(model, tmp_path):
    config = read_config(model)
    shutil.copy(model / "model.safetensors", tmp_path)
    for field in ("num_hidden_layers", "hidden_size", "vocab_size"):
        (tmp_path / "config.json").write_text(json.dumps(config | {field: 10**12}))
        with pytest.raises(BrokenModel, match=field):
            describe(ModelFiles(tmp_path, "m"))


@settings(FUZZ, max_examples=50)
@given(seed=st.integers(0, 10**6))
def test_tokenizer_json_with_other_values(model, seed):
    # Values at random places of the tree are replaced; the library behind it is not ours, its failures are.
    draw = random.Random(seed)
    tree = json.loads((model / "tokenizer.json").read_text())
    for _ in range(draw.randint(1, 3)):
        node = tree
        while True:
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            key = draw.choice(keys)
            if not isinstance(node[key], dict | list) or not node[key] or draw.random() < 0.2:
                break
            node = node[key]
        node[key] = draw.choice([None, -1, 2**40, 1.5, "", "x" * 50, [], {}, [[]], True])
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "tokenizer.json").write_text(json.dumps(tree))
        try:
            tokenizer = load_tokenizer(ModelFiles(Path(directory), "m"))
            tokenizer.decode(tokenizer.encode("the hen <|im_end|> 🙂"))
        except BrokenModel as error:
            assert directory in error.message
