"""A stage that records its logits, and an executor for one rank under `mlx.launch`, without engine or bus.

Every rank makes its own plans. They agree, since plans don't depend on the tokens: no end-of-sequence, no prefix cache, one
prompt at a time. Only the sampling rank knows the tokens. Model, runner and MLX links are those of serving.
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
"""Step number of messages after the last step; MLX's ring ignores it."""


class RecordingStage(StageModel):
    """A loaded stage that shares its weights with the original. On the last stage each forward pass is followed by the head for
    all of its positions, not just the sampled ones.

    With tensor parallelism all ranks must compute the head, so all record; one keeps the result.
    """

    def __init__(self, stage: StageModel, keep: Callable[[mx.array], None] | None) -> None:
        """Store `keep`, which is called with the logits [B, L, V] of each pass in order; None on ranks that discard them."""
        vars(self).update(vars(stage))
        self._keep = keep

    def forward(self, h: mx.array, caches: Sequence[Cache] | Apart) -> mx.array:
        """Run the layers like `StageModel.forward`, and record the logits."""
        h = super().forward(h, caches)
        if self.is_last and not isinstance(caches, Apart):  # rows of `Apart` have already passed here one by one
            logits = self.head(h)
            mx.eval(logits)
            if self._keep is not None:
                self._keep(logits)
        return h


def recording(stage: StageModel, path: Path, *, keeps: bool) -> RecordingStage:
    """Wrap `stage`. If `keeps`, append its logits to `path` as float32 rows and write its dtype's name to `path`.dtype."""
    if not keeps:
        return RecordingStage(stage, None)
    dtype_file(path).write_text(str(stage.dtype).removeprefix("mlx.core."))
    path.write_bytes(b"")

    def keep(logits: mx.array) -> None:
        with path.open("ab") as file:
            file.write(np.array(logits.astype(mx.float32)).tobytes())

    return RecordingStage(stage, keep)


def dtype_file(path: Path) -> Path:
    """Return the path of the file with the dtype's name that belongs to the logits in `path`."""
    return path.with_suffix(".dtype")


class MemberExecutor(Executor):
    """Executor of this process's own rank, in the calling thread."""

    def __init__(self, spec: StageSpec, path: Path) -> None:
        """Store the rank's spec; the sampling rank writes its logits to `path`."""
        self._spec = spec
        self._path = path
        self._runner: Runner | None = None
        self._pending: list[PendingStep] = []
        self.link: RingLink | None = None

    def start(self, progress: Progress | None = None) -> list[Ready]:
        """Join the MLX group, which blocks until all ranks have joined, and load the model."""
        spec = self._spec
        self.link = RingLink(spec.stages) if spec.stages > 1 else None
        group = StageGroup(spec.backend, spec.tp_size) if spec.tp_size > 1 else None
        stage = recording(load_slice(spec, None, group), self._path, keeps=spec.samples)
        self._runner, ready = build_runner(spec, stage, self.link, group)
        return [ready]

    def submit(self, plan: StepPlan) -> None:
        """Dispatch a step without waiting for its result."""
        assert self._runner is not None
        self._pending.append(self._runner.execute(plan))

    def collect(self, timeout_s: float) -> list[Stepped]:
        """Return the oldest pending step; empty without one. On ranks that don't sample, its tokens are zeros."""
        if not self._pending:
            return []
        pending = self._pending.pop(0)
        result, plan = pending.finish(), pending.plan
        if not self._spec.samples:
            result = StepResult(plan.step_id, plan.micro_batch, [0] * len(plan.sampled()))
        return [Stepped(RankStep(self._spec.rank, plan.step_id, 0.0, pending.kv_bytes), 0, result)]

    def settle(self) -> None:
        """Receive the messages still in transit. The first stage does not use the last steps' tokens. MLX's ring has no message
        numbers, so unread ones would be taken for later ones."""
        assert self._runner is not None
        self._runner.execute(StepPlan(_END, 0, fingerprint=batch_fingerprint(()))).finish()

    def close(self) -> None:
        """Drop the model."""
        self._runner = None


def run_member(layout: RankGroupLayout, rank: int, workload: ParityWorkload) -> Recording | None:
    """Run the workload together with the other ranks. Return the recording on rank 0, None elsewhere."""
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
    """Send the recording from the last stage to the first, the next in the ring. Other ranks return their arguments."""
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
