"""Conversion of a model to fewer bits by mlx-lm, in a process of its own, once into the cache directory. No mlx."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from tandem.checkpoints.config import read_config
from tandem.checkpoints.files import ModelFiles, Progress, weight_files
from tandem.checkpoints.stored import new_directory, used
from tandem.env import cache_dir
from tandem.errors import ModelError, UsageError
from tandem.processes.interpreter import module_command

FORMATS = {
    "4bit": ("--q-bits", "4"),
    "8bit": ("--q-bits", "8"),
    "mxfp4": ("--q-bits", "4", "--q-group-size", "32", "--q-mode", "mxfp4"),
}
"""Values of `--quant`, as flags of `mlx_lm convert`."""
POLL_S = 0.1


def quantized(files: ModelFiles, quant: str, progress: Progress) -> Path:
    """Return the directory of the model with weights in format `quant`, converted unless it is in the cache.

    `progress` is called with bytes written and in all, as estimated. Raise UsageError for weights that are quantised,
    ModelError if the disk has no room or mlx-lm fails.
    """
    weights = weight_files(files.path)
    facts = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in weights]
    key = hashlib.sha256(repr(sorted(facts)).encode()).hexdigest()[:8]  # changed weights are another model
    target = cache_dir() / "converted" / f"{files.name.rpartition('/')[2]}-{quant}-{key}"
    if (target / "config.json").is_file():
        used(target)
        return target
    if {"quantization", "quantization_config"} & read_config(files.path).keys():
        raise UsageError(f"{files.name}: its weights are quantised; name the published ones", param="model")
    total = sum(size for _, size, _ in facts) * (9 if quant == "8bit" else 5) // 16
    with new_directory(target) as scratch, tempfile.TemporaryFile() as log:
        if (free := shutil.disk_usage(scratch).free) < total:
            raise ModelError(
                f"{target}: the conversion takes about {total / 2**30:.1f} GiB and the disk has {free / 2**30:.1f}; free "
                "space (`tandem model prune`) or set TANDEM_CACHE to another disk",
                param="TANDEM_CACHE",
            )
        flags = ("--hf-path", str(files.path), "--mlx-path", str(scratch / "model"), "-q", *FORMATS[quant])
        with subprocess.Popen(module_command("mlx_lm", "convert", *flags), stdout=log, stderr=log) as process:
            while process.poll() is None:
                time.sleep(POLL_S)
                progress(min(sum(path.stat().st_size for path in scratch.glob("model/*.safetensors")), total), total)
        if process.returncode:
            log.seek(0)
            said = log.read().decode(errors="replace").strip().splitlines() or [f"code {process.returncode}"]
            raise ModelError(f"{files.name}: mlx-lm does not convert it: {said[-1][:300]}")
        for path in (scratch / "model").iterdir():
            path.rename(scratch / path.name)
        (scratch / "model").rmdir()
    return target
