"""API keys, and the limits of the client that each belongs to."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from tandem.errors import ConfigError
from tandem.system.files import NotRegular, read_text


@dataclass(frozen=True, kw_only=True)
class ClientLimits:
    """Limits of one client; None means unlimited."""

    max_concurrent_requests: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    weight: float = 1.0
    """Weight of the client in fair queueing, relative to other clients."""
    name: str = ""
    """Name of the client in logs and traces; empty for `key` and the key's number."""


MOST = 10**12
"""Largest accepted value of a limit or weight."""
_NAMES = tuple(ClientLimits.__dataclass_fields__)


def read_key_file(path: str, limits: ClientLimits, *, label: str = "--api-key-file") -> dict[str, ClientLimits]:
    """Read API keys and their limits from a file of lines `KEY [name=value ...]`; omitted limits come from `limits`.

    Blank lines and lines that start with # are ignored. Raises ConfigError, whose message never quotes a key.
    """
    try:
        text = read_text(path)
    except UnicodeDecodeError:
        raise ConfigError(f"{label}: cannot read {path}: not UTF-8 text", param="api_key_file") from None
    except OSError as error:
        instead = ", or the key itself as TANDEM_API_KEY" if isinstance(error, NotRegular) else ""
        raise ConfigError(f"{label}: cannot read {path}: {error.strerror}{instead}", param="api_key_file") from None
    except ValueError:
        raise ConfigError(f"{label}: {path!r} cannot be the name of a file", param="api_key_file") from None
    keys: dict[str, ClientLimits] = {}
    for number, line in enumerate(text.splitlines(), 1):
        key, *rest = line.split() or ["#"]
        if key.startswith("#"):
            continue
        where = f"{label}: {path} line {number}"
        if key in keys:
            raise ConfigError(f"{where}: this key stands in the file twice", param="api_key_file")
        keys[key] = _limits(rest, limits, where)
    if not keys:
        raise ConfigError(f"{label}: {path} holds no key; put one key on each line", param="api_key_file")
    return keys


def _limits(words: list[str], limits: ClientLimits, where: str) -> ClientLimits:
    given: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name not in _NAMES:
            known = ", ".join(f"{one}=..." for one in _NAMES)
            raise ConfigError(f"{where}: after the key may stand, divided by spaces: {known}", param="api_key_file")
        given[name] = _value(name, value, where)
    return replace(limits, **given)


def _value(name: str, text: str, where: str) -> float | str | None:
    if name == "name":
        if not re.fullmatch(r"[\w.@+-]{1,64}", text, re.ASCII):
            raise ConfigError(f"{where}: name={text[:40]} must be 1 to 64 letters, digits or _.@+-", param="api_key_file")
        return text
    if text == "none" and name != "weight":
        return None
    try:
        value = float(text) if name == "weight" else int(text)
    except ValueError:
        value = 0
    if not 0 < value <= MOST:
        kind = "a number above 0" if name == "weight" else f"a whole number from 1 to {MOST}, or none"
        raise ConfigError(f"{where}: {name}={text[:40]} must be {kind}", param="api_key_file")
    return value
