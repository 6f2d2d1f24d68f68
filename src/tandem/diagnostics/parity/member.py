"""A stage that records its logits, and one rank under `mlx.launch`: no engine and no bus, every rank plans for itself.

Plans don't depend on which tokens come out (no end-of-sequence, no prefix cache, one prompt at a time), so all ranks
make the same ones, and only the one that samples knows the tokens. Model, runner and MLX links are those that serve.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import mlx.core as mx
import numpy as np

from tandem.comm.group import RingLink, StageGroup
from tandem.diagnostics.parity.reference import ParityWorkload, Recording, split_rows
from tandem.diagnostics.parity.runs import run_prompts
from tandem.engine.build_layout import RankGroupLayout
from tandem.executors.assembly import build_runner, load_slice
from tandem.executors.executor import Executor, Progress
from tandem.loading.quantized_kv import Cache
from tandem.loading.stage import Apart, StageModel
from tandem.protocol.control import Ready, Stepped
from tandem.protocol.layout import StageSpec
from tandem.protocol.step import RankStep, StepPlan, StepResult, batch_fingerprint
from tandem.runner.runner import PendingStep, Runner

_DTYPES = ("float32", "float16", "bfloat16")
_END = 2**31 - 1
"""Step number of messages after the last step; MLX's ring carries none."""


class RecordingStage(StageModel):
    """A loaded stage, with its weights shared. On the last stage each forward pass is followed by the head for all of
    its positions, not just for those that are sampled from.

    Where ranks share the head all of them must record, since computing it takes them all; one keeps the result.
    """

    def __init__(self, stage: StageModel, keep: Callable[[mx.array], None] | None) -> None:
        """`keep` gets the logits [B, L, V] of each pass, in order; None on the ranks that only take part."""
        vars(self).update(vars(stage))
        self._keep = keep

    def forward(self, h: mx.array, caches: Sequence[Cache] | Apart) -> mx.array:
        """Run the layers, as `StageModel.forward`, and record the logits."""
        h = super().forward(h, caches)
        if self.is_last and not isinstance(caches, Apart):  # rows apart have come through here one by one
            logits = self.head(h)
            mx.eval(logits)
            if self._keep is not None:
                self._keep(logits)
        return h


def recording(stage: StageModel, path: Path, *, keeps: bool) -> RecordingStage:
    """Record `stage`: where it `keeps`, logits go to `path` as rows of float32, and its type's name to `path`.dtype."""
    if not keeps:
        return RecordingStage(stage, None)
    dtype_file(path).write_text(str(stage.dtype).removeprefix("mlx.core."))
    path.write_bytes(b"")

    def keep(logits: mx.array) -> None:
        with path.open("ab") as file:
            file.write(np.array(logits.astype(mx.float32)).tobytes())

    return RecordingStage(stage, keep)


def dtype_file(path: Path) -> Path:
    """Return the file with the type of computation of the logits in `path`."""
    return path.with_suffix(".dtype")


class MemberExecutor(Executor):
    """Executor of this process's own rank, in this thread."""

    def __init__(self, spec: StageSpec, path: Path) -> None:
        """Logits go to `path`, on the rank that samples."""
        self._spec = spec
        self._path = path
        self._runner: Runner | None = None
        self._pending: list[PendingStep] = []
        self.link: RingLink | None = None

    def start(self, progress: Progress | None = None) -> list[Ready]:
        """Join the world, which blocks until all ranks are there, and load."""
        spec = self._spec
        self.link = RingLink(spec.stages) if spec.stages > 1 else None
        group = StageGroup(spec.backend, spec.tp_size) if spec.tp_size > 1 else None
        stage = recording(load_slice(spec, None, group), self._path, keeps=spec.samples)
        self._runner, ready = build_runner(spec, stage, self.link, group)
        return [ready]

    def submit(self, plan: StepPlan) -> None:
        """Compute a step, as far as it can be without waiting for it."""
        assert self._runner is not None
        self._pending.append(self._runner.execute(plan))

    def collect(self, timeout_s: float) -> list[Stepped]:
        """Return the oldest step. Ranks that don't sample put zeros where the tokens belong."""
        if not self._pending:
            return []
        pending = self._pending.pop(0)
        result, plan = pending.finish(), pending.plan
        if not self._spec.samples:
            result = StepResult(plan.step_id, plan.micro_batch, [0] * len(plan.sampled()))
        return [Stepped(RankStep(self._spec.rank, plan.step_id, 0.0, pending.kv_bytes), 0, result)]

    def settle(self) -> None:
        """Receive the messages still on the way. The first stage does not use the last steps' tokens, but MLX's ring
        has no numbers to tell them from later ones."""
        assert self._runner is not None
        self._runner.execute(StepPlan(_END, 0, fingerprint=batch_fingerprint(()))).finish()

    def close(self) -> None:
        """Drop the model."""
        self._runner = None


def run_member(layout: RankGroupLayout, rank: int, workload: ParityWorkload) -> Recording | None:
    """Compute the workload together with the other ranks. Returns the recording on rank 0, None elsewhere."""
    spec = layout.ranks[rank]
    with tempfile.TemporaryDirectory(prefix="tandem-parity-") as directory:
        path = Path(directory) / "logits"
        executor = MemberExecutor(spec, path)
        [ready] = executor.start()
        tokens = run_prompts(executor, layout, workload, [spec])
        executor.settle()
        rows, dtype = None, ""
        if spec.samples:
            rows = np.fromfile(path, dtype=np.float32).reshape(-1, layout.description.vocab_size)
            dtype = dtype_file(path).read_text()
    if executor.link is not None:
        rows, tokens, dtype = _hand_over(executor.link, spec, layout, workload, rows, tokens, dtype)
    if rank or rows is None:
        return None
    return split_rows(rows, tokens, workload, dtype=dtype, gpu=ready.gpu)


def _hand_over(
    link: RingLink,
    spec: StageSpec,
    layout: RankGroupLayout,
    workload: ParityWorkload,
    rows: np.ndarray | None,
    tokens: list[list[int]],
    dtype: str,
) -> tuple[np.ndarray | None, list[list[int]], str]:
    """Send the recording from the last stage to the first, its neighbour in the ring; other ranks return at once."""
    if rows is not None:
        flat = [token for answer in tokens for token in answer]
        link.send(mx.array([_DTYPES.index(dtype), *flat], dtype=mx.int32), _END)
        link.send(mx.array(rows), _END)
        link.flush()
    if spec.rank == 0:
        count = len(workload.prompts)
        kind, *flat = cast("list[int]", link.receive((1 + count * workload.tokens,), mx.int32, _END).tolist())
        positions = sum(workload.rows(i) for i in range(count))
        rows = np.array(link.receive((positions, layout.description.vocab_size), mx.float32, _END))
        tokens = [flat[i * workload.tokens : (i + 1) * workload.tokens] for i in range(count)]
        dtype = _DTYPES[kind]
    return rows, tokens, dtype
