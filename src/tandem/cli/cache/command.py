"""`tandem cache`: cached prefixes of a server, or a directory of `--kv-disk`."""

from __future__ import annotations

import argparse
import math
import shutil
import stat
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

from tandem.cli.address import find_server
from tandem.cli.screen import plain_table, print_table
from tandem.errors import UsageError
from tandem.json_types import JsonObject
from tandem.kv.files import ABOUT, MARK
from tandem.protocol.kv_blocks import BLOCK_SIZE, DISK_BLOCK_SIZE, NAME_BYTES
from tandem.server.cache.warm_file import read_warm_file, text_body
from tandem.system.files import file_errors, read_text

_MOST_NAME = 4096
"""Most bytes of a model's name."""


@dataclass
class Space:
    """Disk blocks of one model, adapter and element type, written by one version."""

    name: str
    """Name of the directory."""
    model: str
    """Name of the model; empty if not recorded."""
    tokens: int = 0
    """Token positions in its disk blocks, whether or not all files of a block exist."""
    files: int = 0
    nbytes: int = 0
    used: float = 0.0
    """Time of the last use of any block, in seconds since 1970."""

    @property
    def type(self) -> str:
        """Element type of the KV; for states that only an equal division of the layers can use, with the rank."""
        name, _, ranks = self.name.partition("-tp")
        return name.rpartition("-")[2] + (f", rank {ranks.partition('-')[0].replace('.', ' of ')}" if ranks else "")


def look(directory: Path) -> list[Space]:
    """Return the spaces in `directory`, most recently used first. Raises UsageError."""
    found = []
    for place in _spaces(directory):
        space, names = Space(place.name, _model(place)), set()
        for path, size, used in _files(place):
            if len(name := path.name.partition(".")[0]) <= 2 * NAME_BYTES:  # else a checkpoint, beside its block
                names.add(name)
            space.files, space.nbytes, space.used = space.files + 1, space.nbytes + size, max(space.used, used)
        space.tokens = DISK_BLOCK_SIZE * len(names)
        if space.files:
            found.append(space)
    return sorted(found, key=lambda one: -one.used)


def clear(directory: Path, unused_s: float = 0.0) -> tuple[int, int]:
    """Delete blocks unused for `unused_s` seconds. Return the numbers of files and bytes deleted. Raises UsageError."""
    count = nbytes = 0
    now = time.time()
    for place in _spaces(directory):
        for path, size, used in _files(place):
            if now - used >= unused_s:
                with file_errors(f"--kv-disk {directory}: {path.name} cannot be deleted", param="kv_disk"):
                    path.unlink(missing_ok=True)
                count, nbytes = count + 1, nbytes + size
    return count, nbytes


def _spaces(directory: Path) -> list[Path]:
    if not (directory / MARK).is_file():
        what = "is no directory that Tandem keeps KV in" if directory.exists() else "there is no such directory"
        raise UsageError(f"--kv-disk {directory}: {what}; name the one that a server has", param="kv_disk")
    with file_errors(f"--kv-disk {directory}: cannot be read", param="kv_disk"):
        return sorted(one for one in directory.iterdir() if one.is_dir() and not one.is_symlink())


def _files(place: Path) -> list[tuple[Path, int, float]]:
    """Return path, size in bytes and time of last use of each disk block."""
    found = []
    with suppress(OSError):
        for path in place.glob("*.kv"):
            with suppress(OSError):  # a server may delete it concurrently
                status = path.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    found.append((path, status.st_size, status.st_mtime))
    return found


def _model(place: Path) -> str:
    with suppress(OSError, UnicodeDecodeError):
        name = read_text(place / ABOUT, _MOST_NAME)
        return name if name.isprintable() else ""
    return ""


_DAY_S = 86400.0


def run(arguments: argparse.Namespace) -> int:
    """Run the chosen action. Raises UsageError."""
    if arguments.action == "warm":
        return _warm(arguments)
    if arguments.kv_disk is not None:
        return _of_directory(arguments)
    if arguments.action == "drop":
        return _drop(arguments)
    (_list if arguments.action == "list" else _info)(_ask(arguments))
    return 0


def _ask(arguments: argparse.Namespace, method: str = "GET", **query: str) -> JsonObject:
    given = {**query, **({"model": arguments.model} if arguments.model else {})}
    path = f"/v1/cache?{urlencode(given)}" if given else "/v1/cache"
    return find_server(arguments).get_json(path, timeout_s=90.0, method=method)


def _size(nbytes: float) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"


def _list(answer: JsonObject) -> None:
    table = plain_table("model", "replica", "tokens", "on disk", "hits", left=("model",))
    more = 0
    for model in answer["data"]:
        for one in model["replicas"]:
            for prefix in one["prefixes"]:
                table.add_row(
                    model["model"], str(one["replica"]), str(prefix["tokens"]), str(prefix["disk_tokens"]), str(prefix["hits"])
                )
            more += one["memory"]["prefixes"] - len(one["prefixes"])
    print_table(table, "no prefix is in memory; `tandem cache info` says what is on disk")
    if more:
        print(f"and {more} more")


