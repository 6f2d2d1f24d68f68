"""Options derived from the dataclasses."""

from __future__ import annotations

import dataclasses
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.config.foreign import remedy, table
from tandem.config.options import ALIASES, by_name, field_docs, options
from tandem.errors import ConfigError


def test_every_field_has_an_option_with_help():
    assert {"model", "port", "layer_split", "dtype"} <= set(by_name())
    assert all(option.help.endswith(".") or option.help for option in options())


def test_shapes():
    port, split, dtype = by_name()["port"], by_name()["layer_split"], by_name()["dtype"]
    assert (port.base, port.optional, port.repeated) == (int, False, False)
    assert (split.base, split.optional, split.repeated) == (int, True, True)
    assert (dtype.base, dtype.choices) == (str, ("auto", "float32", "bfloat16", "float16"))
    assert (split.flag, split.variable) == ("--layer-split", "TANDEM_LAYER_SPLIT")


@pytest.mark.parametrize(
    ("name", "texts", "value"),
    [
        ("port", ["80"], 80),
        ("port", ["80", "81"], 81),
        ("memory_fraction", ["0.5"], 0.5),
        ("layer_split", ["20,16"], (20, 16)),
        ("api_key", ["a,b", "c"], ("a", "b", "c")),
        ("enable_metrics", ["off"], False),
        ("trust_remote_code", ["TRUE"], True),
        ("log_level", ["debug"], "DEBUG"),
    ],
)
def test_parse(name, texts, value):
    assert by_name()[name].parse(texts, label="x") == value


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("port", "eighty", "a whole number"),
        ("memory_fraction", "half", "a number"),
        ("enable_metrics", "perhaps", "neither true nor false"),
        ("dtype", "int3", "one of auto, float32"),
        ("layer_split", "20,,16", "a whole number"),
    ],
)
def test_parse_refuses(name, text, said):
    with pytest.raises(ConfigError, match=said) as caught:
        by_name()[name].parse([text], label="TANDEM_X")
    assert caught.value.message.startswith("TANDEM_X: ")
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(("name", "value"), [("port", "80"), ("port", True), ("port", 1.5), ("api_key", [1]), ("host", ["a"])])
def test_convert_refuses_other_types(name, value):
    with pytest.raises(ConfigError):
        by_name()[name].convert(value, label="x")


def test_convert_takes_whole_numbers_as_floats_and_one_text_as_a_list():
    assert by_name()["drain_timeout"].convert(3, label="x") == 3.0
    assert by_name()["api_key"].convert("a", label="x") == ("a",)


@given(text=st.text(), option=st.sampled_from(options()))
def test_any_text_gives_a_value_or_one_line(text, option):
    try:
        option.parse([text], label="x")
    except ConfigError as error:
        assert "\n" not in error.message


@dataclasses.dataclass
class Undocumented:
    here: Literal["a"] = "a"


def test_a_field_without_docstring_is_an_error():
    with pytest.raises(TypeError, match="here"):
        field_docs(Undocumented)


def test_remedies_of_foreign_flags_name_flags_that_exist():
    known = {flag for option in options() for flag in (option.flag, *ALIASES.get(option.name, ()))} | {"--quant"}
    foreign = table()["flags"]
    assert foreign.keys().isdisjoint(known - {"--quant"})
    assert {flag.replace("--no-", "--", 1) for flag in foreign.values() if flag not in ("", "HF_HOME")} <= known
    assert remedy("--max-num-batched-tokens", ["--prefill-chunk"]) == "; --max-num-batched-tokens: use --prefill-chunk here"
    assert remedy("--max-num-batched-tokens") == ""
    assert remedy("--flash-attn") == "; --flash-attn: not needed here, leave it out"
    assert remedy("--port") == ""
