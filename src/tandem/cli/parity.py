"""`tandem parity`: is a layout's arithmetic that of a single process? Also as a rank under `mlx.launch`."""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tandem.checkpoints.config import read_config
from tandem.cli.arguments import load_settings
from tandem.comm.blas import limit_threads, preload_blas
from tandem.config.settings import Settings
from tandem.engine.layout import GangLayout, plan_layout, stage_sizes
from tandem.errors import ConfigError
from tandem.launchers.registry import launcher_kind
from tandem.log import set_up
from tandem.models.families.tiny import TINY, tiny_config
from tandem.parity.reference import Recording, default_path, describe, read, versions, write
from tandem.parity.runs import THREADS, run_layout, single
from tandem.parity.task import Task, default_prompts, make_task, read_prompts
from tandem.parity.verdict import compare, default_tolerance
from tandem.parity.world import World, launched_world, member_settings
from tandem.system.cuda import prepare_cuda
from tandem.text.tokenizer import load_tokenizer

EXIT_PASS, EXIT_FAIL = 0, 1


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What is to be compared with what."""

    settings: Settings
    layout: GangLayout
    task: Task
    identity: dict[str, Any]
    path: Path
    """Of the reference."""
    named: bool
    """The user named that path."""
    tolerance: float | None


def run(arguments: argparse.Namespace) -> int:
    """Compare and print the verdict. Returns 0 if it passed, 1 if not; raises UsageError and RankFailure."""
    if arguments.tiny:
        return _try(arguments)
    world = launched_world()
    comparison = _prepared(arguments, world)
    return _run_member(comparison, world) if world is not None else _compared(comparison)


def _compared(comparison: Comparison) -> int:
    reference = _reference(comparison)
    return _judge(comparison, reference, run_layout(comparison.settings, comparison.layout, comparison.task))


def _try(arguments: argparse.Namespace) -> int:
    """Try a type, or the config of a directory; prints what was compared. Raises UsageError where there is neither.

    Where the settings say that ranks share layers, the tiny model is then compared in that layout.
    """
    named = arguments.tiny
    if Path(named).is_dir():
        config = read_config(Path(named))
    elif named in TINY:
        config = tiny_config(named)
    else:
        raise ConfigError(f"--tiny {named}: is neither a directory with a config.json nor one of "
                          f"{', '.join(sorted(TINY))}", param="tiny")
    from tandem.loading.trial import cut_down, outcome  # imports mlx, which else comes after the BLAS
    from tandem.testing import tiny_model

    passed, line = outcome(config)
    print(f"{'PASS' if passed else 'FAIL'} {named}: {line}")
    if not passed or max(stage_sizes(load_settings(arguments).settings.parallel)) == 1:
        return EXIT_PASS if passed else EXIT_FAIL
    with tempfile.TemporaryDirectory(prefix="tandem-parity-") as directory:
        arguments.model_argument = str(tiny_model(Path(directory) / "model", settings=cut_down(config)[0]))
        arguments.reference = arguments.reference or str(Path(directory) / "reference.npz")
        return _compared(_prepared(arguments, None))


def _prepared(arguments: argparse.Namespace, world: World | None) -> Comparison:
    loaded = load_settings(arguments)
    set_up("WARNING")
    settings = loaded.settings
    if not launcher_kind(settings.parallel).here:
        raise ConfigError("parity runs its ranks on this machine, or under mlx.launch; leave out --launcher and "
                          "--hostfile", param="launcher")
    if settings.parallel.executor == "inline":
        raise ConfigError("--executor inline: parity runs every rank in a process of its own; leave it out",
                          param="executor")
    if arguments.tolerance is not None and not 0 <= arguments.tolerance < math.inf:
        raise ConfigError(f"--tolerance {arguments.tolerance}: must be at least 0", param="tolerance")
    settings = replace(settings, process=replace(settings.process, log_level="WARNING"),
                       parallel=replace(settings.parallel, executor="cluster"),
                       # With quantised KV the same sums in another order can give another code: no two layouts agree.
                       scheduler=replace(settings.scheduler, kv_dtype="auto"))
    if world is not None:
        settings = member_settings(settings, world)
    layout = plan_layout(settings)
    task = _task(arguments, settings, layout)
    identity = describe(layout.files, task)
    given = Path(arguments.reference).expanduser() if arguments.reference else None
    path = given or default_path(layout.files, identity, settings.model.dtype, settings.model.dequantize)
    return Comparison(settings=settings, layout=layout, task=task, identity=identity, path=path,
                      named=given is not None, tolerance=arguments.tolerance)


def _task(arguments: argparse.Namespace, settings: Settings, layout: GangLayout) -> Task:
    vocab = layout.description.vocab_size
    if arguments.prompts is None:
        prompts = default_prompts(vocab, max(arguments.prefill_chunk, 1))
    else:
        tokenizer = load_tokenizer(layout.files, trust_remote_code=settings.model.trust_remote_code)
        prompts = read_prompts(Path(arguments.prompts), tokenizer.encode)
    return make_task(prompts, tokens=arguments.tokens, prefill_chunk=arguments.prefill_chunk, vocab_size=vocab,
                     max_context=layout.max_context)


def _reference(comparison: Comparison) -> Recording:
    """The single process's logits: read from the file that the user named, or computed and written."""
    if comparison.named and comparison.path.exists():
        return _read(comparison)
    alone = single(comparison.settings)
    recording = run_layout(alone, plan_layout(alone), comparison.task)
    write(comparison.path, recording, comparison.identity)
    _note(f"reference of the single process written to {comparison.path}")
    return recording


def _read(comparison: Comparison) -> Recording:
    recording, metadata = read(comparison.path, comparison.identity)
    if metadata.get("versions") != versions():
        _note(f"the reference was made with {metadata.get('versions')}, this is {versions()}")
    return recording


def _run_member(comparison: Comparison, world: World) -> int:
    """As one rank of several: rank 0 compares, so it alone needs the reference."""
    reference = None
    if world.rank == 0:
        if not comparison.path.exists():
            raise ConfigError(f"there is no reference at {comparison.path}; first run `tandem parity` with the same "
                              "model and options, but without mlx.launch", param="reference")
        reference = _read(comparison)
    prepare_cuda()
    library = preload_blas(comparison.settings.parallel.blas)
    limit_threads(library, comparison.settings.parallel.threads_per_rank or THREADS)
    from tandem.parity.member import run_member  # imports mlx, after the BLAS

    found = run_member(comparison.layout, world.rank, comparison.task)
    if reference is None or found is None:
        return EXIT_PASS
    return _judge(comparison, reference, found)


def _judge(comparison: Comparison, reference: Recording, found: Recording) -> int:
    tolerance = comparison.tolerance
    if tolerance is None:
        tolerance = default_tolerance(comparison.layout.ranks[0].stage_sizes, found.dtype)
    if reference.gpu != found.gpu:
        _note("the reference and the layout were computed on different kinds of device")
    verdict = compare(reference, found, tolerance)
    _note(f"{verdict.positions} positions, {found.dtype}, stages of {comparison.layout.ranks[0].stage_sizes} ranks, "
          f"tolerance {tolerance:g} of the largest logit")
    for remark in verdict.remarks:
        _note(remark)
    print(verdict.line, flush=True)
    return EXIT_PASS if verdict.passed else EXIT_FAIL


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
