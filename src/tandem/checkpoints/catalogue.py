"""Catalogue of models by the names that people know them by, and of their conversions on the hub. No mlx.

`catalogue.toml` is read when a name is looked up that is neither a path nor a hub id.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from functools import cache
from importlib import resources

import msgspec

from tandem.errors import UsageError

BITS = {"4bit": 4.5, "8bit": 8.5, "mxfp4": 4.6, "bf16": 16.0}
"""Bits per weight in each quantisation, scales included."""
OVERHEAD, LEAST_KV = 1.1, 1 << 29
"""Factor and bytes beyond the weights that a loaded model needs at least: activations, and KV for short prompts."""


class Copy(msgspec.Struct, frozen=True):
    """One conversion of a model on the hub."""

    id: str
    seen: str
    """Keys of `Catalogue.sources`."""
    nbytes: int = 0
    """Bytes of its weights; 0 if no source gives them."""


class KnownModel(msgspec.Struct, frozen=True):
    """One model of the catalogue."""

    names: tuple[str, ...]
    """Names without regard to case and punctuation; messages use the first."""
    base: str
    """Hub id of the published weights."""
    type: str
    """The `model_type` of its config.json."""
    parameters: float
    """Number of weights in billions."""
    copies: dict[str, Copy]
    """Conversions by quantisation."""

    def nbytes(self, quant: str) -> int:
        """Return the bytes of the weights in a quantisation, estimated if no source gives them."""
        copy = self.copies.get(quant)
        return copy.nbytes if copy is not None and copy.nbytes else int(self.parameters * 1e9 * BITS[quant] / 8)

    def ids(self) -> set[str]:
        """Return the hub ids of all copies."""
        return {copy.id for copy in self.copies.values()}


class Catalogue(msgspec.Struct, frozen=True):
    """All known models."""

    checked: str
    """Date on which the ids were looked up."""
    sources: dict[str, str]
    models: tuple[KnownModel, ...]


class Chosen(msgspec.Struct, frozen=True):
    """A known model and the quantisation chosen for it."""

    model: KnownModel
    quant: str
    room: int
    """Bytes that the model may use."""

    @property
    def id(self) -> str:
        """Hub id of the chosen copy."""
        return self.model.copies[self.quant].id

    @property
    def line(self) -> str:
        """One line that names the copy, its size and the memory it was chosen for."""
        nbytes = self.model.nbytes(self.quant)
        why = shortage(nbytes, self.room) or f"{self.room / 2**30:.1f} GiB may be used"
        return f"{self.model.names[0]} is {self.id}: {self.quant}, {nbytes / 2**30:.1f} GiB; {why}"


@cache
def catalogue() -> Catalogue:
    """Return the catalogue."""
    text = resources.files("tandem.checkpoints").joinpath("catalogue.toml").read_text("utf-8")
    return msgspec.convert(tomllib.loads(text), Catalogue)


@cache
def _names() -> dict[str, KnownModel]:
    return {_key(name): model for model in catalogue().models for name in model.names}


def _key(name: str) -> str:
    return re.sub(r"[\s:_-]+", "", name.lower())


def find(name: str) -> tuple[KnownModel, str | None] | None:
    """Return the model of a name, and the quantisation that its ending names (Qwen3-32B-8bit); None if unknown."""
    if "/" in name:
        return None
    stem, _, quant = name.removesuffix(":latest").lower().rpartition("-")
    if quant in BITS and (model := _names().get(_key(stem))) is not None:
        return model, quant
    model = _names().get(_key(name.removesuffix(":latest")))
    return None if model is None else (model, None)


def copies_of(name: str) -> set[str]:
    """Return the hub ids of all copies of the model with this name or hub id; empty if unknown."""
    found = find(name)
    if found is not None:
        return found[0].ids()
    return next((ids for model in catalogue().models if name in (ids := model.ids())), set())


def choose(model: KnownModel, room: int, quant: str | None = None) -> Chosen:
    """Return the copy to load where a model may use `room` bytes: the most precise one that takes at most half, which leaves
    room for KV, else the smallest. Raise UsageError if there is no copy in the quantisation `quant`."""
    if quant is not None and quant not in model.copies:
        other = f"{model.base} has 16" if quant == "bf16" else f"`tandem model convert {model.base} --quant {quant}` makes one"
        raise UsageError(
            f"{model.names[0]}: the catalogue has no {quant} copy, only {', '.join(model.copies)}; {other}", param="quant"
        )
    small = [name for name in model.copies if 2 * model.nbytes(name) <= room]
    best = max(small, key=model.nbytes) if small else min(model.copies, key=model.nbytes)
    return Chosen(model, quant or best, room)


def shortage(nbytes: int, room: int) -> str:
    """Return why weights of this size do not fit into `room` bytes, or an empty string."""
    need = nbytes * OVERHEAD + LEAST_KV
    gib = 2.0**30
    return f"does not fit: needs about {need / gib:.1f} GiB, {room / gib:.1f} GiB may be used" if need > room else ""


def closest(name: str, count: int = 3) -> list[str]:
    """Return the names of the catalogue that are most similar to `name`."""
    near = difflib.get_close_matches(_key(name), list(_names()), count * 2)
    return list(dict.fromkeys(_names()[key].names[0] for key in near))[:count]


def search(words: list[str]) -> list[KnownModel]:
    """Return the models of which a name, the hub id or the type has each of the words."""
    keys = [_key(word) for word in words]
    texts = [(model, _key(" ".join((*model.names, model.base, model.type, *model.ids())))) for model in catalogue().models]
    return [model for model, text in texts if all(key in text for key in keys)]
