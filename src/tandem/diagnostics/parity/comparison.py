"""Comparison of a layout's logits and greedy tokens with those of a single process.

This process may be one of several ranks that `mlx.launch` started. Imports mlx only to compute.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tandem.comm.blas import limit_threads, preload_blas
from tandem.config.settings import ParallelSettings, Settings
from tandem.diagnostics.parity.reference import ParityWorkload, Recording, default_path, describe, read, versions, write
from tandem.diagnostics.parity.runs import THREADS, checked_workload, default_prompts, read_prompts, run_layout
from tandem.engine.build_layout import RankGroupLayout, plan_layout, stage_sizes
from tandem.env import variable
from tandem.errors import ConfigError, LayoutError
from tandem.launchers import host_facts
from tandem.launchers.registry import launcher_kind
from tandem.loading.mlx_lm_models import import_models_only
from tandem.system.cuda import prepare_cuda
from tandem.text.tokenizer import load_tokenizer

RELATIVE = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 5e-2}
"""Tolerance by dtype, as a share of the largest logit, where tensor-parallel sums change the order of additions."""


Note = Callable[[str], None]
"""Callback for a message to the user, one line."""


@dataclass(frozen=True)
class MlxRank:
    """Rank of this process among those that `mlx.launch` started."""

    rank: int
    size: int
    ring: bool
    """True if `mlx.launch` set up the ring backend."""


def launched_rank() -> MlxRank | None:
    """Return this process's rank under `mlx.launch`; None without `mlx.launch`. Raises ConfigError."""
    if variable("MLX_RANK") is None:
        return None
    told, size = host_facts.launched_process_group(), variable("MLX_WORLD_SIZE")
    if size is not None and not size.isdecimal():
        raise ConfigError(f"MLX_WORLD_SIZE is {size!r}, not a number; start with mlx.launch, or unset MLX_RANK")
    count = int(size) if size is not None else max(len(told.hostfile), len(told.devices))
    return MlxRank(told.rank or 0, count, bool(told.hostfile)) if count > 1 else None


def member_settings(settings: Settings, process_group: MlxRank) -> Settings:
    """Return the settings adapted to the launched ranks: pipeline parallelism unless they ask for tensor parallelism.

    Raises LayoutError if the layout has another number of ranks, or one MLX group cannot connect them.
    """
    parallel = settings.parallel
    if parallel.parallel is None and parallel.pipeline_parallel_size == parallel.tensor_parallel_size == 1:
        parallel = replace(parallel, pipeline_parallel_size=process_group.size)
    sizes = stage_sizes(parallel)
    if sum(sizes) != process_group.size:
        raise LayoutError(
            f"mlx.launch started {process_group.size} ranks, the layout has {sum(sizes)}; start as many, or "
            "change --pipeline-parallel-size or --tensor-parallel-size",
            param="pipeline_parallel_size",
        )
    if len(sizes) > 1 and max(sizes) > 1:
        raise LayoutError(
            "mlx.launch makes one MLX group, and tensor with pipeline parallelism needs one for each "
            "stage; run `tandem parity` without mlx.launch",
            param="tensor_parallel_size",
        )
    if len(sizes) > 1 and (not process_group.ring or parallel.channel == "tcp"):
        raise LayoutError(
            "under mlx.launch MLX's ring joins the stages; start with --backend ring, and leave out --channel", param="channel"
        )
    if len(sizes) > 1:
        parallel = replace(parallel, channel="mlx")
    elif parallel.backend == "auto":
        parallel = replace(parallel, backend="ring" if process_group.ring else "any")
    return replace(settings, parallel=parallel)


