"""Program that `tandem hosts sync` runs on the other machine: install the wheel from standard input.

The target is the environment of the interpreter that runs the program. Its only dependency is Python 3.8 or later, since
Tandem may be missing there.

Arguments: the wheel's name, the head's minor version of Python, inode and modification time of the head's own package (to
detect a shared installation), and requirements.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec


def same_files(inode: str, changed: str) -> bool:
    """Return True if this environment's Tandem is the head's own file: same machine, or same disk."""
    spec = find_spec("tandem")
    if spec is None or spec.origin is None:
        return False
    status = os.stat(spec.origin)
    return (str(status.st_ino), str(status.st_mtime_ns)) == (inode, changed)


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


def main(name: str, minor: str, inode: str, changed: str, *requirements: str) -> None:
    """Receive and install the wheel. Print the installed versions as one line of JSON."""
    wheel = sys.stdin.buffer.read()
    here = ".".join(map(str, sys.version_info[:2]))
    if here != minor:
        sys.exit(
            f"{sys.executable} is Python {here}, and the head's is {minor}; name another with --remote-python or "
            "`python` in the hostfile"
        )
    if same_files(inode, changed):
        print(json.dumps({"python": sys.executable, "same": True}))
        return
    directory = os.path.expanduser("~/.cache/tandem/wheels")
    os.makedirs(directory, exist_ok=True)
    path = os.path.join(directory, os.path.basename(name))
    with open(path, "wb") as file:
        file.write(wheel)
    for command in install(path, list(requirements)):
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        if done.returncode:
            said = [line for line in done.stdout.splitlines() if line.strip()] or ["nothing was said"]
            sys.exit(f"{' '.join(command[:4])} ... failed: {said[-1]}")
    ask = "from importlib.metadata import version as v; print(v('mlx-tandem'), v('mlx'), v('mlx-lm'))"
    answer = subprocess.run([sys.executable, "-P", "-c", ask], stdout=subprocess.PIPE, text=True, check=True)
    print(json.dumps({"python": sys.executable, "same": False, "versions": answer.stdout.split()}))
