"""Models on this machine's disk: complete ones, and cached parts.

Complete models are in Tandem's own directories and the hub's cache. Cached are slices and LoRA adapters from other machines,
headers, and converted GGUF files.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tandem.checkpoints.files import weight_files
from tandem.env import cache_dir, variable
from tandem.errors import BrokenModel, ModelError, ModelNotFound, UsageError
from tandem.system.files import file_errors, is_locked, try_lock

KINDS = {"slices": "*", "headers": "*/*", "gguf": "*", "adapters": "*"}
"""Directory of each kind of cache entry, and the pattern of its entries."""
DEMO = "SmolLM2-135M-Instruct"
"""Name of the demo model and of its directory."""
_open: dict[Path, int] = {}
"""File descriptors of entries that this process uses, each with a shared lock until the process exits."""


@dataclass(frozen=True)
class Stored:
    """A complete model or a cached part on disk."""

    name: str
    """Name that `tandem serve` accepts; for a part its path."""
    kind: str
    """`demo`, `hub`, or the name of the cache directory that holds it."""
    path: Path
    """Directory with its config.json; for hub models the newest snapshot."""
    root: Path
    """Directory that `remove` deletes."""
    nbytes: int
    """Bytes on disk."""
    modified: float
    """Time of creation or last use, in seconds since 1970."""

    @property
    def unused_s(self) -> float:
        """Seconds since the last use."""
        return time.time() - self.modified

    @property
    def complete(self) -> bool:
        """Whether all weight files are here. A plan keeps metadata alone, and a download that was cut off keeps a part."""
        with suppress(BrokenModel):
            return bool(weight_files(self.path))
        return False


def demo_path() -> Path:
    """Return the directory of the demo model, which may not exist."""
    return cache_dir() / "demo" / DEMO


def path_here(path: str, home: str) -> Path:
    """Return `path` or, where nothing is there, the demo model of this machine or the same path below this user's home.

    `home`: home directory of the user who named the path; empty if unknown.
    """
    named = Path(os.path.expanduser(path))
    if os.path.exists(named):  # unlike Path.exists, False below another user's home
        return named
    if named.parts[-2:] == ("demo", DEMO):
        return demo_path()
    return Path.home() / named.relative_to(home) if home and named.is_relative_to(home) else named


# ---- use


def used(path: Path) -> None:
    """Mark a cache entry as used: set its time, and lock it until this process exits."""
    with suppress(OSError):
        if path not in _open:
            _open[path] = in_use_by_us(path)
        os.utime(path)  # last, since it fails if another user owns the entry


def in_use_by_us(path: Path) -> int:
    """Return a file descriptor with a shared lock on the entry, which is not pruned until it is closed. Raise OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    with suppress(OSError):
        try_lock(descriptor, fcntl.LOCK_SH)
    return descriptor


@contextmanager
def new_directory(target: Path, proof: str = "config.json") -> Iterator[Path]:
    """Yield a temporary directory that is renamed to `target` if the block succeeds, and deleted if it fails.

    If another process creates `target` meanwhile (with something at the path `proof`), that one is kept. Raise
    `ModelError` if the disk cannot be written.
    """
    with file_errors(f"{target}: cannot be written", "set TANDEM_CACHE", param="TANDEM_CACHE", kind=ModelError):
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    using = in_use_by_us(temporary)
    try:
        yield temporary
        if not (target / proof).exists():
            shutil.rmtree(target, ignore_errors=True)
            temporary.chmod(0o755)
            try:
                os.rename(temporary, target)
            except OSError:
                if not (target / proof).exists():
                    raise
    except OSError as error:
        raise ModelError(f"{target}: cannot be written: {error.strerror or error}", param="TANDEM_CACHE") from error
    finally:
        os.close(using)
        shutil.rmtree(temporary, ignore_errors=True)


# ---- cached parts


def kept() -> Iterator[Stored]:
    """Yield all cache entries, including leftovers of interrupted starts."""
    for kind, pattern in KINDS.items():
        for path in sorted((cache_dir() / kind).glob(pattern)):
            with suppress(OSError):
                yield Stored(str(path), kind, path, path, _bytes(path), path.stat().st_mtime)


def unused(unused_s: float) -> Iterator[Stored]:
    """Yield cache entries that were not used for `unused_s` seconds and that no process uses now."""
    return (entry for entry in kept() if entry.unused_s >= unused_s and not is_locked(entry.path))


def prune(unused_s: float) -> Iterator[Stored]:
    """Delete the entries that `unused` yields, and yield each one deleted.

    They are fetched or converted again when needed. Raise OSError.
    """
    for entry in unused(unused_s):
        shutil.rmtree(entry.path) if entry.path.is_dir() else entry.path.unlink()
        yield entry


# ---- whole models


def stored() -> Iterator[Stored]:
    """Yield all models, sorted by name; of one from the hub a part may be here alone (`Stored.complete`)."""
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
    """Return the hub's own cache directory."""
    home = variable("HF_HOME") or os.path.join(variable("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(variable("HF_HUB_CACHE") or os.path.join(home, "hub")).expanduser()


def find_stored(name: str) -> Stored:
    """Return the model with this name or directory. Raise ModelNotFound if no cache has it."""
    path = os.path.abspath(os.path.expanduser(name))
    models = list(stored())
    for one in models:
        if name in (one.name, one.path.name) or path in (str(one.path), str(one.root)):
            return one
    there = f"; there is: {', '.join(one.name for one in models)}" if models else ""
    raise ModelNotFound(f"{name}: is in no cache of models{there}")


def remove(model: Stored) -> None:
    """Delete a model from disk. Raise UsageError if a Tandem process uses it, and OSError."""
    if any(map(is_locked, (model.path, *model.root.glob("snapshots/*")))):  # any revision of a hub model may be in use
        raise UsageError(f"{model.name} is in use; end what serves it first", param="model")
    shutil.rmtree(model.root)


def remove_partial(repo: str) -> None:
    """Delete files of a model whose download was ended; those that another process downloads now stay."""
    for path in demo_path().parent.glob(f".{DEMO}-*") if repo == "demo" else ():
        if not is_locked(path):
            shutil.rmtree(path, ignore_errors=True)
    root = f"models--{repo.replace('/', '--')}"
    for path in (hub_dir() / root / "blobs").glob("*.incomplete"):
        if not is_locked(hub_dir() / ".locks" / root / f"{path.name.rsplit('.', 2)[0]}.lock"):  # the hub client's own
            path.unlink(missing_ok=True)


def _bytes(path: Path) -> int:
    """Return the bytes on disk of a file, or of a directory and its contents."""
    total = 0
    for entry in (path, *path.rglob("*")):
        with suppress(OSError):
            total += entry.lstat().st_blocks * 512
    return total
