"""Downloads from the model hub: whole files into the hub client's cache, or only headers of weight files. No mlx."""

from __future__ import annotations

import errno
import json
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, errors, get_session, hf_hub_url, snapshot_download
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status
from huggingface_hub.utils import tqdm as hub_bar

from tandem.checkpoints.catalogue import copies_of
from tandem.checkpoints.files import Progress, weight_names
from tandem.checkpoints.resolve import HUB_ID
from tandem.checkpoints.safetensors import header_length, read_header
from tandem.checkpoints.stored import hub_dir, new_directory, used
from tandem.env import cache_dir
from tandem.errors import BrokenModel, ModelNotFound, TandemError
from tandem.json_types import JsonObject

HEADER_GUESS = 128 * 1024
"""Bytes of the first request; nearly every header is shorter."""
PARALLEL = 8
TIMEOUT_S = 30.0
SEARCH_S, FOUND, MOST_ANSWER = 8.0, 10, 2**22
"""Seconds that a search may take, models that it asks for, and bytes of an answer that are read."""

HUB_ERRORS: tuple[type[Exception], ...] = (
    *(one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, Exception)),
    errors.HfHubHTTPError.__bases__[0],
    OSError,
    RuntimeError,
)
"""All errors of the hub's client, which have no common base. Those of its HTTP library differ between versions, and its
Rust downloader raises RuntimeError."""
ANSWER_ERRORS: tuple[type[Exception], ...] = (*HUB_ERRORS, ValueError, LookupError, TypeError, AttributeError)
"""Errors of a request to the hub: also where something else answers in its place, such as a proxy's page."""


def download(repo: str, revision: str | None, patterns: Sequence[str], progress: Progress | None = None) -> Path:
    """Download the files of a repository that match `patterns`, unless they are cached.

    Return their directory, whose name is the commit. `progress` is called with bytes done and in all, as far as known.
    Raise `ModelNotFound`.
    """
    options: JsonObject = {"tqdm_class": _bar(progress)} if progress is not None else {}
    with _explained(repo, revision):
        return Path(snapshot_download(repo, revision=revision, allow_patterns=list(patterns), **options))


def download_headers(repo: str, snapshot: Path, patterns: Sequence[str]) -> Path:
    """Return a cached directory with the headers of all weight files, each under its file's name.

    `snapshot` is the directory that `download` returned. Without an index in it, weight files are those that match
    `patterns`. Raise `ModelNotFound`, and `BrokenModel` for a file that is not safetensors.
    """
    commit = snapshot.name
    target = cache_dir() / "headers" / repo.replace("/", "--") / commit
    if target.is_dir():
        used(target)
        return target
    with new_directory(target, proof=".") as scratch, _explained(repo, commit):
        names = weight_names(snapshot) or _matching(repo, snapshot, patterns)
        if not names:
            raise ModelNotFound(f"{repo}: has no weights in safetensors format")

        def save(name: str) -> None:
            (scratch / name).write_bytes(_header(repo, commit, snapshot, name))
            read_header(scratch / name, header_only=True)

        with ThreadPoolExecutor(PARALLEL) as pool:
            list(pool.map(save, names))
    return target


def search(words: str) -> list[tuple[str, int]]:
    """Return hub id and bytes of weights (0: unknown) of the most used MLX models that the hub finds.

    Raise `ANSWER_ERRORS`.
    """
    asked: JsonObject = {"search": words, "filter": "mlx", "sort": "downloads", "limit": FOUND, "expand": ["safetensors"]}
    raw = _first_bytes(f"{constants.ENDPOINT}/api/models", MOST_ANSWER, SEARCH_S, params=asked, headers=build_hf_headers())
    found = []
    for model in json.loads(raw):
        stored = (model.get("safetensors") or {}).get("parameters") or {}
        bits = {dtype: int((re.findall(r"\d+", dtype) or [8])[0]) for dtype in stored}  # BF16, U32, F8_E4M3, BOOL
        nbytes = sum(count * bits[dtype] // 8 for dtype, count in stored.items())
        if HUB_ID.fullmatch(str(model["id"])):
            found.append((str(model["id"]), int(nbytes) if 0 <= nbytes < 2**50 else 0))
    return found


def _matching(repo: str, snapshot: Path, patterns: Sequence[str]) -> list[str]:
    try:
        names = HfApi().list_repo_files(repo, revision=snapshot.name)
    except HUB_ERRORS:
        names = [file.name for file in snapshot.iterdir()]
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns) and "/" not in name]


