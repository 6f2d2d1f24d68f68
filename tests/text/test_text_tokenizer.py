"""Tokenizers, chat templates and text streams."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Fast

from tandem.checkpoints.files import ModelFiles
from tandem.checkpoints.resolve import resolve
from tandem.errors import BrokenModel, ModelNotFound, RequestError, UsageError
from tandem.testing import write_tokenizer
from tandem.text.stream import TextStream
from tandem.text.tokenizer import load_tokenizer

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    (path / "config.json").write_text('{"eos_token_id": 2}')
    return path


def sentencepiece(path, *, prefix=True):
    """A tokenizer of Llama 2's kind: characters, byte fallback, U+2581 for spaces."""
    symbols = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", *"abcdehlorwü", "he", "▁he"]
    vocab = {s: i for i, s in enumerate(symbols)}
    merges = [("h", "e"), ("▁", "he")]
    tokenizer = Fast(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": true}')
    return load_tokenizer(ModelFiles(path, "spm"))


def wordpiece(path):
    symbols = ["[UNK]", "hello", "wor", "##ld", "##s", ",", "ab", "##é"]
    tokenizer = Fast(models.WordPiece(vocab={s: i for i, s in enumerate(symbols)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.save(str(path / "tokenizer.json"))
    return load_tokenizer(ModelFiles(path, "wordpiece"))


@pytest.fixture(scope="module")
def tokenizer(directory):
    return load_tokenizer(ModelFiles(directory, "tiny"))


@pytest.fixture(scope="module", params=["byte_level", "spaces", "spaces without strip", "library"])
def any_tokenizer(request, tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("other")
    made = {
        "byte_level": lambda: tokenizer,
        "spaces": lambda: sentencepiece(path),
        "spaces without strip": lambda: sentencepiece(path, prefix=False),
        "library": lambda: wordpiece(path),
    }[request.param]()
    assert made.scheme.kind == request.param.split()[0]
    return made


def test_round_trip_and_facts(tokenizer):
    text = "the hen 12 über\n🙂 <|im_end|>"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode(ids) == "the hen 12 über\n🙂 "
    assert tokenizer.vocab_size == 512
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.has_chat_template
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text
    assert tokenizer.token_text(2) == "<|im_end|>"
    assert tokenizer.token_bytes(10**9) == b""
    assert tokenizer.token_bytes(-1) == b""
    assert tokenizer.decode([10**9]) == ""
    assert tokenizer.encode("\ud800")


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 511), max_size=40))
def test_decode_is_the_librarys(directory, ids):
    tokenizer = load_once(directory)
    library = Fast.from_file(str(directory / "tokenizer.json"))
    assert tokenizer.decode(ids) == library.decode(ids)
    assert tokenizer.decode(ids, False) == library.decode(ids, skip_special_tokens=False)


_LOADED = {}


def load_once(directory):
    if directory not in _LOADED:
        _LOADED[directory] = load_tokenizer(ModelFiles(directory, "tiny"))
    return _LOADED[directory]


def plain_cut(text, stop):
    """The text before the stop string that is complete first; of several that end there the longest."""
    for end in range(len(text) + 1):
        ending = [s for s in stop if s and text[:end].endswith(s)]
        if ending:
            return text[: end - len(max(ending, key=len))], True
    return text, False


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_stream_adds_up_to_the_plain_decode(any_tokenizer, data):
    tokenizer = any_tokenizer
    if data.draw(st.booleans(), "from text"):
        text = data.draw(st.text(max_size=30) | st.text(alphabet="abhe lrowü🙂", max_size=30))
        ids = tokenizer.encode(text, False)
    else:
        ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    plain = tokenizer.decode(ids)
    parts = st.text(min_size=1, max_size=4)
    if plain:
        cut = st.integers(0, len(plain) - 1)
        parts |= st.builds(lambda a, n: plain[a : a + n], cut, st.integers(1, 5))
    stop = data.draw(st.lists(parts, max_size=3))
    expected, stopped = plain_cut(plain, stop)
    stream = TextStream(tokenizer, stop)
    shown, at = "", 0
    while at < len(ids):
        step = data.draw(st.integers(1, 4))
        shown += stream.push(ids[at : at + step])
        at += step
        assert expected.startswith(shown)
    shown += stream.finish()
    assert shown == expected
    assert stream.stopped == stopped
    assert (stream.matched is not None) == stopped
    assert stream.push(ids) == "" or not stopped


def test_stream_shows_text_as_soon_as_it_is_safe(tokenizer):
    stream = TextStream(tokenizer, ["STOP", "</s>"])
    smile = tokenizer.encode("🙂")
    assert [stream.push([i]) for i in smile] == ["", "", "", "🙂"]
    assert stream.push(tokenizer.encode("xST")) == "x"
    assert stream.push(tokenizer.encode("Ox")) == "STOx"
    assert stream.push(tokenizer.encode("yS")) == "y"
    assert stream.push(tokenizer.encode("TOP and more")) == ""
    assert (stream.stopped, stream.matched, stream.finish()) == (True, "STOP", "")


def test_stream_options(tokenizer, tmp_path):
    assert TextStream(tokenizer).push([2]) == ""
    assert TextStream(tokenizer, shown=frozenset([2])).push([2]) == "<|im_end|>"
    spm = sentencepiece(tmp_path)
    ids = spm.encode("hello", False)
    assert TextStream(spm).push(ids) == "hello"
    assert TextStream(spm, continues=True).push(ids) == " hello"


def test_beginning_of_text_token(tmp_path):
    spm = sentencepiece(tmp_path)
    assert spm.encode("he")[0] == 1
    assert spm.encode("he", add_special_tokens=False)[0] != 1
    assert spm.eos_token_ids == (2,)


def test_chat(tokenizer):
    text = tokenizer.template.render(MESSAGES)
    assert text == "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.render_chat(MESSAGES) == tokenizer.encode(text, False)
    assert not tokenizer.template.render(MESSAGES, add_generation_prompt=False).endswith("assistant\n")


def test_templates_see_what_transformers_gives_them(directory, tmp_path):
    source = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'bad' %}{{ raise_exception('no ' + m.role) }}{% endif %}"
        "{% if m.content is none %}{% continue %}{% endif %}{% generation %}{{ m.content | tojson }}{% endgeneration %}"
        "{% endfor %}{{ tools | tojson(indent=1) if tools }}{{ flavour }}{{ strftime_now('%Y') | length }}"
    )
    file = tmp_path / "template.jinja"
    file.write_text(source)
    tokenizer = load_tokenizer(ModelFiles(directory, "tiny"), chat_template_file=file)
    messages = [{"role": "user", "content": "<é>"}, {"role": "user", "content": None}]
    got = tokenizer.template.render(messages, tools=[{"a": 1}], variables={"flavour": "sweet"})
    assert got == '<|endoftext|>"<é>"[\n {\n  "a": 1\n }\n]sweet4'
    with pytest.raises(RequestError, match="refuses these messages: no bad") as caught:
        tokenizer.render_chat([{"role": "bad", "content": ""}])
    assert caught.value.param == "messages"
    file.write_text("{{ messages.__class__.__mro__ }}")
    hostile = load_tokenizer(ModelFiles(directory, "tiny"), chat_template_file=file)
    with pytest.raises(RequestError, match="unsafe"):
        hostile.render_chat(MESSAGES)


