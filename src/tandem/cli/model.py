"""`tandem model`: fetch models and find them on disk; see, load and unload those of a server."""

from __future__ import annotations

import argparse
import math
import sys
import time
from urllib.parse import quote

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from tandem.bench.client import get_json
from tandem.checkpoints.demo import fetch_demo
from tandem.checkpoints.generation_config import sampling_defaults
from tandem.checkpoints.resolve import resolve
from tandem.checkpoints.stored import find_stored, kept, prune, remove, stored, unused
from tandem.cli.address import api_key, server_url
from tandem.cli.screen import screen
from tandem.errors import ConfigError
from tandem.models.description import describe

DAY_S = 86400.0


def run(arguments: argparse.Namespace) -> int:
    """One of the actions. Raises UsageError."""
    if arguments.action in ("ps", "load", "unload"):
        return _of_server(arguments)
    if arguments.action == "list":
        return _list()
    if arguments.action == "show":
        return _show(arguments.name)
    if arguments.action == "rm":
        one = find_stored(arguments.name)
        remove(one)
        print(f"{one.name} is removed; {_size(one.nbytes)} are free again")
        return 0
    if arguments.action == "prune":
        return _prune(arguments.unused_days, dry_run=arguments.dry_run)
    if arguments.action == "path":
        print(resolve(arguments.name).path)
        return 0
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as bars:
        task = bars.add_task(arguments.name, total=None)

        def report(done: int, total: int) -> None:
            bars.update(task, completed=done, total=total or None)

        if arguments.name == "demo":
            path = fetch_demo(report)
        else:
            path = resolve(arguments.name, revision=arguments.revision, progress=report).path
    print(path)
    return 0


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.0f} MiB"


def _list() -> int:
    table = Table("name", "kind", "size", "modified", box=None, pad_edge=False)
    for one in stored():
        table.add_row(one.name, one.kind, _size(one.nbytes), time.strftime("%Y-%m-%d %H:%M",
                                                                           time.localtime(one.modified)))
    if table.row_count:
        screen(markup=False).print(table)
    else:
        print("no model is on this machine; `tandem model get demo` fetches a small one")
    extra = [one for one in kept() if one.kind != "gguf"]
    if extra:
        print(f"{_size(sum(one.nbytes for one in extra))} more are slices and headers of models from other machines "
              "(tandem model prune)")
    return 0


def _show(name: str) -> int:
    """What a model is. Raises UsageError."""
    files = resolve(name, weights=False)
    model = describe(files)
    quantised = f", {model.quantization.get('bits')} bits" if model.quantization else ""
    facts = {
        "name": files.name, "type": model.family, "directory": str(files.path), "layers": str(model.num_layers),
        "hidden size": str(model.hidden_size), "vocabulary": str(model.vocab_size),
        "context": f"{model.max_context} tokens", "weights": f"{model.dtype}{quantised}",
        "size": _size(sum(model.layer_bytes) + model.embed_bytes + model.head_bytes),
        "sampling": ", ".join(f"{key} {value}" for key, value in sampling_defaults(files.path, "auto",
                                                                                   None).given().items()) or "-",
    }
    for key, value in facts.items():
        print(f"{key:12} {value}")
    return 0


def _prune(days: float, *, dry_run: bool) -> int:
    if not 0 <= days < math.inf:
        raise ConfigError(f"--unused-days: {days:g} is out of range: must be 0 or more", param="unused_days")
    gone = unused(days * DAY_S) if dry_run else prune(days * DAY_S)
    total = 0
    for one in gone:
        total += one.nbytes
        print(f"{one.path}  {one.nbytes / 2**20:.1f} MiB, not used for {one.unused_s / DAY_S:.0f} days")
    print(f"{total / 2**20:.1f} MiB {'would be' if dry_run else 'are'} free again")
    return 0


def _of_server(arguments: argparse.Namespace) -> int:
    key = api_key(arguments, url := server_url(arguments))
    if arguments.action != "ps":
        path = f"/v1/models/{quote(arguments.name)}/{arguments.action}"
        answer = get_json(url, path, key, timeout_s=None, method="POST")
        print(f"{answer['id']} is {answer['state']}")
        return 0
    table = Table("model", "state", "context", box=None, pad_edge=False)
    for one in get_json(url, "/v1/models", key)["data"]:
        state, detail = one.get("state", "?"), one.get("detail")
        table.add_row(one["id"], f"{state}: {detail}" if detail else state, str(one.get("max_model_len") or "-"))
    screen(markup=False).print(table)
    return 0