def _header(repo: str, commit: str, snapshot: Path, name: str) -> bytes:
    """Return the start of a weight file, up to its data."""

    def start(length: int) -> bytes:
        if (snapshot / name).is_file():
            with (snapshot / name).open("rb") as file:
                return file.read(length)
        headers = {**build_hf_headers(), "range": f"bytes=0-{length - 1}", "accept-encoding": "identity"}
        return _first_bytes(hf_hub_url(repo, name, revision=commit), length, headers=headers)

    raw = start(HEADER_GUESS)
    try:
        length = header_length(raw[:8])
    except ValueError as error:
        raise BrokenModel(f"{repo}/{name}: {error}") from error
    return raw[:length] if length <= len(raw) else start(length)


def _first_bytes(url: str, length: int, within_s: float = 600.0, **request: Any) -> bytes:
    """Return the first `length` bytes of an answer, or all of a shorter one. Raise `HUB_ERRORS`, also after `within_s`."""
    data, end = bytearray(), time.monotonic() + within_s
    with get_session().stream("GET", url, timeout=min(TIMEOUT_S, within_s), **request) as response:
        if response.is_error:
            response.read()  # loads the error's text
        hf_raise_for_status(response)
        for block in response.iter_bytes():
            data += block
            if time.monotonic() > end:
                raise TimeoutError(f"it has not answered whole within {within_s:.0f} s")
            if len(data) >= length:  # a server that ignores ranges sends the whole file
                break
    return bytes(data[:length])


def _bar(progress: Progress) -> type[hub_bar]:
    """Return a silent subclass of the client's progress bar that reports bytes to `progress`."""

    class Reporter(hub_bar):
        def __init__(self, *args: object, **kwargs: object) -> None:
            # The client also has bars for files, and one for transferred bytes, which compression reduces.
            self._counts = kwargs.get("unit") == "B" and not str(kwargs.get("name", "")).endswith(".transfer")
            self._bytes = 0
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call,unused-ignore]

        def update(self, n: float | None = 1) -> None:
            if self._counts:
                self._bytes += int(n or 0)
                progress(self._bytes, max(int(self.total or 0), self._bytes))

    return Reporter


@contextmanager
def _explained(repo: str, revision: str | None) -> Iterator[None]:
    """Convert the client's errors to `ModelNotFound` with a one-line message."""
    where = f"{repo} (revision {revision})" if revision else repo
    try:
        yield
    except errors.GatedRepoError as error:
        raise ModelNotFound(f"{where}: access is restricted; accept its terms and log in to the hub") from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        known = " (the catalogue of names has it; `tandem search` asks the hub)" if copies_of(repo) else ""
        raise ModelNotFound(f"{where}: no such directory here, and no such model on the hub{known}") from error
    except (errors.HFValidationError, ValueError) as error:
        raise ModelNotFound(f"{where}: not a valid hub id: {line(error)}") from error
    except TandemError:
        raise
    except ANSWER_ERRORS as error:
        why = f"no such directory here, and the hub cannot be reached ({line(error)}); name a local directory or try again online"
        if getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error):
            why = f"the disk of {hub_dir()} is full; what has arrived is kept: free space (`tandem model list`, `rm` and `prune`)"
            why += " or set HF_HUB_CACHE to another disk, and run the command again"
        elif isinstance(error, OSError) and error.filename is not None:  # a file here, not the hub
            why = f"its cache cannot be used ({line(error)}); set HF_HUB_CACHE to another"
        raise ModelNotFound(f"{where}: {why}") from error


def line(error: BaseException) -> str:
    """Return the first line of an error, cut to 300 characters, without names and numbers of errors."""
    return re.sub(r"^Got: |\w+Error: |\[Errno -?\d+\] ", "", str(error).split("\n")[0])[:300]