@dataclass(frozen=True, kw_only=True)
class ParityOptions:
    """Options of `tandem parity`."""

    reference: str | None = None
    prompts: str | None = None
    tokens: int = 8
    prefill_chunk: int = 32
    tolerance: float | None = None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A layout, and the reference that it is compared with."""

    settings: Settings
    layout: RankGroupLayout
    workload: ParityWorkload
    identity: dict[str, object]
    path: Path
    """Path of the reference file."""
    named: bool
    """True if the user named that file."""
    tolerance: float | None
    note: Note

    def run(self) -> Verdict:
        """Run the layout on this machine, and the reference unless its file exists. Raises UsageError, RankFailure."""
        reference = self._reference()
        return self._judge(reference, run_layout(self.settings, self.layout, self.workload))

    def run_member(self, process_group: MlxRank) -> Verdict | None:
        """Run as one of several ranks. Return the verdict on rank 0, which needs the reference file; None elsewhere.

        Raises ConfigError if rank 0 finds no reference.
        """
        reference = None
        if process_group.rank == 0:
            if not self.path.exists():
                raise ConfigError(
                    f"there is no reference at {self.path}; first run `tandem parity` with the same "
                    "model and options, but without mlx.launch",
                    param="reference",
                )
            reference = self._read()
        prepare_cuda()
        import_models_only()
        library = preload_blas(self.settings.parallel.blas)
        limit_threads(library, self.settings.parallel.threads_per_rank or THREADS)
        from tandem.diagnostics.parity.member import run_member  # imports mlx, so must follow the BLAS

        recording = run_member(self.layout, process_group.rank, self.workload)
        return None if reference is None or recording is None else self._judge(reference, recording)

    def _reference(self) -> Recording:
        """Return the single process's recording, from the file that the user named or computed and written now."""
        if self.named and self.path.exists():
            return self._read()
        chosen = self.settings.parallel
        alone = replace(
            self.settings,
            parallel=ParallelSettings(
                executor="cluster", blas=chosen.blas, device=chosen.device, threads_per_rank=chosen.threads_per_rank
            ),
        )
        recording = run_layout(alone, plan_layout(alone), self.workload)
        write(self.path, recording, self.identity)
        self.note(f"reference of the single process written to {self.path}")
        return recording

    def _read(self) -> Recording:
        recording, metadata = read(self.path, self.identity)
        if metadata.get("versions") != versions():
            self.note(f"the reference was made with {metadata.get('versions')}, this is {versions()}")
        return recording

    def _judge(self, reference: Recording, recording: Recording) -> Verdict:
        sizes = self.layout.ranks[0].stage_sizes
        tolerance = default_tolerance(sizes, recording.dtype) if self.tolerance is None else self.tolerance
        if reference.gpu != recording.gpu:
            self.note("the reference and the layout were computed on different kinds of device")
        verdict = compare(reference, recording, tolerance)
        self.note(
            f"{verdict.positions} positions, {recording.dtype}, stages of {sizes} ranks, tolerance {tolerance:g} "
            "of the largest logit"
        )
        for remark in verdict.remarks:
            self.note(remark)
        return verdict


def prepare(settings: Settings, options: ParityOptions, process_group: MlxRank | None = None, note: Note = lambda text: None
            ) -> Comparison:  # fmt: skip
    """Check the options, plan the layout and choose the workload. Raises UsageError."""
    if not launcher_kind(settings.parallel).here:
        raise ConfigError(
            "parity runs its ranks on this machine, or under mlx.launch; leave out --launcher and --hostfile", param="launcher"
        )
    if settings.parallel.executor == "inline":
        raise ConfigError("--executor inline: parity runs every rank in a process of its own; leave it out", param="executor")
    if options.tolerance is not None and not 0 <= options.tolerance < math.inf:
        raise ConfigError(f"--tolerance {options.tolerance}: must be at least 0", param="tolerance")
    settings = replace(
        settings,
        process=replace(settings.process, log_level="WARNING"),
        parallel=replace(settings.parallel, executor="cluster"),
        # Quantisation amplifies rounding: with quantised KV no two layouts agree.
        scheduler=replace(settings.scheduler, kv_dtype="auto"),
    )
    if process_group is not None:
        settings = member_settings(settings, process_group)
    layout = plan_layout(settings)
    vocabulary = layout.description.vocab_size
    if options.prompts is None:
        prompts = default_prompts(vocabulary, max(options.prefill_chunk, 1))
    else:
        tokenizer = load_tokenizer(layout.files, trust_remote_code=settings.model.trust_remote_code)
        prompts = read_prompts(Path(options.prompts), tokenizer.encode)
    workload = checked_workload(
        prompts, tokens=options.tokens, prefill_chunk=options.prefill_chunk, vocab_size=vocabulary, max_context=layout.max_context
    )
    identity = describe(layout.files, workload)
    named = Path(options.reference).expanduser() if options.reference else None
    path = named or default_path(layout.files, identity, settings.model.dtype, settings.model.dequantize)
    return Comparison(
        settings=settings,
        layout=layout,
        workload=workload,
        identity=identity,
        path=path,
        named=named is not None,
        tolerance=options.tolerance,
        note=note,
    )


