"""`tandem model`: fetch models and find them on disk; list, load and unload those of a server."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from urllib.parse import quote

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from tandem.checkpoints import catalogue
from tandem.checkpoints.demo import DEMO_BYTES, fetch_demo
from tandem.checkpoints.files import Progress as Report
from tandem.checkpoints.generation_config import sampling_defaults
from tandem.checkpoints.quantize import quantized
from tandem.checkpoints.resolve import resolve
from tandem.checkpoints.stored import DEMO, find_stored, kept, prune, remove, stored, unused
from tandem.cli.address import find_server
from tandem.cli.screen import models_table, print_table, screen, size
from tandem.config.loading import build
from tandem.config.validation import validate
from tandem.errors import ConfigError
from tandem.json_types import JsonObject
from tandem.models.description import describe
from tandem.planner.hosts import room

DAY_S = 86400.0


def run(arguments: argparse.Namespace) -> int:
    """Run the chosen action. Raises UsageError."""
    return _ACTIONS.get(arguments.action, _get)(arguments)


def _get(arguments: argparse.Namespace) -> int:
    as_json, quant = getattr(arguments, "json", False), getattr(arguments, "quant", None)
    path = fetched(arguments.name, arguments.revision, quant, _print_progress if as_json else None)
    print(json.dumps({"status": "success", "path": str(path)}) if as_json else path)
    return 0


def _path(arguments: argparse.Namespace) -> int:
    print(resolve(arguments.name).path)
    return 0


def _remove(arguments: argparse.Namespace) -> int:
    remove(stored_model := find_stored(arguments.name))
    print(f"{stored_model.name} is removed; {size(stored_model.nbytes)} are free again")
    return 0


def _print_progress(done: int, total: int) -> None:
    print(json.dumps({"status": "downloading", "completed": done, "total": total}), flush=True)


def fetched(name: str, revision: str | None, quant: str | None, progress: Report | None = None) -> Path:
    """Download a model, and convert its published weights to the format `quant` unless None; return its directory.

    Progress is shown on a terminal, or passed to `progress`. Raises UsageError.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as bars:
        task = bars.add_task(name, total=None)

        def show(done: int, total: int) -> None:
            text = f"{name}: checking and unpacking" if done >= total > 0 else name
            bars.update(task, description=text, completed=done, total=total or None)

        report = progress or show
        if quant is None:
            return fetch_demo(report) if name == "demo" else resolve(name, revision=revision, progress=report).path
        known = None if Path(name).exists() else catalogue.find(name)
        return quantized(resolve(known[0].base if known else name, revision=revision, progress=report), quant, report)


def _list(_: argparse.Namespace) -> int:
    table = Table("name", "kind", "size", "modified", box=None, pad_edge=False)
    for model in stored():
        kind, modified = model.kind if model.complete else "incomplete", time.localtime(model.modified)
        table.add_row(model.name, kind, size(model.nbytes), time.strftime("%Y-%m-%d %H:%M", modified))
    print_table(table, "no model is on this machine; `tandem model get demo` fetches a small one")
    extra = [entry.nbytes for entry in kept() if entry.kind != "gguf"]
    if extra:
        print(f"{size(sum(extra))} more are slices, headers and adapters from other machines (tandem model prune)")
    return 0


def _search(arguments: argparse.Namespace) -> int:
    """Print models of this machine, the catalogue and the hub; return 1 if there is none. Raises UsageError."""
    given = {name: getattr(arguments, name) for name in ("hostfile", "memory_fraction", "max_memory")}
    settings, words = build(given), " ".join(arguments.terms)
    validate(settings)
    available, terms = room(settings), words.lower().split()
    here = {one.name: one.nbytes for one in stored() if one.kind != "benchmarks" and one.complete}
    known = [catalogue.choose(model, available) for model in catalogue.search(terms)]
    rows = [(one.model.names[0], one.id, one.model.type, one.model.nbytes(one.quant)) for one in known]
    if all(term in f"demo {DEMO}".lower() for term in terms):
        rows.insert(0, ("demo", "demo", "llama", DEMO_BYTES))
    others = sorted(name for name in here.keys() - {row[1] for row in rows} if all(term in name.lower() for term in terms))
    rows = [("", name, "-", 0) for name in others] + rows
    told = f"the catalogue is of {catalogue.catalogue().checked}"
    if words:
        from tandem.checkpoints import hub  # imports the hub's client

        try:
            rows += [("", name, "-", nbytes) for name, nbytes in hub.search(words) if name not in {row[1] for row in rows}]
        except hub.ANSWER_ERRORS as error:
            told += f"; the hub's own search is left out: {hub.line(error)}"
    near = " or ".join(catalogue.closest(words))
    told = told if rows else f"nothing is found{f' (did you mean {near}?)' if near else ''}; {told}"
    found: list[JsonObject] = []
    table = Table("name", "on the hub", "type", "size", "here", box=None, pad_edge=False)
    for name, copy, kind, expected in rows:
        nbytes = here.get(copy, expected)
        fits = catalogue.shortage(nbytes, available) or "fits" if nbytes else "size unknown"
        found.append({"name": name, "id": copy, "type": kind, "bytes": nbytes, "on_disk": copy in here, "fits": fits})
        table.add_row(name, copy, kind, size(nbytes) if nbytes else "-", "on disk, " * (copy in here) + fits)
    if arguments.json:
        print(json.dumps({"models": found, "note": told}))
    elif rows:
        screen(markup=False).print(table)
    print(f"tandem: {told}", file=sys.stderr)
    return 0 if rows else 1


def _show(arguments: argparse.Namespace) -> int:
    """Print the facts of a model. Raises UsageError."""
    files = resolve(arguments.name, weights=False)
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
        "size": size(sum(model.layer_bytes) + model.embed_bytes + model.head_bytes + model.mapped_bytes),
        "sampling": ", ".join(f"{key} {value}" for key, value in sampling_defaults(files.path, "auto", None).given().items())
        or "-",
    }
    for key, value in facts.items():
        print(f"{key:12} {value}")
    return 0


def _prune(arguments: argparse.Namespace) -> int:
    days, dry_run = arguments.unused_days, arguments.dry_run
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


_ACTIONS = {"list": _list, "path": _path, "prune": _prune, "rm": _remove, "search": _search, "show": _show}
_ACTIONS |= dict.fromkeys(("ps", "load", "unload"), _of_server)
"""Actions other than those that fetch a model: `get` and `convert`."""
