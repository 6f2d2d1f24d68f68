"""Parser for memory sizes."""

from __future__ import annotations

import re

from tandem.errors import ConfigError

_SIZE = re.compile(r"(\d{1,18}(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def memory_size(text: str, label: str, param: str = "hosts") -> int:
    """Return the bytes of `64GB`, `64GiB`, `512MB` or a number of a MiB at least. Units are powers of two: GB equals GiB.

    Raises ConfigError.
    """
    match = _SIZE.fullmatch(text.strip())
    found = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if found < _UNITS["M"]:
        raise ConfigError(f"{label}: {text!r} is not a memory size such as 64GB", param=param)
    return found


def counted_memory(nbytes: int, fraction: float, most: str | None) -> int:
    """Return the bytes that count as a machine's memory, so that the share `fraction` of them is at most `most` (32GB).

    Raises ConfigError.
    """
    return nbytes if most is None else min(nbytes, int(memory_size(most, "--max-memory", "max_memory") / fraction))


def wired_bytes(text: str, label: str = "--wired") -> int | None:
    """Return the bytes of `--wired`: None for `auto`, 0 for `off`, else the size. Raises ConfigError."""
    if text in ("auto", "off"):
        return None if text == "auto" else 0
    try:
        return memory_size(text, label, "wired")
    except ConfigError as error:
        raise ConfigError(f"{error.message}; give auto, off or a size", param="wired") from None
