"""This installation of Tandem as a wheel, however it was installed: from a wheel, or editable from a checkout."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from tandem.errors import UsageError
from tandem.system.origin import PACKAGE

_KEPT = ("METADATA", "entry_points.txt")
_WHEEL = "Wheel-Version: 1.0\nGenerator: tandem\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""Of all files within, so that the same files make the same wheel."""


def write_wheel(directory: Path) -> Path:
    """Write the wheel into `directory`; its path. Raises UsageError for a Tandem that was never installed.

    The format is that of https://packaging.python.org/specifications/binary-distribution-format.
    """
    try:
        ours = distribution(PACKAGE)
    except PackageNotFoundError:
        raise UsageError(f"{PACKAGE} is not installed here, only on the module path, so that it cannot be copied; "
                         "install it with pip or uv") from None
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
