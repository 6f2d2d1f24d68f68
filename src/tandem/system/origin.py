"""Where this installation of Tandem came from, so that other machines can be told to install the same."""

from __future__ import annotations

import json
import shlex
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any
from urllib.parse import unquote, urlsplit

from tandem.version import __version__

PACKAGE = "mlx-tandem"


def install_command(python: str, host: str) -> str:
    """A line of shell, for this machine, that installs the same Tandem for `python` on `host`.

    From where it was installed here (PEP 610): the package index, a repository, or files that have to be copied first.
    """
    origin = _direct_url()
    url = str(origin.get("url", ""))
    if url.startswith("file:"):
        path = unquote(urlsplit(url).path)
        if "dir_info" in origin:
            return (f"rsync -a --exclude '.*' {shlex.quote(path + '/')} {host}:tandem/ && "
                    f"ssh {host} \"{python} -m pip install ./tandem\"")
        return f"scp {shlex.quote(path)} {host}: && ssh {host} \"{python} -m pip install ./{path.rpartition('/')[2]}\""
    return f"ssh {host} \"{python} -m pip install '{_requirement(origin, url)}'\""


def _requirement(origin: dict[str, Any], url: str) -> str:
    vcs = origin.get("vcs_info")
    if isinstance(vcs, dict) and url:
        return f"{vcs.get('vcs', 'git')}+{url}@{vcs.get('commit_id', '')}"
    return f"{PACKAGE} @ {url}" if url else f"{PACKAGE}=={__version__}"


def _direct_url() -> dict[str, Any]:
    """Empty for what came from an index, or runs without having been installed."""
    try:
        text = distribution(PACKAGE).read_text("direct_url.json")
    except PackageNotFoundError:
        return {}
    found = json.loads(text or "{}")
    return found if isinstance(found, dict) else {}
