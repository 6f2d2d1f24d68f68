"""`tandem model`: fetch models and find them on disk; list, load and unload those of a server."""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from urllib.parse import quote

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from tandem.checkpoints import catalogue
from tandem.checkpoints.demo import fetch_demo
from tandem.checkpoints.generation_config import sampling_defaults
from tandem.checkpoints.quantize import quantized
from tandem.checkpoints.resolve import resolve
from tandem.checkpoints.stored import find_stored, kept, prune, remove, stored, unused
from tandem.cli.address import find_server
from tandem.cli.screen import models_table, screen, size
from tandem.config.loading import build
from tandem.config.validation import validate
from tandem.errors import ConfigError
from tandem.models.description import describe
from tandem.planner.hosts import room

DAY_S = 86400.0


def run(arguments: argparse.Namespace) -> int:
    """Run the chosen action. Raises UsageError."""
    if arguments.action in ("ps", "load", "unload"):
        return _of_server(arguments)
    if arguments.action == "list":
        return _list()
    if arguments.action == "search":
        return _search(arguments)
    if arguments.action == "show":
        return _show(arguments.name)
    if arguments.action == "rm":
        stored_model = find_stored(arguments.name)
        remove(stored_model)
        print(f"{stored_model.name} is removed; {size(stored_model.nbytes)} are free again")
        return 0
    if arguments.action == "prune":
        return _prune(arguments.unused_days, dry_run=arguments.dry_run)
    if arguments.action == "path":
        print(resolve(arguments.name).path)
        return 0
    revision, quant = getattr(arguments, "revision", None), getattr(arguments, "quant", None)
    print(fetched(arguments.name, revision, quant))
    return 0


def fetched(name: str, revision: str | None, quant: str | None) -> Path:
    """Download a model, and convert its published weights to the format `quant` unless None; return its directory.

    Progress is shown on a terminal. Raises UsageError.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as bars:
        task = bars.add_task(name, total=None)

        def report(done: int, total: int) -> None:
            text = f"{name}: checking and unpacking" if done >= total > 0 else name
            bars.update(task, description=text, completed=done, total=total or None)

        if quant is None:
            return fetch_demo(report) if name == "demo" else resolve(name, revision=revision, progress=report).path
        known = None if Path(name).exists() else catalogue.find(name)
        return quantized(resolve(known[0].base if known else name, revision=revision, progress=report), quant, report)


def _list() -> int:
    table = Table("name", "kind", "size", "modified", box=None, pad_edge=False)
    for model in stored():
        table.add_row(model.name, model.kind, size(model.nbytes), time.strftime("%Y-%m-%d %H:%M", time.localtime(model.modified)))
    if table.row_count:
        screen(markup=False).print(table)
    else:
        print("no model is on this machine; `tandem model get demo` fetches a small one")
    extra = [entry.nbytes for entry in kept() if entry.kind != "gguf"]
    if extra:
        print(f"{size(sum(extra))} more are slices, headers and adapters from other machines (tandem model prune)")
    return 0


def _search(arguments: argparse.Namespace) -> int:
    """Print models of the catalogue and of the hub; return 1 if there is none. Raises UsageError."""
    given = {name: getattr(arguments, name) for name in ("hostfile", "memory_fraction", "max_memory")}
    settings, words = build(given), " ".join(arguments.terms)
    validate(settings)
    available, rows = room(settings), []
    for model in catalogue.search(words.split()):
        chosen = catalogue.choose(model, available)
        rows.append((model.names[0], chosen.id, model.type, model.nbytes(chosen.quant)))
    told = f"the catalogue is of {catalogue.catalogue().checked}"
    if words:
        from tandem.checkpoints import hub  # imports the hub's client

        try:
            rows += [("", name, "-", nbytes) for name, nbytes in hub.search(words) if name not in {row[1] for row in rows}]
        except hub.ANSWER_ERRORS as error:
            told += f"; the hub's own search is left out: {hub.line(error)}"
    table = Table("name", "on the hub", "type", "size", "here", box=None, pad_edge=False)
    for name, copy, kind, nbytes in rows:
        fits = catalogue.shortage(nbytes, available) or "fits" if nbytes else "size unknown"
        table.add_row(name, copy, kind, size(nbytes) if nbytes else "-", fits)
    if rows:
        screen(markup=False).print(table)
    near = " or ".join(catalogue.closest(words))
    nothing = "" if rows else f"nothing is found{f' (did you mean {near}?)' if near else ''}; "
    print(f"tandem: {nothing}{told}", file=sys.stderr)
    return 0 if rows else 1


def _show(name: str) -> int:
    """Print the facts of a model. Raises UsageError."""
    files = resolve(name, weights=False)
    model = describe(files)
    quantised = f", {model.quantization.get('bits')} bits" if model.quantization else ""
    facts = {
        "name": files.name,
        "type": model.family,
        "directory": str(files.path),
        "layers": str(model.num_layers),
        "hidden size": str(model.hidden_size),
        "vocabulary": str(model.vocab_size),
        "context": f"{model.max_context} tokens",
        "weights": f"{model.dtype}{quantised}",
        "size": size(sum(model.layer_bytes) + model.embed_bytes + model.head_bytes),
        "sampling": ", ".join(f"{key} {value}" for key, value in sampling_defaults(files.path, "auto", None).given().items())
        or "-",
    }
    for key, value in facts.items():
        print(f"{key:12} {value}")
    return 0


def _prune(days: float, *, dry_run: bool) -> int:
    if not 0 <= days < math.inf:
        raise ConfigError(f"--unused-days: {days:g} is out of range: must be 0 or more", param="unused_days")
    gone = unused(days * DAY_S) if dry_run else prune(days * DAY_S)
    total = 0
    for entry in gone:
        total += entry.nbytes
        print(f"{entry.path}  {entry.nbytes / 2**20:.1f} MiB, not used for {entry.unused_s / DAY_S:.0f} days")
    print(f"{total / 2**20:.1f} MiB {'would be' if dry_run else 'are'} free again")
    return 0


def _of_server(arguments: argparse.Namespace) -> int:
    server = find_server(arguments)
    if arguments.action != "ps":
        path = f"/v1/models/{quote(arguments.name)}/{arguments.action}"
        answer = server.get_json(path, timeout_s=None, method="POST")
        print(f"{answer['id']} is {answer['state']}")
        return 0
    screen(markup=False).print(models_table(server.get_json("/v1/models")["data"]))
    return 0
