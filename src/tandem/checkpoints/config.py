"""Readers of `config.json` and other JSON files of a model. File contents are treated as untrusted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeGuard

from tandem.errors import BrokenModel
from tandem.json_types import JsonMapping, JsonObject
from tandem.system.files import file_trouble, read_text

LARGEST_NUMBER = 2**31  # far above any number in a real config
MOST = 256 << 20
"""Most bytes of a JSON file; the index of a checkpoint with a trillion weights has some ten million."""


class Watched(JsonObject):
    """A config that records which entries are read, so that an error can name the entry behind it."""

    def __init__(self, config: JsonObject, path: Path) -> None:
        super().__init__(config)
        self._path = path
        self._read: list[str] = []

    def __getitem__(self, key: str) -> object:
        self._read.append(key)
        return super().__getitem__(key)

    def get(self, key: str, default: object = None) -> object:
        """Return the entry for `key`, or `default`, and record the read."""
        self._read.append(key)
        return super().get(key, default)

    @contextmanager
    def named(self) -> Iterator[None]:
        """Convert errors that the block raises, because of invalid entries, to `BrokenModel` with the name of a likely
        entry."""
        try:
            yield
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            if isinstance(error, KeyError) and error.args[0] not in self:
                key, trouble = str(error.args[0]), "is missing"
            else:
                key = self._suspect()
                trouble = f"is {super().get(key)!r:.100}, of which nothing can be made"
            raise BrokenModel(f"{self._path}/config.json: {key} {trouble}", param=key) from error

    def _suspect(self) -> str:
        """Return the last entry read that is not a positive integer; else the last entry read."""
        there = [key for key in reversed(self._read) if key in self]
        odd = (key for key in there if key != "model_type" and not is_count(super(Watched, self).__getitem__(key)))
        return next(odd, next(iter(there), "model_type"))


def is_count(value: object) -> TypeGuard[int]:
    """Return True for an integer above 0 and below LARGEST_NUMBER."""
    return type(value) is int and 0 < value < LARGEST_NUMBER


def read_config(path: Path) -> JsonObject:
    """Return the `config.json` of the model directory `path`, with mlx-lm's spelling of its type. Raise `BrokenModel`."""
    config = read_json(path / "config.json")
    return {**config, "model_type": "lfm2-vl"} if config.get("model_type") == "lfm2_vl" else config


def eos_token_ids(path: Path) -> tuple[int, ...]:
    """Return the end-of-sequence ids of config.json (or its text model) and generation_config.json together, ascending."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        if not (path / name).exists():
            continue
        config = read_json(path / name)
        value = config.get("eos_token_id", nested_text(config).get("eos_token_id"))
        values = value if isinstance(value, list) else [value]
        found.update(v for v in values if isinstance(v, int) and not isinstance(v, bool) and 0 <= v < LARGEST_NUMBER)
    return tuple(sorted(found))


def section(config: JsonMapping, name: str) -> JsonObject:
    """Return the entries nested under `name` in a config; empty if there are none."""
    nested = config.get(name)
    return nested if isinstance(nested, dict) else {}


def nested_text(config: JsonMapping) -> JsonObject:
    """Return the entries of the text model nested in a config; empty if there is none."""
    return section(config, "text_config")


def read_json(path: Path) -> JsonObject:
    """Return the JSON object in a file. Raise `BrokenModel`."""
    value = read_any_json(path)
    if not isinstance(value, dict):
        raise BrokenModel(f"{path}: must hold a JSON object", param=path.name)
    return value


def read_any_json(path: Path) -> object:
    """Return the JSON value in a file. Raise `BrokenModel`."""
    try:
        value: object = json.loads(read_text(path, MOST))
        return value
    except OSError as error:
        raise BrokenModel(f"{path}: cannot be read: {file_trouble(error)}", param=path.name) from error
    except (ValueError, RecursionError) as error:
        raise BrokenModel(f"{path}: is not valid JSON: {error}", param=path.name) from error
