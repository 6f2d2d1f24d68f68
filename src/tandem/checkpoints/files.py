"""A model directory that is on this machine, or part of one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

METADATA = ("*.json", "tokenizer.model", "*.tiktoken", "tiktoken.model", "*.txt", "*.jsonl", "*.jinja")
"""Names of a model's files besides its weights."""
WEIGHTS = ("model*.safetensors",)


@dataclass(frozen=True)
class ModelFiles:
    """A model directory (config.json, model*.safetensors, tokenizer.json ...) that is on this machine."""

    path: Path
    name: str
    """What people call it: directory name, GGUF file name without suffix, or hub id."""
    headers: Path | None = None
    """Directory with a copy of the header of every weight file, where not all weights are on this machine."""
    weights: tuple[Path, ...] = ()
    """With `headers`: the safetensors files that are here, which hold some of the model's tensors."""
    hub: str = ""
    """With `headers`: repository and commit (org/name@commit) from which the other weights can be had."""