def _info(answer: JsonObject) -> None:
    for model in answer["data"]:
        if not model["replicas"]:
            print(f"{model['model']}: no engine answers")
        for one in model["replicas"]:
            print(f"{model['model']}, replica {one['replica']}")
            if one["detail"]:
                print(f"  {one['detail']}")
            memory, disk = one["memory"], one["disk"]
            print(f"  prefix cache  {one['prefix_cache']}")
            print(
                f"  memory        {memory['prefixes']} prefixes, {memory['tokens']} of {memory['limit_tokens']} "
                f"tokens, {_size(memory['bytes'])}"
            )
            print(f"  used          {memory['hits']} of {memory['queries']} prompts, {memory['hit_tokens']} tokens")
            print(f"  disk          {_disk(disk) if disk else one['kv_disk'] or '-'}")
            if disk:
                print(
                    f"  disk used     {disk['hit_tokens']} tokens, {_size(disk['read_bytes'])} read in "
                    f"{disk['read_s']:.1f} s, {_size(disk['written_bytes'])} written, {disk['failures']} failed reads"
                )


def _disk(disk: JsonObject) -> str:
    machines = f" on {disk['machines']} machines" if disk["machines"] > 1 else ""
    return (
        f"{disk['directory']}{machines}: {disk['tokens']} tokens, {_size(disk['bytes'])}; all models "
        f"{_size(disk['total_bytes'])}, at most {_size(disk['limit_bytes'])}{' each' if machines else ''}"
    )


def _drop(arguments: argparse.Namespace) -> int:
    if arguments.unused_days is not None:
        raise UsageError("--unused-days: is about a directory; name it with --kv-disk", param="unused_days")
    answer = _ask(arguments, "DELETE", tier=arguments.tier)
    for one in answer["replicas"]:
        print(
            f"{answer['model']}, replica {one['replica']}: {one['memory_tokens']} tokens are gone from memory, "
            f"{_size(one['disk_bytes'])} from disk"
        )
    return 0


def _warm(arguments: argparse.Namespace) -> int:
    if arguments.file == "-":
        text = sys.stdin.read()
        if not text.strip():
            raise UsageError("FILE -: has no text in it", param="file")
        bodies = [text_body(text, arguments.role)]
    else:
        bodies = read_warm_file(Path(arguments.file), arguments.role)
    kept, server = True, find_server(arguments)
    for number, body in enumerate(bodies, 1):
        which = f"{arguments.file}, prompt {number}" if len(bodies) > 1 else arguments.file
        given = {**body, **({"model": arguments.model} if arguments.model else {})}
        try:
            answer = server.get_json("/v1/cache/warm", timeout_s=None, method="POST", body=given)
        except UsageError as error:
            raise UsageError(f"FILE {which}: {error.message}", param="file") from error
        print(f"{which}: {answer['prompt_tokens']} tokens, {answer['seconds']:.1f} s")
        for one in answer["replicas"]:
            print(
                f"  replica {one['replica']}: {one['computed_tokens']} computed, {one['cached_tokens']} were there; "
                f"kept in memory {one['memory_tokens']}, on disk {one['disk_tokens']}"
            )
            kept &= bool(one["memory_tokens"] or one["disk_tokens"])
    if not kept:
        print(f"Not all is kept: a prompt has fewer than {BLOCK_SIZE} tokens, or there is no room (`tandem cache info`).")
    return 0 if kept else 1


def _of_directory(arguments: argparse.Namespace) -> int:
    for flag, value in (
        ("--url", arguments.url),
        ("--port", arguments.server_port),
        ("--name", arguments.server_name),
        ("--model", arguments.model),
    ):
        if value is not None:
            raise UsageError(f"--kv-disk and {flag}: one is about a directory, one about a server; give one", param="kv_disk")
    directory = Path(arguments.kv_disk).expanduser()
    if arguments.action == "drop":
        return _clear(directory, arguments)
    spaces = look(directory)
    if arguments.action == "list":
        table = plain_table("model", "type", "tokens", "files", "size", "last used", left=("model", "type", "last used"))
        for one in spaces:
            table.add_row(
                one.model or "?",
                one.type,
                str(one.tokens),
                str(one.files),
                _size(one.nbytes),
                time.strftime("%Y-%m-%d %H:%M", time.localtime(one.used)),
            )
        print_table(table, "nothing is kept there")
        return 0
    print(f"directory  {directory}")
    print(
        f"kept       {sum(one.tokens for one in spaces)} tokens of {len(spaces)} models and types, "
        f"{sum(one.files for one in spaces)} files, {_size(sum(one.nbytes for one in spaces))}"
    )
    print(f"free       {_size(shutil.disk_usage(directory).free)} of this disk")
    return 0


def _clear(directory: Path, arguments: argparse.Namespace) -> int:
    days = 0.0 if arguments.unused_days is None else arguments.unused_days
    if not 0 <= days < math.inf:
        raise UsageError(f"--unused-days {days:g}: must be 0 or more", param="unused_days")
    if arguments.tier != "all":
        raise UsageError("--tier memory: a directory has no memory; leave one out", param="tier")
    count, nbytes = clear(directory, days * _DAY_S)
    print(f"{count} files are gone from {directory}; {_size(nbytes)} are free again")
    return 0
