"""Pooling of hidden states into embeddings: the kind, from the files of sentence-transformers, and scaling to unit
length. No mlx."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from tandem.checkpoints.config import read_any_json
from tandem.errors import BrokenModel
from tandem.protocol.request import Pooling

if TYPE_CHECKING:
    import numpy as np

log = logging.getLogger(__name__)

_MODES: dict[str, Pooling] = {"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean"}
T = TypeVar("T")
_MODULES = frozenset({"Transformer", "Pooling", "Normalize"})


def pooling_of(path: Path, chosen: Literal["auto", "last", "mean"] = "auto") -> Pooling | None:
    """Return `chosen`; for `auto` the pooling that the model directory `path` configures, by default `last`.

    None, with a logged reason, if the files configure something unsupported. Raise `BrokenModel` for damaged files.
    """
    if chosen != "auto":
        return chosen
    modules = _read(path / "modules.json", list)
    kinds = {str(one.get("type")).rpartition(".")[2]: one for one in modules or () if isinstance(one, dict)}
    where = kinds.get("Pooling", {}).get("path", "1_Pooling")
    settings = _read(path / str(where) / "config.json", dict) or {}
    if others := sorted(set(kinds) - _MODULES):
        _warn(f"{path}/modules.json has a {others[0]} module")
        return None
    asked = sorted(name for name, on in settings.items() if name.startswith("pooling_mode_") and on)
    if not asked:
        return "last"
    if len(asked) > 1 or asked[0] not in _MODES:
        _warn(f"{path}/{where}/config.json asks for {' and '.join(asked)}")
        return None
    return _MODES[asked[0]]


def unit_vector(vector: bytes, dimensions: int | None = None) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """Return the first `dimensions` numbers of a pooled hidden state (little-endian float32), scaled to length 1."""
    import numpy as np

    values = np.frombuffer(vector, dtype="<f4")[:dimensions].astype(np.float64)
    length = float(np.linalg.norm(values))
    return (values / length if length else values).astype("<f4")


def _warn(what: str) -> None:
    log.warning("no embeddings: %s, which is not supported; --pooling last or mean serves them all the same", what)


def _read(path: Path, kind: type[T]) -> T | None:
    """Return the value of a JSON file, of type `kind`; None if the file does not exist. Raise `BrokenModel`."""
    if not path.is_file():
        return None
    value = read_any_json(path)
    if not isinstance(value, kind):
        raise BrokenModel(f"{path}: must hold a JSON {'array' if kind is list else 'object'}", param=path.name)
    return value
