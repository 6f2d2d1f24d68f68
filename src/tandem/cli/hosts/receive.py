"""Program that `tandem hosts sync` runs on the other machine: install the wheel from standard input.

The target is the environment of the interpreter that runs the program. Its only dependency is Python 3.8 or later, since
Tandem may be missing there.

Arguments: the wheel's name, the head's minor version of Python, and requirements.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path


def is_installed(wheel: bytes, requirements: list[str]) -> bool:
    """Return True if this environment has the requirements, and a Tandem with the wheel's files."""
    spec = find_spec("tandem")
    if spec is None or spec.origin is None:
        return False
    root = Path(spec.origin).parents[1]
    try:
        with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
            names = [name for name in archive.namelist() if name.startswith("tandem/")]
            same = all((root / name).read_bytes() == archive.read(name) for name in names)
        return same and all(version(one.split("==")[0]) == one.split("==")[1] for one in requirements)
    except (OSError, PackageNotFoundError):
        return False


def install(path: str, requirements: list[str]) -> list[list[str]]:
    """Return the commands that install the wheel `path` and the requirements, with pip or else uv."""
    if find_spec("pip") is not None:
        pip = [sys.executable, "-P", "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        return [[*pip, path, *requirements], [*pip, "--force-reinstall", "--no-deps", path]]
    uv = shutil.which("uv")
    if uv is None:
        sys.exit(f"{sys.executable} has no pip, and there is no uv; install one of them")
    return [
        [uv, "pip", "install", "--quiet", "--python", sys.executable, "--reinstall-package", "mlx-tandem", path, *requirements]
    ]


def main(name: str, minor: str, *requirements: str) -> None:
    """Receive the wheel, and install it unless its files are there. Print versions and machine id as one line of JSON."""
    wheel = sys.stdin.buffer.read()
    here = ".".join(map(str, sys.version_info[:2]))
    if here != minor:
        sys.exit(
            f"{sys.executable} is Python {here}, and the head's is {minor}; name another with --remote-python or "
            "`python` in the hostfile"
        )
    same = is_installed(wheel, list(requirements))
    directory = os.path.expanduser("~/.cache/tandem/wheels")
    os.makedirs(directory, exist_ok=True)
    path = os.path.join(directory, os.path.basename(name))
    with open(path, "wb") as file:
        file.write(wheel)
    for command in [] if same else install(path, list(requirements)):
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        if done.returncode:
            said = [line for line in done.stdout.splitlines() if line.strip()] or ["nothing was said"]
            sys.exit(f"{' '.join(command[:4])} ... failed: {said[-1]}")
    ask = "from tandem.launchers.host_facts import installed, machine_id; print(machine_id(), *installed().values())"
    answer = subprocess.run([sys.executable, "-P", "-c", ask], stdout=subprocess.PIPE, text=True, check=True)
    machine, _, *versions = answer.stdout.split()
    print(json.dumps({"python": sys.executable, "same": same, "versions": versions, "machine": machine}))
