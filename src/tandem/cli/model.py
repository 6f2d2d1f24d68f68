"""`tandem model`: fetch models and find them on disk; see, load and unload those of a server."""

from __future__ import annotations

import argparse
import json
import math
import sys
from urllib.parse import quote

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from tandem.bench.client import get
from tandem.checkpoints.demo import fetch_demo
from tandem.checkpoints.pruning import prune, unused
from tandem.checkpoints.resolve import resolve
from tandem.cli.bench import api_key, base_url
from tandem.env import cache_dir
from tandem.errors import ConfigError

DAY_S = 86400.0


def run(arguments: argparse.Namespace) -> int:
    """One of the actions. Raises UsageError."""
    if arguments.action in ("ps", "load", "unload"):
        return _of_server(arguments)
    if arguments.action == "list":
        for config in sorted(cache_dir().glob("*/*/config.json")):
            print(config.parent)
        return 0
    if arguments.action == "prune":
        return _prune(arguments.unused_days, dry_run=arguments.dry_run)
    if arguments.action == "path":
        print(resolve(arguments.name).path)
        return 0
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bars:
        task = bars.add_task(arguments.name, total=None)

        def report(done: int, total: int) -> None:
            bars.update(task, completed=done, total=total or None)

        if arguments.name == "demo":
            path = fetch_demo(report)
        else:
            path = resolve(arguments.name, revision=arguments.revision, progress=report).path
    print(path)
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
    url, key = base_url(arguments.base_url), api_key(arguments)
    if arguments.action != "ps":
        path = f"/v1/models/{quote(arguments.name)}/{arguments.action}"
        answer = json.loads(get(url, path, key, timeout_s=None, method="POST"))
        print(f"{answer['id']} is {answer['state']}")
        return 0
    table = Table("model", "state", "context", box=None, pad_edge=False)
    for one in json.loads(get(url, "/v1/models", key))["data"]:
        state, detail = one.get("state", "?"), one.get("detail")
        table.add_row(one["id"], f"{state}: {detail}" if detail else state, str(one.get("max_model_len") or "-"))
    Console().print(table)
    return 0
