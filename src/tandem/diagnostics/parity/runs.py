"""Workload of a comparison, and the local run of a layout that records its logits.

Executor, runner and links are those of serving.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from tandem.config.settings import Settings
from tandem.diagnostics.parity.reference import ParityWorkload, Recording, split_rows
from tandem.diagnostics.tasks import MODULE, RecordingTask
from tandem.engine.build_layout import RankGroupLayout
from tandem.engine.result_collector import run_offline
from tandem.errors import ConfigError
from tandem.executors.cluster import ClusterExecutor
from tandem.executors.executor import Executor
from tandem.executors.worker import run_rank
from tandem.launchers.local import LocalLauncher
from tandem.processes.child import ChildProcess
from tandem.protocol.layout import StageSpec
from tandem.protocol.payloads import WorkerPayload
from tandem.protocol.request import EngineRequest, SamplingParams
from tandem.scheduler.limits import Limits
from tandem.system.cuda import uses_cuda
from tandem.system.files import file_errors, read_text

if TYPE_CHECKING:
    from tandem.loading.stage import StageModel

SHORT, BEYOND = 7, 6
"""Tokens of the short default prompt, and of the long one's third prefill chunk."""
THREADS = 1
"""Default CPU threads of each rank. A BLAS may add in another order with another number of threads, and layouts must be
comparable bit for bit."""


class RecordingLauncher(LocalLauncher):
    """Starts ranks on this machine that record their logits; the sampling rank writes them to `path`."""

    def __init__(self, threads_per_rank: int, path: Path, cuda: bool) -> None:
        super().__init__(threads_per_rank, MODULE, cuda)
        self._path = path

    def start(self, rank: int, world_size: int, payload: bytes, extra_env: dict[str, str]) -> ChildProcess:
        """Start one rank."""
        task = RecordingTask(worker=msgspec.Raw(payload), path=str(self._path))
        return super().start(rank, world_size, msgspec.json.encode(task), extra_env)


def record(task: RecordingTask) -> None:
    """Run a recording rank, in a process of `RecordingLauncher`."""
    worker = msgspec.json.decode(task.worker, type=WorkerPayload)

    def wrap(stage: StageModel) -> StageModel:
        from tandem.diagnostics.parity.member import recording  # imports mlx, so must follow the BLAS

        return recording(stage, Path(task.path), keeps=worker.spec.samples)

    run_rank(worker, wrap)


def default_prompts(vocab_size: int, prefill_chunk: int) -> list[list[int]]:
    """Return a short prompt and one of three prefill chunks, with deterministic pseudo-random token ids."""
    rng = random.Random(7)
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in (SHORT, 2 * prefill_chunk + BEYOND)]


def read_prompts(path: Path, encode: Callable[[str], list[int]]) -> list[list[int]]:
    """Read prompts from a file, one a line: text, or a JSON list of token ids. Raises ConfigError."""
    with file_errors(f"--prompts {path}: cannot be read", param="prompts", kind=ConfigError):
        lines = [line for line in read_text(path).splitlines() if line.strip()]
    if not lines:
        raise ConfigError(f"--prompts {path}: has no lines; write one prompt a line", param="prompts")
    return [_ids(line) or encode(line) for line in lines]


def _ids(line: str) -> list[int] | None:
    try:
        ids = json.loads(line)
    except ValueError:
        return None
    plain = isinstance(ids, list) and ids and all(type(token) is int for token in ids)
    return ids if plain else None


def checked_workload(prompts: list[list[int]], *, tokens: int, prefill_chunk: int, vocab_size: int, max_context: int
                     ) -> ParityWorkload:  # fmt: skip
    """Return the workload. Raises ConfigError for an empty or too long prompt, a bad token id or a bad option."""
    if tokens < 1:
        raise ConfigError(f"--tokens {tokens}: produce at least 1", param="tokens")
    if prefill_chunk < 1:
        raise ConfigError(f"--prefill-chunk {prefill_chunk}: must be at least 1", param="prefill_chunk")
    for i, prompt in enumerate(prompts):
        if not prompt:
            raise ConfigError(f"prompt {i + 1} has no tokens; give at least one", param="prompts")
        if not all(0 <= token < vocab_size for token in prompt):
            raise ConfigError(f"prompt {i + 1} has token ids outside of 0..{vocab_size - 1}", param="prompts")
        if len(prompt) + tokens > max_context:
            raise ConfigError(
                f"prompt {i + 1} of {len(prompt)} tokens and {tokens} more exceed the context of "
                f"{max_context}; shorten it, or lower --tokens or --prefill-chunk",
                param="prompts",
            )
    return ParityWorkload(prompts=tuple(map(tuple, prompts)), tokens=tokens, prefill_chunk=prefill_chunk)


def run_layout(settings: Settings, layout: RankGroupLayout, workload: ParityWorkload) -> Recording:
    """Start the layout's ranks on this machine, run the workload and stop them. Raises UsageError and RankFailure."""
    with tempfile.TemporaryDirectory(prefix="tandem-parity-") as directory:
        path = Path(directory) / "logits"
        parallel = settings.parallel
        launcher = RecordingLauncher(parallel.threads_per_rank or THREADS, path, uses_cuda(parallel.device))
        executor = ClusterExecutor(
            list(layout.ranks),
            launcher,
            start_timeout_s=settings.scheduler.start_timeout,
            step_timeout_s=settings.scheduler.step_timeout,
            rejoin_timeout_s=settings.scheduler.rejoin_timeout,
        )
        try:
            ready = executor.start()
            tokens = run_prompts(executor, layout, workload, layout.ranks)
        finally:
            executor.close()
        rows = np.fromfile(path, dtype=np.float32).reshape(-1, layout.description.vocab_size)
        return split_rows(rows, tokens, workload, dtype=path.with_suffix(".dtype").read_text(), gpu=ready[0].gpu)


def run_prompts(
    executor: Executor, layout: RankGroupLayout, workload: ParityWorkload, ranks: Sequence[StageSpec]
) -> list[list[int]]:
    """Return the greedy tokens of each prompt. Each prompt runs alone in its batch, so that all layouts compute the same.

    `ranks` are the ranks that report to `executor`.
    """
    limits = _limits(layout, workload)
    tokens: list[list[int]] = []
    step = 0
    for prompt in workload.prompts:
        run = run_offline(executor, limits, [_request(prompt, workload.tokens)], ranks, first_step=step)
        tokens.append(run.answers["parity"].tokens)
        step = run.next_step
    return tokens


def _limits(layout: RankGroupLayout, workload: ParityWorkload) -> Limits:
    longest = max(len(prompt) for prompt in workload.prompts) + workload.tokens
    return Limits(
        micro_batches=layout.micro_batches,
        max_batch_size=layout.micro_batches,
        prefill_chunk=workload.prefill_chunk,
        kv_tokens=longest,
        max_context=layout.max_context,
        max_queued_requests=1,
        max_queue_tokens=longest,
        eos_token_ids=frozenset(),
        vocab_size=layout.description.vocab_size,
    )


def _request(prompt: Sequence[int], tokens: int) -> EngineRequest:
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    return EngineRequest(request_id="parity", prompt=list(prompt), params=params)
