"""Merging of settings from command line, environment, legacy variables, TOML file and defaults, in decreasing priority.

Also their JSON form for child processes.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tandem.config.legacy import RING_DEFAULTS, ring_values
from tandem.config.options import RENAMED, Option, by_name, nearest, options, renamed, section_class, section_names
from tandem.config.settings import ModelsSettings, NamedModel, Settings
from tandem.config.several import check_table, named_models, settings_of, unload_after
from tandem.config.validation import validate
from tandem.env import EXTRA_VARIABLES
from tandem.errors import ConfigError
from tandem.system.files import read_text

PROFILES = ("ring",)
"""Names of selectable sets of legacy variables."""

_REFUSED_WHEN_EMPTY = ("api_key", "api_key_file")
"""Fields whose variable must not be empty: a secret that failed to expand must not leave the server open."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedSettings:
    """Merged settings and their sources."""

    settings: Settings
    sources: Mapping[str, str]
    """Source of each field that was set, in the words of messages (`--port`, `TANDEM_PORT`)."""
    warnings: tuple[str, ...]

    def given(self, *sections: str) -> dict[str, Any]:
        """Return explicitly set values of these sections by field name, without defaults."""
        chosen = (option for option in options() if option.section in sections and option.name in self.sources)
        return {option.name: getattr(getattr(self.settings, option.section), option.name) for option in chosen}


class _Values:
    """Values by field name; the first `put` of a field wins."""

    def __init__(self) -> None:
        self.values: dict[str, object] = {}
        self.sources: dict[str, str] = {}
        self.named: tuple[NamedModel, ...] = ()

    def put(self, name: str, value: object, source: str) -> None:
        if name not in self.values:
            self.values[name] = value
            self.sources[name] = source

    def label(self, name: str) -> str:
        """Return the source of a field, or its flag if it has its default."""
        return self.sources.get(name, by_name()[name].flag)


def load(
    flags: Mapping[str, Sequence[str]] | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    config_file: str | None = None,
    profile: str | None = None,
) -> LoadedSettings:
    """Merge and validate settings. `flags` holds the texts of each given flag by field name.

    Raises a one-line ConfigError that names the flag, variable or file.
    """
    environment = environment or {}
    config_file = config_file or environment.get("TANDEM_CONFIG") or None
    profile = profile or environment.get("TANDEM_PROFILE") or None
    if profile is not None and profile not in PROFILES:
        raise ConfigError(f"profile {profile!r} is unknown; there is: {', '.join(PROFILES)}", param="profile")
    merged = _Values()
    warnings: list[str] = []
    for name, texts in (flags or {}).items():
        option = by_name()[renamed(name, "--" + name.replace("_", "-"), warnings)]
        merged.put(option.name, option.parse(texts, label=option.flag), option.flag)
    warnings += _add_environment(merged, environment)
    if profile == "ring":
        values, notes = ring_values(environment, merged.values)
        for name, (value, source) in values.items():
            merged.put(name, value, source)
        warnings += notes
    if config_file is not None:
        warnings += _add_file(merged, config_file)
    if profile == "ring":
        for name, value in RING_DEFAULTS.items():
            merged.put(name, value, "profile ring")
    settings = dataclasses.replace(build(merged.values), named=merged.named)
    warnings += validate(settings, merged.label)
    for one in named_models(settings):
        own = ModelsSettings(unload_after=unload_after(settings, one))
        warnings += validate(dataclasses.replace(settings_of(settings, one), models=own), one.label)
    return LoadedSettings(settings=settings, sources=merged.sources, warnings=tuple(warnings))


def build(values: Mapping[str, object]) -> Settings:
    """Return settings with `values` (by field name, of the right types) and defaults for the rest.

    Raises ConfigError for an unknown name.
    """
    sections: dict[str, dict[str, object]] = {section: {} for section in section_names()}
    for name, value in values.items():
        if name not in by_name():
            raise ConfigError(f"there is no setting {name!r}{nearest(name, by_name())}", param=name)
        several = by_name()[name].repeated and isinstance(value, str)
        sections[by_name()[name].section][name] = (value,) if several else value
    return Settings(**{section: section_class(section)(**fields) for section, fields in sections.items()})


