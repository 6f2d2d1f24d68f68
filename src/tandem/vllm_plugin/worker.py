"""vLLM's worker for one rank. vLLM's executor calls it; it passes plans to the runner of `tandem serve`."""

from __future__ import annotations

import os
import time
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from vllm.logger import init_logger
from vllm.utils.network_utils import get_ip
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, DraftTokenIds, ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from tandem.comm.blas import limit_threads, preload_blas
from tandem.env import set_variables
from tandem.json_types import JsonObject
from tandem.launchers.base import ProcessGroup
from tandem.launchers.process_groups import BASE_PORT, ring_process_group, written_process_group
from tandem.protocol.step import StepPlan
from tandem.system.awake import keep_awake
from tandem.system.cuda import prepare_cuda
from tandem.system.identity import machine_id
from tandem.system.metal import prepare_metal
from tandem.transport.channel import TcpChannel
from tandem.vllm_plugin.adapter import PlanBuilder
from tandem.vllm_plugin.rendezvous import Rendezvous, free_port
from tandem.vllm_plugin.results import NgramDrafter, StepTimes, StepUnderWay
from tandem.vllm_plugin.variables import read_options

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from tandem.runner.runner import PendingStep
    from tandem.vllm_plugin.rank import LoadedRank

logger = init_logger("vllm.tandem")

KV_SHARE = 0.5
"""Share of the memory beside the weights that vLLM may allocate as KV blocks. The rest is for cached prefixes and padding: rows
are as long as the longest of their batch."""
STOP_S = 2.0


