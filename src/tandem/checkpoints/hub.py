"""Download from the model hub: whole files into the hub client's cache, or headers of weight files alone. No mlx."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

from huggingface_hub import HfApi, errors, get_session, hf_hub_url, snapshot_download
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status
from huggingface_hub.utils import tqdm as hub_bar

from tandem.checkpoints.files import Progress, weight_names
from tandem.checkpoints.safetensors import header_length, read_header
from tandem.checkpoints.stored import new_directory, used
from tandem.env import cache_dir
from tandem.errors import BrokenModel, ModelNotFound, TandemError
from tandem.json_types import JsonObject

HEADER_GUESS = 128 * 1024
"""Bytes asked for at first: the header of nearly every file is shorter."""
PARALLEL = 8
TIMEOUT_S = 30.0

HUB_ERRORS: tuple[type[Exception], ...] = (
    *(one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, Exception)),
    errors.HfHubHTTPError.__bases__[0],
    OSError,
    RuntimeError,
)
"""All errors of the hub's client. They have no common base: those of its HTTP library differ between versions, and its
Rust downloader raises only the last."""


def download(repo: str, revision: str | None, patterns: Sequence[str], progress: Progress | None = None) -> Path:
    """Files of a repository whose names match `patterns`; those that are here already are not downloaded again.

    Returns the directory, whose name is the commit. `progress` gets bytes done and in all, as far as they are known.
    Raises `ModelNotFound`.
    """
    options: JsonObject = {"tqdm_class": _bar(progress)} if progress is not None else {}
    with _explained(repo, revision):
        return Path(snapshot_download(repo, revision=revision, allow_patterns=list(patterns), **options))


def download_headers(repo: str, snapshot: Path, patterns: Sequence[str]) -> Path:
    """A directory with the headers of all weight files, each under its file's name; kept in the cache.

    `snapshot` is the directory of `download`, with the index if there is one; without one the weight files are those
    that match `patterns`. Raises `ModelNotFound`, and `BrokenModel` for a file that is not safetensors.
    """
    commit = snapshot.name
    target = cache_dir() / "headers" / repo.replace("/", "--") / commit
    if target.is_dir():
        used(target)
        return target
    with new_directory(target, proof=".") as scratch, _explained(repo, commit):
        names = weight_names(snapshot) or _matching(repo, snapshot, patterns)
        if not names:
            raise ModelNotFound(f"{repo}: has no weights in safetensors format", param="model")

        def save(name: str) -> None:
            (scratch / name).write_bytes(_header(repo, commit, snapshot, name))
            read_header(scratch / name, header_only=True)

        with ThreadPoolExecutor(PARALLEL) as pool:
            list(pool.map(save, names))
    return target


def _matching(repo: str, snapshot: Path, patterns: Sequence[str]) -> list[str]:
    try:
        names = HfApi().list_repo_files(repo, revision=snapshot.name)
    except HUB_ERRORS:
        names = [file.name for file in snapshot.iterdir()]
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns) and "/" not in name]


def _header(repo: str, commit: str, snapshot: Path, name: str) -> bytes:
    """The start of a weight file, up to its data."""

    def start(length: int) -> bytes:
        if (snapshot / name).is_file():
            with (snapshot / name).open("rb") as file:
                return file.read(length)
        return _first_bytes(repo, commit, name, length)

    raw = start(HEADER_GUESS)
    try:
        length = header_length(raw[:8])
    except ValueError as error:
        raise BrokenModel(f"{repo}/{name}: {error}", param="model") from error
    return raw[:length] if length <= len(raw) else start(length)


def _first_bytes(repo: str, commit: str, name: str, length: int) -> bytes:
    url = hf_hub_url(repo, name, revision=commit)
    headers = {**build_hf_headers(), "range": f"bytes=0-{length - 1}", "accept-encoding": "identity"}
    data = bytearray()
    with get_session().stream("GET", url, headers=headers, timeout=TIMEOUT_S) as response:
        if response.is_error:
            response.read()  # the error's text
        hf_raise_for_status(response)
        for block in response.iter_bytes():
            data += block
            if len(data) >= length:  # a server that ignores ranges would send the whole file
                break
    return bytes(data[:length])


def _bar(progress: Progress) -> type[hub_bar]:
    """A progress bar of the client's that shows nothing and reports bytes."""

    class Reporter(hub_bar):
        def __init__(self, *args: object, **kwargs: object) -> None:
            # There are bars for files too, and one for bytes on the network, which compression makes fewer.
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
    """Turn the client's errors into one line each."""
    where = f"{repo} (revision {revision})" if revision else repo
    try:
        yield
    except errors.GatedRepoError as error:
        raise ModelNotFound(f"{where}: access is restricted; accept its terms and log in to the hub", param="model") from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        raise ModelNotFound(f"{where}: no such directory here, and no such model on the hub", param="model") from error
    except (errors.HFValidationError, ValueError) as error:
        raise ModelNotFound(f"{where}: not a valid hub id: {_line(error)}", param="model") from error
    except TandemError:
        raise
    except HUB_ERRORS as error:
        raise ModelNotFound(
            f"{where}: no such directory here, and the hub cannot be reached ({_line(error)}); name a local directory "
            "or try again online",
            param="model",
        ) from error


def _line(error: BaseException) -> str:
    return str(error).split("\n")[0][:300]