def test_template_files(directory, tmp_path):
    (tmp_path / "broken.jinja").write_text("{% for %}")
    with pytest.raises(BrokenModel, match="not a valid chat template"):
        load_tokenizer(ModelFiles(directory, "tiny"), chat_template_file=tmp_path / "broken.jinja")
    with pytest.raises(UsageError, match="--chat-template .*none.jinja: cannot be read"):
        load_tokenizer(ModelFiles(directory, "tiny"), chat_template_file=tmp_path / "none.jinja")
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("file")
    assert load_tokenizer(ModelFiles(tmp_path, "t")).template.render([]) == "file"
    (tmp_path / "chat_template.jinja").unlink()
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "named"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": named}))
    assert load_tokenizer(ModelFiles(tmp_path, "t")).template.render([]) == "named"
    del config["chat_template"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    bare = load_tokenizer(ModelFiles(tmp_path, "t"))
    assert not bare.has_chat_template
    with pytest.raises(RequestError, match="no chat template"):
        bare.render_chat(MESSAGES)


def test_damaged_tokenizer(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BrokenModel, match=r"tokenizer\.json: cannot be read"):
        load_tokenizer(ModelFiles(tmp_path, "t"))
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(BrokenModel, match="tokenizer cannot be loaded"):
        load_tokenizer(ModelFiles(tmp_path, "t"))


@pytest.fixture
def demo():
    try:
        return resolve("demo")
    except ModelNotFound as error:
        pytest.skip(str(error))


def test_special_tokens_that_stand_in_a_text_are_found(directory, tmp_path):
    library = Fast.from_file(str(directory / "tokenizer.json"))
    library.add_special_tokens(["<|open|>"])
    library.add_tokens([AddedToken("<|calls|>", normalized=False), AddedToken("<call>", normalized=False)])
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(ModelFiles(tmp_path, "tiny"))
    texts = ("<|open|>tools", "<|calls|>", "<call>", "<|other|>", "tools")
    assert [tokenizer.has_special(text) for text in texts] == [True, True, False, False, False]
    assert [tokenizer.token_text(token) for token in tokenizer.special_ids_of(texts)] == ["<|open|>"]


@pytest.mark.demo
def test_demo_tokenizer_against_known_encodings(demo):
    tokenizer = load_tokenizer(demo)
    system = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182]
    ids = tokenizer.render_chat([{"role": "user", "content": "x"}])
    assert ids[: len(system) + 5] == [*system, 2, 198, 1, 4093, 198]
    assert ids[-5:] == [2, 198, 1, 520, 9531, 198][-5:]
    assert [tokenizer.token_text(i) for i in tokenizer.encode("a 2024")] == ["a", " ", "2", "0", "2", "4"]
    assert tokenizer.eos_token_ids == (2,)
    text = "naïve 🙂 <|im_start|>  tabs\tand\n\nlines"
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
