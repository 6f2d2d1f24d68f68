"""Readers of `config.json` and the like, which trust nothing in them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeGuard

from tandem.errors import BrokenModel
from tandem.json_types import JsonMapping, JsonObject
from tandem.system.files import file_trouble, read_text

LARGEST_NUMBER = 2**31  # no number in a config comes near it
MOST = 256 << 20
"""Bytes of a JSON file; the index of a checkpoint with a trillion weights has some ten millions."""


class Watched(JsonObject):
    """A config that knows which of its entries were read: those that an error was made of."""

    def __init__(self, config: JsonObject, path: Path) -> None:
        super().__init__(config)
        self._path = path
        self._read: list[str] = []

    def __getitem__(self, key: str) -> object:
        self._read.append(key)
        return super().__getitem__(key)

    def get(self, key: str, default: object = None) -> object:
        """The entry; like a dict's."""
        self._read.append(key)
        return super().get(key, default)

    @contextmanager
    def named(self) -> Iterator[None]:
        """Turn errors of the block, made of entries that make no sense, into `BrokenModel` with the name of one."""
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
        """The last entry read that is no positive number, or the very last."""
        there = [key for key in reversed(self._read) if key in self]
        odd = (key for key in there if key != "model_type" and not is_count(super(Watched, self).__getitem__(key)))
        return next(odd, next(iter(there), "model_type"))


def is_count(value: object) -> TypeGuard[int]:
    """A positive whole number that a config can have."""
    return type(value) is int and 0 < value < LARGEST_NUMBER


def read_config(path: Path) -> JsonObject:
    """`config.json` of a model directory. Raises `BrokenModel`."""
    return read_json(path / "config.json")


def eos_token_ids(path: Path) -> tuple[int, ...]:
    """End-of-sequence ids of config.json, or of its text model, and of generation_config.json together, ascending."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        if not (path / name).exists():
            continue
        config = read_json(path / name)
        value = config.get("eos_token_id", nested_text(config).get("eos_token_id"))
        values = value if isinstance(value, list) else [value]
        found.update(v for v in values if isinstance(v, int) and not isinstance(v, bool) and 0 <= v < LARGEST_NUMBER)
    return tuple(sorted(found))


def nested_text(config: JsonMapping) -> JsonObject:
    """Entries of the text model that is nested in a config; empty where there is none."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else {}


def read_json(path: Path) -> JsonObject:
    """The JSON object in a file. Raises `BrokenModel`."""
    value = read_any_json(path)
    if not isinstance(value, dict):
        raise BrokenModel(f"{path}: must hold a JSON object", param=path.name)
    return value


def read_any_json(path: Path) -> object:
    """The JSON value in a file. Raises `BrokenModel`."""
    try:
        value: object = json.loads(read_text(path, MOST))
        return value
    except OSError as error:
        raise BrokenModel(f"{path}: cannot be read: {file_trouble(error)}", param=path.name) from error
    except (ValueError, RecursionError) as error:
        raise BrokenModel(f"{path}: is not valid JSON: {error}", param=path.name) from error
