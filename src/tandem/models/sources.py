"""Packages that have the modules of model types, and whether they are installed. Imports none of them."""

from __future__ import annotations

import importlib.metadata
import re

from tandem.errors import UnsupportedModel
from tandem.models.families.table import family_of

MLX_VLM = ((0, 7, 10), (0, 8))
"""Lowest version of mlx-vlm that is supported, and the first above that is not; as in the extra `vision`."""
_INSTALL = "pip install --no-deps 'mlx-vlm>=0.7.10,<0.8' 'pillow>=12,<14'"


def require_source(model_type: str) -> None:
    """Return if the package that computes a type is installed. Raise UnsupportedModel with the remedy otherwise."""
    if family_of(model_type).source == "mlx_vlm":
        require_mlx_vlm(f"model_type {model_type} is computed")


def require_mlx_vlm(what: str) -> None:
    """Return if mlx-vlm is installed. Raise UnsupportedModel with the remedy for `what` otherwise."""
    if why := lacking_mlx_vlm(what):
        raise UnsupportedModel(why)


def lacking_mlx_vlm(what: str) -> str:
    """Return that `what` needs mlx-vlm, and the remedy; empty if a supported one is installed."""
    found = _lacking()
    return f"{what} by mlx-vlm 0.7.10 or later below 0.8, and {found} here: {_INSTALL} (on every machine)" if found else ""


def has_mlx_vlm() -> bool:
    """Return whether a supported mlx-vlm is installed."""
    return not _lacking()


def _lacking() -> str:
    """Return which package is missing, or of another version; empty if none is."""
    if missing := [name for name in ("mlx-vlm", "pillow") if _version(name) is None]:
        return f"{' and '.join(missing)} {'are' if len(missing) > 1 else 'is'} not installed"
    version = _version("mlx-vlm") or ()
    return "" if MLX_VLM[0] <= version < MLX_VLM[1] else f"mlx-vlm {'.'.join(map(str, version))} is"


def _version(package: str) -> tuple[int, ...] | None:
    try:
        return tuple(map(int, re.findall(r"\d+", importlib.metadata.version(package))[:3]))
    except importlib.metadata.PackageNotFoundError:
        return None
