"""`tandem parity`: compare a layout's outputs with those of a single process. Also runs as a rank under `mlx.launch`."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tandem.checkpoints.config import read_config
from tandem.cli.arguments import filled_in, load_settings
from tandem.config.options import nearest
from tandem.diagnostics.parity.comparison import Comparison, MlxRank, ParityOptions, Verdict, launched_rank, prepare
from tandem.engine.build_layout import stage_sizes
from tandem.errors import ConfigError
from tandem.log import set_up
from tandem.models.families.table import REFUSED
from tandem.models.families.tiny import TINY, tiny_config
from tandem.models.sources import require_source

EXIT_PASS, EXIT_FAIL = 0, 1


def run(arguments: argparse.Namespace) -> int:
    """Compare and print the verdict. Return 0 if it passed, else 1. Raises UsageError and RankFailure."""
    if arguments.tiny:
        return _try(arguments)
    process_group = launched_rank()
    comparison = _prepared(arguments, process_group)
    return _tell(comparison.run_member(process_group) if process_group is not None else comparison.run())


def _prepared(arguments: argparse.Namespace, process_group: MlxRank | None = None) -> Comparison:
    settings = load_settings(arguments).settings
    set_up("WARNING")
    options = filled_in(ParityOptions, arguments)
    return prepare(settings, options, process_group, lambda text: print(text, file=sys.stderr, flush=True))


def _tell(verdict: Verdict | None) -> int:
    """Print the verdict and return the exit code. None, on ranks without a verdict, counts as passed."""
    if verdict is not None:
        print(verdict.line, flush=True)
    return EXIT_PASS if verdict is None or verdict.passed else EXIT_FAIL


def _try(arguments: argparse.Namespace) -> int:
    """Test a tiny model of a family, or with the config of a directory, and print the verdict. Return the exit code.

    With tensor parallelism in the settings, also compare the tiny model in that layout. Raises UsageError.
    """
    named = arguments.tiny
    if Path(named).is_dir():
        config = read_config(Path(named))
    elif named in TINY:
        config = tiny_config(named)
    elif named in REFUSED:
        raise ConfigError(f"--tiny {named}: that type is refused, because {REFUSED[named]}", param="tiny")
    else:
        known = f"one of the {len(TINY)} types of docs/models-list.md{nearest(named, TINY)}"
        raise ConfigError(f"--tiny {named}: it is neither a directory with a config.json nor {known}", param="tiny")
    require_source(str(config.get("model_type")))
    from tandem.loading.dry_run import cut_down, outcome  # imports mlx, which must follow the BLAS
    from tandem.testing import tiny_model

    passed, line = outcome(config)
    print(f"{'PASS' if passed else 'FAIL'} {named}: {line}")
    if not passed or max(stage_sizes(load_settings(arguments).settings.parallel)) == 1:
        return EXIT_PASS if passed else EXIT_FAIL
    with tempfile.TemporaryDirectory(prefix="tandem-parity-") as directory:
        arguments.model_argument = str(tiny_model(Path(directory) / "model", settings=cut_down(config)[0]))
        arguments.reference = arguments.reference or str(Path(directory) / "reference.npz")
        return _tell(_prepared(arguments).run())
