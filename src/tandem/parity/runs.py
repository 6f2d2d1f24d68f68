"""Run a layout on this machine through the executor, runner and links that serve, and record its logits."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from tandem.config.settings import ParallelSettings, Settings
from tandem.engine.layout import GangLayout
from tandem.engine.quorum import drive
from tandem.executors.base import Executor
from tandem.executors.cluster import ClusterExecutor
from tandem.parity.rank import RecordingLauncher
from tandem.parity.reference import Recording, split_rows
from tandem.parity.task import Task
from tandem.protocol.layout import StageSpec
from tandem.protocol.request import EngineRequest, SamplingParams
from tandem.scheduler.limits import Limits
from tandem.system.cuda import uses_cuda

THREADS = 1
"""CPU threads of each rank unless the user says otherwise. A BLAS may add up in another order with another number of
threads, and layouts must be comparable bit for bit."""


def single(settings: Settings) -> Settings:
    """The same settings for one process that holds the whole model."""
    chosen = settings.parallel
    return replace(settings, parallel=ParallelSettings(executor="cluster", blas=chosen.blas, device=chosen.device,
                                                       threads_per_rank=chosen.threads_per_rank))


def run_layout(settings: Settings, layout: GangLayout, task: Task) -> Recording:
    """Start the layout's ranks on this machine, compute `task`, end them. Raises UsageError and RankFailure."""
    with tempfile.TemporaryDirectory(prefix="tandem-parity-") as directory:
        path = Path(directory) / "logits"
        parallel = settings.parallel
        launcher = RecordingLauncher(parallel.threads_per_rank or THREADS, path, uses_cuda(parallel.device))
        executor = ClusterExecutor(list(layout.ranks), launcher, start_timeout_s=settings.scheduler.start_timeout,
                                   step_timeout_s=settings.scheduler.step_timeout,
                                   rejoin_timeout_s=settings.scheduler.rejoin_timeout)
        try:
            ready = executor.start()
            tokens = run_task(executor, layout, task, layout.ranks)
        finally:
            executor.close()
        rows = np.fromfile(path, dtype=np.float32).reshape(-1, layout.description.vocab_size)
        return split_rows(rows, tokens, task, dtype=path.with_suffix(".dtype").read_text(), gpu=ready[0].gpu)


def run_task(executor: Executor, layout: GangLayout, task: Task, ranks: Sequence[StageSpec]) -> list[list[int]]:
    """Greedy tokens of each prompt, one prompt at a time: alone in its batch, it is computed alike in all layouts.

    `ranks`: those that report to `executor`.
    """
    limits = _limits(layout, task)
    tokens: list[list[int]] = []
    step = 0
    for prompt in task.prompts:
        run = drive(executor, limits, [_request(prompt, task.tokens)], ranks, first_step=step)
        tokens.append(run.answers["parity"].tokens)
        step = run.next_step
    return tokens


def _limits(layout: GangLayout, task: Task) -> Limits:
    longest = max(len(prompt) for prompt in task.prompts) + task.tokens
    return Limits(lanes=layout.lanes, max_batch_size=layout.lanes, prefill_chunk=task.prefill_chunk, kv_tokens=longest,
                  max_context=layout.max_context, max_queue=1, max_queue_tokens=longest, eos_token_ids=frozenset(),
                  vocab_size=layout.description.vocab_size)


def _request(prompt: Sequence[int], tokens: int) -> EngineRequest:
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    return EngineRequest(request_id="parity", prompt=list(prompt), params=params)
