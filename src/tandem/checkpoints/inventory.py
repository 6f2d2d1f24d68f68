"""Models that are whole on this machine: Tandem's own directories and the hub's cache. Names, sizes, dates."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tandem.checkpoints.demo import demo_path
from tandem.checkpoints.pruning import in_use
from tandem.env import cache_dir, variable
from tandem.errors import ModelNotFound, UsageError


@dataclass(frozen=True)
class Stored:
    """One model."""

    name: str
    """What `tandem serve` takes."""
    kind: str
    """`demo`, `hub`, or the directory of the cache that it is in."""
    path: Path
    """Directory with its config.json; for hub models that of the newest snapshot."""
    root: Path
    """What is removed with it."""
    nbytes: int
    """Bytes on the disk."""
    modified: float
    """When it came, in seconds since 1970."""


def stored() -> Iterator[Stored]:
    """All models, by name."""
    found = []
    for config in cache_dir().glob("*/*/config.json"):
        path = config.parent
        if path.parent.name in ("slices", "headers"):
            continue
        demo = path == demo_path()
        name, kind = ("demo", "demo") if demo else (str(path), path.parent.name)
        found.append(Stored(name, kind, path, path, _bytes(path), config.stat().st_mtime))
    for root in hub_dir().glob("models--*"):
        snapshots = sorted((one for one in root.glob("snapshots/*/config.json")), key=lambda one: one.lstat().st_mtime)
        if snapshots:
            name = root.name.removeprefix("models--").replace("--", "/")
            found.append(Stored(name, "hub", snapshots[-1].parent, root, _bytes(root), snapshots[-1].lstat().st_mtime))
    yield from sorted(found, key=lambda one: one.name)


def hub_dir() -> Path:
    """The hub's own cache directory."""
    if (own := variable("HF_HUB_CACHE")) is not None:
        return Path(own).expanduser()
    home = variable("HF_HOME")
    return (Path(home).expanduser() if home is not None else Path.home() / ".cache" / "huggingface") / "hub"


def find_stored(name: str) -> Stored:
    """The model of that name, or in that directory. Raises ModelNotFound for one that is not in a cache."""
    path = os.path.abspath(os.path.expanduser(name))
    models = list(stored())
    for one in models:
        if name in (one.name, one.path.name) or path in (str(one.path), str(one.root)):
            return one
    there = f"; there is: {', '.join(one.name for one in models)}" if models else ""
    raise ModelNotFound(f"{name}: is in no cache of models{there}", param="model")


def remove(model: Stored) -> None:
    """Remove it from the disk. Raises UsageError while a process of Tandem uses it, and OSError."""
    if any(map(in_use, (model.path, *model.root.glob("snapshots/*")))):  # of the hub's any revision may be served
        raise UsageError(f"{model.name} is in use; end what serves it first", param="model")
    shutil.rmtree(model.root)


def _bytes(path: Path) -> int:
    total = 0
    for one in path.rglob("*"):
        with suppress(OSError):
            total += one.lstat().st_blocks * 512
    return total