def to_json(settings: Settings) -> bytes:
    """Return the settings as one line of JSON, for a child's standard input."""
    return msgspec.json.encode(settings)


def from_json(line: bytes) -> Settings:
    """Return the settings that `to_json` encoded. Raises ConfigError for invalid input."""
    try:
        return msgspec.json.decode(line, type=Settings)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ConfigError(f"settings on standard input are not valid: {error}") from None


def _add_environment(merged: _Values, environment: Mapping[str, str]) -> list[str]:
    """Merge TANDEM_* variables. Return warnings about unknown variables and former names."""
    known: dict[str, Option] = {option.variable: option for option in options()}
    former = {"TANDEM_" + name.upper(): name for name in RENAMED}
    warnings: list[str] = []
    for variable, text in sorted(environment.items()):
        if not variable.startswith("TANDEM_") or variable in EXTRA_VARIABLES:
            continue
        if variable in former and text.strip():
            option = by_name()[renamed(former[variable], variable, warnings)]
            merged.put(option.name, option.parse([text], label=variable), variable)
        elif variable not in known:
            # Compare without the prefix, which would make any two names similar.
            names = {one.removeprefix("TANDEM_"): one for one in (*known, *EXTRA_VARIABLES)}
            near = difflib.get_close_matches(variable.removeprefix("TANDEM_"), list(names), 1)
            meant = f"; did you mean {names[near[0]]}?" if near else ""
            warnings.append(f"{variable} is set but means nothing{meant}")
        elif text.strip():
            merged.put(known[variable].name, known[variable].parse([text], label=variable), variable)
        elif known[variable].name in _REFUSED_WHEN_EMPTY:
            raise ConfigError(f"{variable} is set but empty; unset it or give it a value", param=known[variable].name)
    return warnings


def _add_file(merged: _Values, path: str) -> list[str]:
    """Merge the tables of a TOML file. Return warnings about former names. Raises ConfigError."""
    warnings: list[str] = []
    try:
        tables = tomllib.loads(read_text(path))
    except OSError as error:
        raise ConfigError(f"--config: cannot read {path}: {error.strerror}", param="config") from None
    except (ValueError, RecursionError) as error:  # ValueError also covers text that is not UTF-8 and too many digits
        raise ConfigError(f"--config: {path} is not valid TOML: {error}", param="config") from None
    for table, entries in tables.items():
        if table not in section_names():
            raise ConfigError(f"{path}: there is no table [{table}]{_table_hint(table)}", param="config")
        if not isinstance(entries, dict):
            raise ConfigError(f"{path}: {table} must be a table, written [{table}]", param="config")
        known = {option.name: option for option in options() if option.section == table}
        if table == "models":
            tables = {key: value for key, value in entries.items() if isinstance(value, dict)}
            merged.named = tuple(check_table(key, value, f"{path} [models.{key}]", warnings) for key, value in tables.items())
            entries = {key: value for key, value in entries.items() if key not in tables}
        for key, value in entries.items():
            label = f"{path} [{table}] {key}"
            name = renamed(key, label, warnings) if RENAMED.get(key) in known else key
            if name not in known:
                raise ConfigError(f"{label}: no such setting{_key_hint(key, known)}", param=key)
            merged.put(name, known[name].convert(value, label=label), label)
    return warnings


def _table_hint(table: str) -> str:
    """Return a hint: the right table if `table` is a setting's name, else the nearest table."""
    if table in by_name():
        return f"; {table} belongs into [{by_name()[table].section}]"
    return nearest(table, section_names())


def _key_hint(key: str, known: Mapping[str, Option]) -> str:
    """Return a hint: the right table of a setting in the wrong one, else the nearest name."""
    if option := by_name().get(RENAMED.get(key, key)):
        return f"; {option.name} belongs into [{option.section}]"
    return nearest(key, known) or nearest(key, by_name())
