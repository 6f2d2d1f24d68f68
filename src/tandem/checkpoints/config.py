"""What `config.json` and its like say, read with care."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tandem.errors import BrokenModel
from tandem.system.files import file_trouble

LARGEST_NUMBER = 2**31  # no number in a config comes near it


def read_config(path: Path) -> dict[str, Any]:
    """`config.json` of a model directory. Raises `BrokenModel`."""
    return read_json(path / "config.json")


def eos_token_ids(path: Path) -> tuple[int, ...]:
    """End-of-sequence ids of config.json and generation_config.json together, in ascending order."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        if not (path / name).exists():
            continue
        value = read_json(path / name).get("eos_token_id")
        values = value if isinstance(value, list) else [value]
        found.update(v for v in values if isinstance(v, int) and not isinstance(v, bool) and 0 <= v < LARGEST_NUMBER)
    return tuple(sorted(found))


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises `BrokenModel`."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BrokenModel(f"{path}: cannot be read: {file_trouble(error)}", param=path.name) from error
    except (ValueError, RecursionError) as error:
        raise BrokenModel(f"{path}: is not valid JSON: {error}", param=path.name) from error
    if not isinstance(value, dict):
        raise BrokenModel(f"{path}: must hold a JSON object", param=path.name)
    return value