@dataclass(frozen=True)
class Verdict:
    """Result of a comparison."""

    passed: bool
    max_abs_diff: float
    positions: int
    """Number of positions compared."""
    remarks: tuple[str, ...]
    """Messages for the user, one line each."""

    @property
    def line(self) -> str:
        """Return the summary line that scripts parse."""
        return f"PARITY {'PASS' if self.passed else 'FAIL'} max_abs_diff={self.max_abs_diff:.3e}"


def default_tolerance(stage_sizes: tuple[int, ...], dtype: str) -> float:
    """Return the tolerance: 0 (bit-equal) without tensor parallelism, else the dtype's `RELATIVE`."""
    return 0.0 if max(stage_sizes) == 1 else RELATIVE[dtype]


def compare(reference: Recording, recording: Recording, tolerance: float) -> Verdict:
    """Compare the logits up to the first position where greedy tokens differ, and the tokens.

    `tolerance` is relative to the reference's largest absolute logit; 0 demands equal bits. Tokens may differ only at a tie: the
    reference's own logits for both lie within twice the tolerance. Raises ConfigError for different dtypes or shapes.
    """
    if reference.dtype != recording.dtype:
        raise ConfigError(
            f"the reference was computed in {reference.dtype}, the layout in {recording.dtype}; give both the same --dtype",
            param="dtype",
        )
    scale = max(float(np.abs(logits).max()) for logits in reference.logits)
    worst, positions, remarks, equal = 0.0, 0, [], True
    for i, (expected, mine) in enumerate(zip(reference.logits, recording.logits, strict=True)):
        if expected.shape != mine.shape:
            raise ConfigError(
                f"prompt {i + 1} has logits {expected.shape} in the reference and {mine.shape} in the "
                "layout; make the reference again",
                param="reference",
            )
        shared, remark, tie = _tokens(reference, recording, i, 2 * tolerance * scale)
        equal &= tie
        remarks += [remark] if remark else []
        rows = expected.shape[0] - len(reference.tokens[i]) + 1 + shared
        difference = np.abs(expected[:rows] - mine[:rows]).max()
        worst = float(np.fmax(worst, difference)) if np.isfinite(difference) else float("nan")
        positions += min(rows, expected.shape[0])
        if not np.isfinite(worst):
            break
    if equal and not remarks:
        remarks.append(f"tokens equal: {sum(map(len, recording.tokens))} of {len(recording.tokens)} prompts")
    passed = equal and worst <= tolerance * scale
    return Verdict(passed, worst, positions, tuple(remarks))


def _tokens(reference: Recording, recording: Recording, prompt: int, open_within: float) -> tuple[int, str, bool]:
    """Return the number of equal leading tokens, a remark on the first difference, and whether it is a tie or absent."""
    expected, mine = reference.tokens[prompt], recording.tokens[prompt]
    shared = next((i for i, pair in enumerate(zip(expected, mine, strict=True)) if pair[0] != pair[1]), len(expected))
    if shared == len(expected):
        return shared, "", True
    row = reference.logits[prompt][reference.logits[prompt].shape[0] - len(expected) + shared]
    gap = float(row[expected[shared]] - row[mine[shared]])
    what = (
        f"prompt {prompt + 1}: token {shared + 1} is {expected[shared]} in the reference and {mine[shared]} in the "
        f"layout, whose logits are {gap:.3g} apart"
    )
    return (
        (shared, f"{what}: a tie, compared up to there", True)
        if gap <= open_within and open_within > 0
        else (shared, what, False)
    )
