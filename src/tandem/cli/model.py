"""`tandem model`: fetch models and find them on disk."""

from __future__ import annotations

import argparse
import sys

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from tandem.env import cache_dir
from tandem.models.demo import fetch_demo
from tandem.models.files import resolve


def run(arguments: argparse.Namespace) -> int:
    """One of the actions. Raises ModelError."""
    if arguments.action == "list":
        for config in sorted(cache_dir().glob("*/*/config.json")):
            print(config.parent)
        return 0
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
