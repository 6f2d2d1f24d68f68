"""Sampling defaults from a model's `generation_config.json`."""

from __future__ import annotations

import json
from pathlib import Path

from tandem.checkpoints.config import read_json
from tandem.errors import BrokenModel, ConfigError
from tandem.json_types import JsonObject
from tandem.protocol.ranges import RANGES
from tandem.protocol.request import SamplingDefaults

FILE = "generation_config.json"
_NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""transformers' names of parameters, mapped to Tandem's."""
_WHOLE = ("top_k", "max_tokens")


def sampling_defaults(model: Path, setting: str, override: str | None) -> SamplingDefaults:
    """Return the sampling defaults of the model directory `model`, with entries of the JSON text `override` replaced.

    `setting` is `auto` (the model's own file), `none`, or another directory with such a file. Raise `ConfigError` for
    unusable values given by the user, `BrokenModel` if the model's own file is not JSON.
    """
    values: JsonObject = {}
    if setting == "auto":
        if (model / FILE).exists():
            values = _values(read_json(model / FILE))
    elif setting != "none":
        path = Path(setting).expanduser()
        path = path / FILE if path.is_dir() else path
        try:
            values = _values(read_json(path))
        except BrokenModel as error:
            raise ConfigError(
                f"--generation-config {setting}: {error.message}; give auto, none, or a directory with a {FILE}",
                param="generation_config",
            ) from error
    if override is not None:
        values |= _named(override)
    return SamplingDefaults(**values)


def _values(file: JsonObject) -> JsonObject:
    """Return the usable values of a file. Values out of range are omitted without error, since users do not write these
    files."""
    found = {ours: _number(ours, file.get(theirs)) for theirs, ours in _NAMES.items()}
    return {name: value for name, value in found.items() if value is not None and value in RANGES[name]}


def _named(override: str) -> JsonObject:
    """Return the values of `--override-generation-config`. Raise ConfigError."""
    flag, param = "--override-generation-config", "override_generation_config"
    try:
        entries = json.loads(override)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{flag}: is not JSON: {error}", param=param) from None
    if not isinstance(entries, dict):
        raise ConfigError(f'{flag}: must be a JSON object, such as {{"temperature": 0.2}}', param=param)
    values = {}
    for key, given in entries.items():
        name = str(_NAMES.get(key, key))
        if name not in _NAMES.values():
            raise ConfigError(f"{flag}: there is no {key!r:.60}; known are {', '.join(_NAMES)}", param=param)
        value = _number(name, given)
        if value is None or value not in RANGES[name]:
            kind = "a whole number" if name in _WHOLE else "a number"
            raise ConfigError(f"{flag}: {key} is {given!r:.60}; it must be {kind}, {RANGES[name]}", param=param)
        values[name] = value
    return values


def _number(name: str, value: object) -> float | int | None:
    """Return a number of the parameter's kind; None for anything else, such as a fraction for an integer parameter."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if name in _WHOLE:
        return value if isinstance(value, int) and value < 2**31 else None
    return value if isinstance(value, float) else float(value) if abs(value) < 2**31 else None
