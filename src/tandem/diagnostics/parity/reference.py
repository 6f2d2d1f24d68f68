"""Recorded logits, and the file format for those of the single process.

The file is a NumPy archive (.npz, no pickles). `metadata` is JSON text; prompt i has `tokens_i`, int32 [tokens], and `logits_i`,
float32 [positions, vocabulary].
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tandem.checkpoints.files import ModelFiles
from tandem.checkpoints.safetensors import read_header
from tandem.env import cache_dir
from tandem.errors import ConfigError
from tandem.json_types import JsonObject
from tandem.launchers.host_facts import installed
from tandem.system.files import open_regular


@dataclass(frozen=True, kw_only=True)
class ParityWorkload:
    """Prompts as token ids, run one after the other; each is continued greedily."""

    prompts: tuple[tuple[int, ...], ...]
    tokens: int
    """Number of tokens to generate for each prompt."""
    prefill_chunk: int

    def rows(self, prompt: int) -> int:
        """Return the number of positions with logits: prompt and generated tokens, without the last, which is never fed back."""
        return len(self.prompts[prompt]) + self.tokens - 1


@dataclass
class Recording:
    """Tokens and logits of one run."""

    tokens: list[list[int]]
    """Greedy tokens of each prompt."""
    logits: list[npt.NDArray[np.float32]]
    """Logits [positions, vocabulary] of each prompt, see `ParityWorkload.rows`."""
    dtype: str
    """Computation dtype, such as float32."""
    gpu: bool
    """True if computed on a GPU."""


def split_rows(
    rows: npt.NDArray[np.float32], tokens: list[list[int]], workload: ParityWorkload, *, dtype: str, gpu: bool
) -> Recording:
    """Split the concatenated logits [positions of all prompts, vocabulary] by prompt. Raises ConfigError for a wrong length."""
    ends = np.cumsum([workload.rows(i) for i in range(len(workload.prompts))])
    if rows.shape[0] != ends[-1]:
        raise ConfigError(f"{rows.shape[0]} positions were recorded where {ends[-1]} were computed")
    return Recording(tokens, np.split(rows, ends[:-1]), dtype, gpu)


def fingerprint(files: ModelFiles) -> str:
    """Return 16 hex digits over config.json and each tensor's name, dtype and shape, regardless of sharding.

    Weights are not hashed: that takes as long as loading them, and comparing logits finds the difference.
    """
    tensors = {name: info for path in files.path.glob("*.safetensors") for name, info in read_header(path).items()}
    digest = hashlib.blake2b((files.path / "config.json").read_bytes(), digest_size=8)
    for name, info in sorted(tensors.items()):
        digest.update(f"{name} {info.dtype} {info.shape};".encode())
    return digest.hexdigest()


def describe(files: ModelFiles, workload: ParityWorkload) -> dict[str, object]:
    """Return the parameters that a reference and a layout must share to be comparable."""
    return {
        "fingerprint": fingerprint(files),
        "prompts": [list(prompt) for prompt in workload.prompts],
        "tokens": workload.tokens,
        "prefill_chunk": workload.prefill_chunk,
    }


def versions() -> dict[str, str]:
    """Return the versions of the numerical packages."""
    return {name: version or "" for name, version in installed().items() if name != "python"}


def default_path(files: ModelFiles, identity: dict[str, object], dtype: str, dequantize: str) -> Path:
    """Return the default path of the reference, derived from everything that affects its content."""
    text = json.dumps([identity, dtype, dequantize, versions()], sort_keys=True)
    key = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return cache_dir() / "parity" / f"{re.sub(r'[^A-Za-z0-9.-]+', '-', files.name)}-{key}.npz"


def write(path: Path, recording: Recording, identity: dict[str, object]) -> None:
    """Write the file atomically. Raises ConfigError."""
    metadata = {**identity, "versions": versions(), "dtype": recording.dtype, "gpu": recording.gpu}
    arrays: JsonObject = {"metadata": np.array(json.dumps(metadata))}
    for i, (tokens, logits) in enumerate(zip(recording.tokens, recording.logits, strict=True)):
        arrays[f"tokens_{i}"], arrays[f"logits_{i}"] = np.array(tokens, dtype=np.int32), logits
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            np.savez(file, **arrays)
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise ConfigError(f"--reference {path}: cannot be written: {error.strerror or error}", param="reference") from error


def read(path: Path, identity: dict[str, object]) -> tuple[Recording, dict[str, object]]:
    """Return the recording and its metadata. Raises ConfigError for a file that is broken or has another `identity`."""
    try:
        # Opened here, since NumPy leaks the file object of an unreadable file.
        with open_regular(path) as file, np.load(file, allow_pickle=False) as archive:
            metadata = json.loads(str(archive["metadata"]))
            count = len(metadata["prompts"])
            tokens = [[int(token) for token in archive[f"tokens_{i}"]] for i in range(count)]
            logits = [archive[f"logits_{i}"] for i in range(count)]
            recording = Recording(tokens, logits, str(metadata["dtype"]), bool(metadata["gpu"]))
    except OSError as error:
        raise ConfigError(f"--reference {path}: cannot be read: {error.strerror or error}", param="reference") from error
    except (EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        raise ConfigError(
            f"--reference {path}: is not a reference that `tandem parity` wrote: {error}", param="reference"
        ) from error
    for name, words in (
        ("fingerprint", "another model"),
        ("prompts", "other prompts"),
        ("tokens", "another --tokens"),
        ("prefill_chunk", "another --prefill-chunk"),
    ):
        if metadata.get(name) != identity[name]:
            raise ConfigError(
                f"--reference {path}: was made for {words}; give the same options as then, or name a file that is not there yet",
                param="reference",
            )
    return recording, metadata
