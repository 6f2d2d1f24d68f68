"""Settings from files, variables and flags: whatever they say, settings come of it, or a line about what is wrong."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.config.legacy import COMBINED, MAPPED, NOT_MAPPED
from tandem.config.loading import LoadedSettings, load
from tandem.config.options import options, section_names
from tandem.errors import ConfigError

FUZZ = settings(max_examples=120, derandomize=True, deadline=None, database=None)
NAMES = [option.name for option in options()]
TEXTS = st.one_of(
    st.text(max_size=20),
    st.sampled_from(["", "0", "-1", "1e999", "nan", "inf", "9" * 5000, "1,2", ",", "\0", "true", "auto", "/", "\ud800"]),
)
VALUES = st.recursive(
    st.one_of(st.booleans(), st.integers(), st.just(10**400), st.floats(), TEXTS, st.none()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def outcome(environment: Mapping[str, str] | None = None, file: bytes | None = None, **given: Any) -> None:
    """Load; a refusal must be a ConfigError of one line."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "tandem.toml"
        if file is not None:
            path.write_bytes(file)
        try:
            loaded = load(environment=environment, config_file=str(path) if file is not None else None, **given)
        except ConfigError as error:
            assert error.message and "\n" not in error.message
        else:
            assert isinstance(loaded, LoadedSettings)


def toml(value: Any) -> str:
    """A value as TOML, roughly: what is not TOML is a test too."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml(str(k))} = {toml(v)}" for k, v in value.items()) + "}"
    return f"[{', '.join(map(toml, value))}]" if isinstance(value, list) else str(value)


@FUZZ
@given(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=3), st.sampled_from([*section_names(), "nonsense"]))
def test_values_of_any_type_in_a_file(values: dict[str, Any], table: str) -> None:
    lines = "\n".join(f"{name} = {toml(value)}" for name, value in values.items())
    outcome(file=f"[{table}]\n{lines}\n".encode("utf-8", "surrogatepass"))


@FUZZ
@given(st.binary(max_size=60))
def test_files_of_any_bytes(data: bytes) -> None:
    outcome(file=data)


@pytest.mark.parametrize(
    "text",
    [
        "a = " + "[" * 50_000,
        "a = " + "9" * 5000,
        "[server]\nport = 1e9999",
        "a." * 5000 + "b = 1",
        "[server]\nport = inf",
        "[server]\nhost = 1\nhost = 2",
        "[[server]]\nport = 1",
    ],
)
def test_files_that_go_too_far(text: str) -> None:
    outcome(file=text.encode())


@FUZZ
@given(st.dictionaries(st.sampled_from(["TANDEM_" + name.upper() for name in NAMES]), TEXTS, max_size=3))
def test_variables(environment: dict[str, str]) -> None:
    outcome(environment)


@FUZZ
@given(st.dictionaries(st.sampled_from([*MAPPED, *COMBINED, *NOT_MAPPED]), TEXTS, max_size=4))
def test_variables_of_the_ring_profile(environment: dict[str, str]) -> None:
    outcome(environment, profile="ring")


@FUZZ
@given(st.dictionaries(st.sampled_from(NAMES), st.lists(TEXTS, min_size=1, max_size=2), max_size=3))
def test_flags(flags: dict[str, list[str]]) -> None:
    outcome(flags=flags)
