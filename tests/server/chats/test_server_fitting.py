"""Texts that cannot fit are known by their bytes, or by their beginning; those that can are tokenised as ever."""

from __future__ import annotations

import json

import pytest

from tandem.checkpoints.files import ModelFiles
from tandem.errors import RequestError
from tandem.text.fast import longest_token, scheme_of
from tandem.text.tokenizer import check_bytes, encode_fitting, load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(model_dir):
    return load_tokenizer(ModelFiles(model_dir, "tiny"))


def test_bytes_are_compared_with_what_the_longest_token_stands_for(tokenizer):
    longest = "<|endoftext|>"
    assert tokenizer.longest_token == len(longest)
    check_bytes(tokenizer, longest * 20, 20, "prompt")
    assert len(tokenizer.encode(longest * 20)) == 20, "it does fit"
    with pytest.raises(RequestError, match="20 tokens. However, your prompt resulted in more than 20") as caught:
        check_bytes(tokenizer, longest * 20 + "x", 20, "prompt")
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(RequestError):
        check_bytes(tokenizer, "漢" * 100, 23, "prompt")


def test_a_long_text_is_tokenised_only_as_far_as_it_takes(tokenizer, monkeypatch):
    sizes, encode = [], type(tokenizer).encode
    monkeypatch.setattr(
        type(tokenizer), "encode", lambda self, text, special=True: sizes.append(len(text)) or encode(self, text, special)
    )
    with pytest.raises(RequestError, match=r"resulted in at least \d+ tokens"):
        encode_fitting(tokenizer, "x " * 6000, 1000, "prompt")
    assert sizes == [8000]
    sizes.clear()
    text = "<|endoftext|>" * 900
    assert len(encode_fitting(tokenizer, text, 1000, "prompt")) == 900, "few tokens in many characters"
    assert sizes == [8000, len(text)]


def described(**parts):
    """A tokenizer.json of the byte-level kind, with other parts."""
    usual = {"type": "ByteLevel"}
    given = {"model": {"type": "BPE"}, "decoder": usual, "pre_tokenizer": usual, **parts}
    scheme = scheme_of(given["decoder"], {})
    pieces = [*scheme.alphabet, "Ġword"]
    return longest_token(given, scheme, parts.get("pieces", pieces))


def test_the_bound_follows_what_happens_to_a_text_before_it_is_tokenised():
    assert described() == 6
    assert described(normalizer={"type": "NFC"}) == 24, "composed characters are shorter"
    assert described(normalizer={"type": "Sequence", "normalizers": [{"type": "Prepend"}, {"type": "NFD"}]}) == 6


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": {"type": "Strip"}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}},
        {"normalizer": {"type": "Replace", "pattern": {"String": "abc"}, "content": ""}},
        {"pre_tokenizer": {"type": "WhitespaceSplit"}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed"}},
        {"added_tokens": [{"content": "<mask>", "lstrip": True}]},
        {"model": {"type": "WordPiece"}},
        {"pieces": ["a", "b"]},
        {"decoder": {"type": "Metaspace"}},
    ],
    ids=json.dumps,
)
def test_there_is_none_where_text_may_vanish(parts):
    assert described(**parts) is None