class TandemWorker(WorkerBase):
    """One rank of the model, in a vLLM worker process."""

    def init_device(self) -> None:
        """Choose BLAS and threads, and connect to the other workers; loads nothing yet."""
        parallel = self.parallel_config
        self.device = torch.device("cpu")
        self._options = options = read_options()
        prepare_metal()
        if parallel.tensor_parallel_size > 1:
            prepare_cuda()
        keep_awake()
        self._blas = preload_blas(options.blas)
        from tandem.vllm_plugin.rank import MlxThread, WorkerLayout  # imports mlx, so must follow the BLAS

        sizes = (parallel.tensor_parallel_size,) * parallel.pipeline_parallel_size
        self._layout = WorkerLayout(
            rank=self.rank, stage_sizes=sizes, layer_split=options.layer_split, expert_parallel=parallel.enable_expert_parallel
        )
        self._rendezvous: Rendezvous | None = None
        placed: JsonObject = self.vllm_config.additional_config or {}
        here, address = 1, "127.0.0.1"
        if parallel.world_size > 1:
            self._rendezvous = Rendezvous(self.distributed_init_method, self.rank, parallel.world_size, placed)
            machines = self._rendezvous.gather("machine", machine_id())
            here = machines.count(machines[self.rank])
            if len(set(machines)) > 1:
                address = placed.get("tandem_address") or get_ip()
        self._address = address
        self._here = max(here * max(parallel.data_parallel_size_local, 1), placed.get("tandem_units", 1))
        threads = options.threads or max(1, (os.cpu_count() or 1) // self._here)
        limit_threads(self._blas, threads)
        self._mlx = MlxThread()
        self._pending: SchedulerOutput | None = None
        self._profile = StepTimes()
        layout = self._layout
        logger.info(
            "Pipeline stage %d/%d (is_first=%s, is_last=%s)",
            layout.stage,
            layout.stages,
            layout.stage == 0,
            layout.stage == layout.stages - 1,
        )

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Connect to the neighbours and load this rank's slice."""
        started = time.monotonic()
        self._loaded: LoadedRank = self._mlx.submit(self._load).result()
        stage = self._loaded.stage
        logger.info(
            "layers %d-%d in %.0f MiB of %s, linear algebra %s, %d worker(s) on this machine, %.1f s",
            stage.layers.start,
            stage.layers.stop - 1,
            stage.nbytes / 2**20,
            stage.dtype,
            self._blas or "MLX's",
            self._here,
            time.monotonic() - started,
        )

    def _load(self) -> LoadedRank:
        from tandem.comm.group import StageGroup
        from tandem.loading.memory import on_gpu
        from tandem.vllm_plugin.rank import load

        group = None
        if self._layout.tp_size > 1:
            process_group = self._ring()
            set_variables(process_group.variables(self._layout.tp_rank))
            group = StageGroup("ring", self._layout.tp_size)
            process_group.remove()
        channel = self._channel() if self._layout.stages > 1 else None
        dtype = self._options.dtype or (str(self.model_config.dtype).removeprefix("torch.") if on_gpu() else None)
        return load(
            self.model_config.model,
            self.model_config.revision,
            self._layout,
            dtype=dtype,
            memory_share=self._fraction() / self._here,
            micro_batches=self._layout.stages + 1,
            group=group,
            channel=channel,
            drafts=self._drafts,
            sharing=self._here,
        )

    @property
    def _drafts(self) -> int:
        """Maximum of draft tokens per sequence and step."""
        speculation = self.vllm_config.speculative_config
        return speculation.num_speculative_tokens if speculation else 0

    def _fraction(self) -> float:
        return self._options.memory_fraction or self.cache_config.gpu_memory_utilization

    def _port(self, block: int) -> int:
        """Return the port that this rank listens on; block 0 is for channels, block 1 for rings."""
        base, offset = self._options.base_port, block * self.parallel_config.world_size + self.rank
        return base + offset if base is not None else free_port(self._address, BASE_PORT + offset)

    def _ring(self) -> ProcessGroup:
        assert self._rendezvous is not None
        endpoints = self._rendezvous.gather("ring", f"{self._address}:{self._port(1)}")
        layout = self._layout
        mine = endpoints[layout.stage * layout.tp_size : (layout.stage + 1) * layout.tp_size]
        logger.info("MLX ring of stage %d: %s", layout.stage, ", ".join(mine))
        return written_process_group(ring_process_group([[endpoint] for endpoint in mine]))

    def _channel(self) -> TcpChannel:
        assert self._rendezvous is not None
        channel = TcpChannel(self._rendezvous.keys, self._address, self._port(0))
        endpoints = self._rendezvous.gather("channel", channel.endpoint)
        channel.connect([endpoints[rank] for rank in self._layout.downstream])
        logger.info("stages hand on over %s", ", ".join(endpoints))
        return channel

    # --- KV ---

    def get_kv_cache_spec(self) -> dict[str, FullAttentionSpec]:
        """Return one entry per layer of this stage, by which vLLM counts blocks; allocates nothing.

        All ranks of a stage return the same entries, even if some have fewer heads.
        """
        stage, (heads, size) = self._loaded.stage, self._loaded.counted_heads
        spec = FullAttentionSpec(
            block_size=self.cache_config.block_size,
            num_kv_heads=heads,
            head_size=size,
            dtype=getattr(torch, str(stage.dtype).removeprefix("mlx.core.")),
        )
        return {f"model.layers.{layer}.self_attn": spec for layer in stage.layers}

    def get_supported_kv_cache_layouts(self) -> list[str]:
        """Return one arbitrary layout, since vLLM's blocks are not used."""
        return ["LBNHC"]

    def determine_available_memory(self) -> int:
        """Return the KV bytes that vLLM may allocate, in vLLM's own count: this worker's share of the memory minus weights and
        states."""
        chosen = getattr(self.cache_config, "kv_cache_memory_bytes", None)
        if chosen:
            return self._loaded.counted_room(int(chosen))
        share = self._loaded.memory_bytes * self._fraction() / self._here
        stage = self._loaded.stage
        fixed = stage.nbytes + self.scheduler_config.max_num_seqs * stage.cache_bytes.state
        return self._loaded.counted_room(max(int((share - fixed) * KV_SHARE), 0))

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Create the plan builder, and the drafter if any, for vLLM's number of blocks."""
        tokens = kv_cache_config.num_blocks * self.cache_config.block_size
        prefixes = tokens if self.cache_config.enable_prefix_caching else 0
        self._adapter = PlanBuilder(
            stages=self._layout.stages,
            kv_tokens=tokens,
            prefix_tokens=prefixes,
            chunk=self.scheduler_config.max_num_batched_tokens,
            trimmable=self._loaded.trimmable,
            prefix_extra=self._loaded.cached_prefix_positions,
            window=self._loaded.window,
            drafts=bool(self._drafts),
        )
        speculation = self.vllm_config.speculative_config
        self._drafter = (
            NgramDrafter(most=self._drafts, shortest=speculation.prompt_lookup_min, longest=speculation.prompt_lookup_max)
            if speculation
            else None
        )

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Do nothing and return zero times: no kernel is compiled."""
        return CompilationTimes(0.0, 0.0)

    # --- steps ---

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        """Store a step for `sample_tokens`, which brings the grammars' masks; a step without tokens runs at once."""
        if scheduler_output.total_num_scheduled_tokens:
            self._pending = scheduler_output
            return None
        self._start(scheduler_output, {})
        return EMPTY_MODEL_RUNNER_OUTPUT

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> StepUnderWay | None:
        """Start the stored step. Return its pending output on the sampling rank, None elsewhere."""
        output, self._pending = self._pending, None
        assert output is not None
        plan, step = self._start(output, self._masks(grammar_output, output))
        if plan is None or step is None or not self._layout.samples:
            return None
        return StepUnderWay(list(output.num_scheduled_tokens), plan, step, self._profile, self._told)

    def _told(self, output: ModelRunnerOutput) -> None:
        """Pass a step's tokens to the plan builder and the drafter."""
        if self._drafter is not None:
            for request_id, tokens in zip(output.req_ids, output.sampled_token_ids, strict=True):
                self._adapter.sampled(request_id, tokens)
            self._drafter.read(output)

    def _start(
        self, output: SchedulerOutput, masks: dict[str, npt.NDArray[np.bool_]]
    ) -> tuple[StepPlan | None, Future[PendingStep] | None]:
        started = time.perf_counter()
        plan = self._adapter.plan(output)
        self._profile.adapter += time.perf_counter() - started
        if plan is None:
            return None, None
        if self._drafter is not None:
            self._drafter.follow(plan)
        step = self._mlx.submit(partial(self._loaded.runner.execute, plan, masks))
        step.add_done_callback(self._watch)
        return plan, step

    def _watch(self, step: Future[PendingStep]) -> None:
        """Exit the process after an error on a rank whose output vLLM ignores; vLLM would only log the error."""
        error = step.exception()
        if error is not None and not self._layout.samples:
            logger.error("Rank %d failed: ending it, and vLLM with it", self.rank, exc_info=error)
            os._exit(1)

    def _masks(self, grammar: GrammarOutput | None, output: SchedulerOutput) -> dict[str, npt.NDArray[np.bool_]]:
        """Return vLLM's bit masks (32 tokens per int32) as bool [positions, V] by request id; empty on ranks that don't
        sample."""
        if grammar is None or not self._layout.samples:
            return {}
        width = self._loaded.description.vocab_size
        bits = np.unpackbits(grammar.grammar_bitmask.view(np.uint8), axis=1, bitorder="little")[:, :width]
        if bits.shape[1] < width:
            bits = np.pad(bits, [(0, 0), (0, width - bits.shape[1])])
        ids, drafts = grammar.structured_output_request_ids, output.scheduled_spec_decode_tokens
        ends = np.cumsum([1 + len(drafts.get(request_id, ())) for request_id in ids])
        return dict(zip(ids, np.split(bits.astype(np.bool_), ends[:-1]), strict=True))

    # --- remaining interface of vLLM ---

    def get_supported_tasks(self) -> tuple[str, ...]:
        """Return the supported task: text generation."""
        return ("generate",)

    def execute_dummy_batch(self) -> None:
        """Do nothing: replicas do not run in lockstep."""

    def update_max_model_len(self, max_model_len: int) -> None:
        """Store the length; rows grow on demand."""
        self.model_config.max_model_len = max_model_len

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Return drafts after the last step's tokens; None without speculative decoding."""
        return None if self._drafter is None else self._drafter.take()

    def synchronize_device(self) -> None:
        """Wait for all submitted calls."""
        self._mlx.submit(lambda: None).result()

    def check_health(self) -> None:
        """Do nothing: a worker that answers is healthy; vLLM's own timeouts detect a hung step."""

    def shutdown(self) -> None:
        """Stop the MLX thread and log the time per step."""
        if hasattr(self, "_mlx"):
            if self._profile.steps:
                logger.info("%s", self._profile.summary())
            self._mlx.stop(STOP_S)
