"""Source of this installation of Tandem, and a wheel of it, for installing the same version on other machines."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import shlex
import sys
import zipfile
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tandem.errors import UsageError
from tandem.json_types import JsonObject
from tandem.version import __version__

PACKAGE = "mlx-tandem"
MEND = "`tandem hosts sync --hostfile FILE` installs the code of this machine there"
_KEPT = ("METADATA", "entry_points.txt")
_WHEEL = "Wheel-Version: 1.0\nGenerator: tandem\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""Date of all files in a wheel, so that equal files give an identical wheel."""


@functools.cache
def build() -> str:
    """Return the version with a digest of the code that was installed at the first call, such as `0.1.0+3f9a02c1`."""
    root, digest = Path(__file__).parents[1], hashlib.blake2b(digest_size=4)
    for file in sorted(root.rglob("*.py")):
        digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return f"{__version__}+{digest.hexdigest()}"


def install_command(python: str, agent: str) -> str:
    """Return what to do on the machine of `agent` so that `python` there has the same Tandem.

    The source is that of this installation (PEP 610): the package index, a repository, or local files to copy first. For
    machines with ssh there is `tandem hosts sync`.
    """
    origin = _direct_url()
    url = str(origin.get("url", ""))
    what, first = _requirement(origin, url), f"on {agent}: "
    if url.startswith("file:"):
        path = unquote(urlsplit(url).path)
        what, first = "./" + path.rpartition("/")[2], f"copy {shlex.quote(path)} to {agent}; {first}"
    return f"{first}{python} -m pip install {shlex.quote(what)}   (then start `tandem agent` there again)"


def update_command() -> str:
    """Return what puts a newer Tandem in place of this one: the command of the program that installed it."""
    origin, folders, pip = _direct_url(), Path(sys.prefix).parts, f"{sys.executable} -m pip install --upgrade --force-reinstall"
    if "Cellar" in folders:
        return f"`brew upgrade {PACKAGE}`"
    install = "pipx install --force" if "pipx" in folders else "uv tool install --force" if "uv" in folders else pip
    if "vcs_info" in origin:
        return f"`{install} {_requirement(origin, str(origin['url'])).rpartition('@')[0]}`"
    return f"`{install} '{'dist/NEW.whl' if origin else PACKAGE}[agent]'`"


def _requirement(origin: JsonObject, url: str) -> str:
    vcs = origin.get("vcs_info")
    if isinstance(vcs, dict) and url:
        return f"{vcs.get('vcs', 'git')}+{url}@{vcs.get('commit_id', '')}"
    return f"{PACKAGE} @ {url}" if url else f"{PACKAGE}=={__version__}"


def _direct_url() -> JsonObject:
    """Return direct_url.json (PEP 610); empty for a package from an index or one that is not installed."""
    try:
        text = distribution(PACKAGE).read_text("direct_url.json")
    except PackageNotFoundError:
        return {}
    content = json.loads(text or "{}")
    return content if isinstance(content, dict) else {}


def write_wheel(directory: Path) -> Path:
    """Write this installation as a wheel into `directory` and return its path.

    Works for an installation from a wheel and for an editable one. Raises UsageError if Tandem is not installed. Format:
    https://packaging.python.org/specifications/binary-distribution-format.
    """
    try:
        ours = distribution(PACKAGE)
    except PackageNotFoundError:
        raise UsageError(
            f"{PACKAGE} is not installed here, only on the module path, so that it cannot be copied; install it with pip or uv"
        ) from None
    stem = f"{PACKAGE.replace('-', '_')}-{ours.version}"
    path = directory / f"{stem}-py3-none-any.whl"
    record: list[str] = []
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:

        def add(name: str, data: bytes) -> None:
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), data, zipfile.ZIP_DEFLATED)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append(f"{name},sha256={digest},{len(data)}\n")

        source = Path(__file__).parents[1]
        for file in sorted(source.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts and not file.name.endswith(".pyc"):
                add(file.relative_to(source.parent).as_posix(), file.read_bytes())
        for name, data in _metadata(ours):
            add(f"{stem}.dist-info/{name}", data)
        record.append(f"{stem}.dist-info/RECORD,,\n")
        archive.writestr(zipfile.ZipInfo(f"{stem}.dist-info/RECORD", _EPOCH), "".join(record), zipfile.ZIP_DEFLATED)
    return path


def _metadata(ours: Distribution) -> list[tuple[str, bytes]]:
    kept = [(name, text.encode()) for name in _KEPT if (text := ours.read_text(name)) is not None]
    return [*kept, ("WHEEL", _WHEEL.encode())]
