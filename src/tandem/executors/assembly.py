"""Build a rank's runner from its specification, for rank processes and the inline executor."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

from tandem.checkpoints.files import ModelFiles, fingerprint
from tandem.checkpoints.stored import path_here
from tandem.comm.group import StageGroup
from tandem.errors import OutOfMemory, UsageError
from tandem.executors.executor import Report
from tandem.guided.vocabulary import Vocabulary
from tandem.kv.files import KEPT, MOST_HEADER, DiskBlockFiles, note_model
from tandem.kv.parts import KVSlice
from tandem.kv.remote import Lending
from tandem.kv.store import KVDisk, Layers, unsupported
from tandem.loading.memory import cache_bytes, device_name, limit_memory, memory_bytes, on_gpu, on_metal, peak_bytes, wire_weights
from tandem.loading.prefix import kinds_of, last_positions, members, trimmable
from tandem.loading.stage import StageModel, load_stage
from tandem.loading.stage_payload import dtype_name
from tandem.models.description import ModelDescription, describe
from tandem.models.draft_heads import describe_draft
from tandem.models.footprint import dequantizes, kv_bytes_per_token, picture_bytes, rank_weights, token_bytes, tower_bytes
from tandem.models.shard import Shard, rank_shard
from tandem.protocol.control import Ready
from tandem.protocol.kv_blocks import DISK_BLOCK_SIZE
from tandem.protocol.layout import StageSpec
from tandem.protocol.step import GrammarReady
from tandem.runner.drafter import Drafter
from tandem.runner.heads.mtp import load_mtp_head
from tandem.runner.heads.separate import load_head
from tandem.runner.links import StageLink
from tandem.runner.picture_inputs import PictureInputs
from tandem.runner.pictures import Encoder, EncoderProcess, PictureFeatures
from tandem.runner.ragged_attention import chosen_attention
from tandem.runner.runner import Runner
from tandem.system.origin import build
from tandem.text.tokenizer import load_tokenizer
from tandem.version import __version__

log = logging.getLogger(__name__)


def load_slice(
    spec: StageSpec,
    progress: Callable[[int, int], None] | None = None,
    group: StageGroup | None = None,
    files: ModelFiles | None = None,
) -> StageModel:
    """Load the layers of `spec` from `files`, or from its model directory if None. Raises ModelError."""
    limit_memory(spec.memory_share if spec.gpu_share is None else spec.gpu_share, spec.sharing, spec.max_memory)
    files = files or ModelFiles(path=Path(spec.model_path), name=spec.model_name)
    description = describe(files)
    dequantize = dequantizes(spec.dequantize, gpu=on_gpu())
    shard = shard_of(spec, description, dequantize)
    require_memory(spec, files)
    log.info("Loading sharded model: %s (%s)", spec.model_name, spec.label)
    stage = load_stage(
        files,
        description,
        range(*spec.layers),
        dtype=spec.dtype,
        dequantize=dequantize,
        progress=progress,
        shard=shard,
        tensor_parallel=group,
        kv_dtype=spec.kv_dtype,
        fuse=_fuses(spec),
        max_loras=spec.max_loras,
    )
    stage.capture(spec.captured_layers)
    log.info("Sharded model loaded successfully")
    log.info("computing on %s", device_name())
    return stage


def _fuses(spec: StageSpec) -> bool:
    return spec.fuse_projections == "on" or (spec.fuse_projections == "auto" and on_gpu())


def require_memory(spec: StageSpec, files: ModelFiles) -> None:
    """Raise OutOfMemory if the rank's weights exceed its memory. Needs only the files' headers."""
    description = describe(files, vision=spec.vision)
    draft = describe_draft(_draft_files(spec), spec, description) if spec.samples and spec.draft_path else None
    need = rank_weights(description, spec, draft, gpu=on_gpu())
    allowed = int(memory_bytes() * (spec.gpu_share if spec.gpu_share and on_gpu() else spec.memory_share))
    if need > allowed:
        raise OutOfMemory(
            f"{spec.label} of {spec.model_name} needs {need / 2**20:.0f} MiB for its weights, and may use "
            f"{allowed / 2**20:.0f} MiB here; add stages (--pipeline-parallel-size), use a smaller or quantised model, "
            f"or raise {'--max-memory' if spec.max_memory else '--memory-fraction'}",
            param="memory_fraction",
        )


def shard_of(spec: StageSpec, description: ModelDescription, dequantize: bool) -> Shard | None:
    """Return this rank's shard of heads and widths; None if it holds them whole. Raises LayoutError."""
    return rank_shard(description, spec, dequantize=dequantize) if spec.tp_size > 1 else None


def _draft_files(spec: StageSpec) -> ModelFiles:
    path = path_here(spec.draft_path, spec.home)
    return ModelFiles(path=path, name=path.name)


def load_drafter(spec: StageSpec, target: StageModel, model_files: ModelFiles | None = None) -> Drafter | None:
    """Load the whole draft model, or the draft head of `target`, on the sampling rank; return None elsewhere or without one.

    `model_files`: files of the model that has the head; None for its directory. Raises ModelError.
    """
    if not spec.samples or not (spec.draft_path or spec.mtp):
        return None
    drafter = partial(Drafter, micro_batches=spec.micro_batches, drafts=spec.drafts, vocab_size=spec.vocab_size)
    dequantize = dequantizes(spec.dequantize, gpu=on_gpu())
    if spec.has_head:
        files = model_files or ModelFiles(path=Path(spec.model_path), name=spec.model_name)
        head = _draft_files(spec) if spec.head else files
        log.info("Loading draft head: %s", head.name)
        if spec.head:
            return drafter(load_head(spec.head, head, files, target, dequantize=dequantize))
        return drafter(load_mtp_head(files, describe(files), target, dequantize=dequantize))
    files = _draft_files(spec)
    description = describe(files)
    stage = load_stage(
        files, description, range(description.num_layers), dtype=spec.dtype, dequantize=dequantize, fuse=_fuses(spec)
    )
    log.info("Draft model loaded: %s", files.name)
    return drafter(stage)


def build_runner(
    spec: StageSpec,
    stage: StageModel,
    link: StageLink | None,
    group: StageGroup | None = None,
    files: ModelFiles | None = None,
    report: Callable[[Report], None] | None = None,
    lending: Lending | None = None,
) -> tuple[Runner, Ready]:
    """Build the runner of `stage`; return it with the rank's `Ready`.

    Grammars need `files`, for the tokenizer, and `report`, called when one is compiled. The disk cache needs both too;
    `report` is called after reads and writes. `lending`: keys and address for KV transfers with other disks; None without
    them.
    """
    vocabulary = None
    if spec.samples and files is not None and report is not None:
        load = partial(load_tokenizer, files, trust_remote_code=spec.trust_remote_code)
        vocabulary = Vocabulary(
            load, spec.vocab_size, spec.eos_token_ids, lambda request_id: report(GrammarReady(spec.rank, request_id))
        )
    disk, trouble = _open_disk(spec, stage, files, report, lending) if report and files else (None, "")
    drafter = load_drafter(spec, stage, files)
    if disk is not None and drafter is not None and files is not None:
        one = int(fingerprint(_draft_files(spec).path)[:7], 16) if spec.head else 0  # heads apart from one another
        layer = describe(files).num_layers
        drafter.keep_on(disk, KVSlice(range(layer, layer + 1), range(one, one + 1)), stage.dtype)
    runner = Runner(
        stage,
        micro_batches=spec.micro_batches,
        stages=spec.stages,
        vocab_size=spec.vocab_size,
        eos_token_ids=spec.eos_token_ids,
        link=link,
        group=group,
        samples=spec.samples,
        vocabulary=vocabulary,
        drafts=spec.drafts,
        drafter=drafter,
        head=spec.has_head,
        attention=chosen_attention(spec.attention),
        disk=disk,
        pictures=_pictures(spec, stage, files),
    )
    return runner, _ready(spec, runner, trouble, describe(files, vision=spec.vision) if files and stage.is_first else None)


def _pictures(spec: StageSpec, stage: StageModel, files: ModelFiles | None) -> PictureInputs | None:
    """Return the inputs of a rank's layers from pictures; None for models that take no pictures."""
    if files is None or (description := describe(files, vision=spec.vision)).no_pictures:
        return None
    if not stage.is_first:
        return PictureInputs(stage, description)
    apart = EncoderProcess(spec, files, stage.dtype) if spec.encoder_seconds else None
    load = partial(Encoder, files, stage.dtype, dequantize=dequantizes(spec.dequantize, gpu=on_gpu()))
    return PictureInputs(stage, description, PictureFeatures(load, apart))


def _open_disk(
    spec: StageSpec, stage: StageModel, files: ModelFiles, report: Callable[[Report], None], lending: Lending | None
) -> tuple[KVDisk | None, str]:
    """Open the disk cache. Return (cache, error): no cache if it is off, unsupported by the model's caches, or unusable."""
    if not spec.kv_disk or (spec.draft_path and not spec.has_head) or unsupported(stage.cache_members, stage.dtype):
        return None, ""
    description = describe(files)
    shard = shard_of(spec, description, dequantizes(spec.dequantize, gpu=on_gpu()))
    heads = range(description.num_kv_heads) if shard is None else shard.kv_heads
    need = KVSlice(range(*spec.layers), range(1) if description.replicated_cache else heads)
    versions = f"{__version__}-{version('mlx-lm')}"
    space = f"{spec.kv_space}-{versions}-{DISK_BLOCK_SIZE}-{dtype_name(stage.dtype)}"
    space += f"-{spec.kv_dtype}" if spec.kv_dtype != "auto" else ""
    count, as_bytes = len(range(*spec.layers)), spec.kv_dtype != "auto"
    layers = Layers(kinds_of(stage.make_caches()), stage.cache_members, count, len(need.heads), stage.dtype, as_bytes=as_bytes)
    if shard is not None and layers.kind.whole:
        if shard.rank == 0:
            log.info("KV disk: this model's states and heads serve ranks with equal parts of its layers only")
        ranges = (shard.kv_heads, shard.states)
        space += "-".join([f"-tp{shard.rank}.{shard.size}", *(f"{one.start}.{one.stop}" for one in ranges)])
        need = KVSlice(need.layers, range(shard.rank, shard.rank + 1))
        layers.kind = replace(layers.kind, whole=frozenset(range(count)))
    states = int(4 * description.state_elements * description.num_layers)
    disk_block = DISK_BLOCK_SIZE * token_bytes(description, stage.dtype.size, spec.kv_dtype) * description.num_layers + states
    if KEPT * spec.kv_disk_bytes < disk_block:
        return None, (
            f"--kv-disk-gb {spec.kv_disk_bytes / 1e9:g}: {DISK_BLOCK_SIZE} tokens of this model's KV, which are kept "
            f"together, take {disk_block / 1e9:.2g}; give at least {2 * disk_block / 1e9:.2g}"
        )
    positions = max([DISK_BLOCK_SIZE, *map(last_positions, members(stage.caches_of_all_stages()))])
    most = MOST_HEADER + positions * kv_bytes_per_token(description, description.num_layers, "float32", gpu=False) + states
    try:
        directory = path_here(spec.kv_disk, spec.home)
        kept = DiskBlockFiles(directory, space, need, spec.kv_disk_bytes, most, layers.kind)
        disk = KVDisk(spec.rank, kept, layers, report, lending)
        note_model(directory, space, spec.model_name)
        return disk, ""
    except (UsageError, OSError) as error:
        return None, str(error)


def _ready(spec: StageSpec, runner: Runner, disk_trouble: str, first: ModelDescription | None) -> Ready:
    # Measure memory once weights are wired, while nothing else is allocated.
    stages = [runner.stage, *([runner.drafter.stage] if runner.drafter else [])]
    wired = wire_weights([array for stage in stages for array in stage.arrays()], spec.wired, spec.memory_share)
    per_token = sum(stage.cache_bytes.position for stage in stages)
    return Ready(
        rank=spec.rank,
        weight_bytes=sum(stage.nbytes for stage in stages) + spec.lora_elements * runner.stage.dtype.size,
        kv_bytes_per_token=per_token,
        state_bytes=sum(stage.cache_bytes.state for stage in stages),
        window=max(map(last_positions, members(runner.stage.make_caches())), default=0),
        picture_bytes=picture_bytes(first, spec) + tower_bytes(first, spec, gpu=on_gpu()) if first else 0,
        memory_bytes=memory_bytes(),
        peak_bytes=peak_bytes(),
        gpu=on_gpu(),
        host=socket.gethostname(),
        pid=os.getpid(),
        own_memory=on_gpu() and spec.gpu_share is not None,
        machine=spec.machine,
        cache_bytes=cache_bytes(spec.sharing),
        wired_bytes=wired.bytes,
        wiring=wired.trouble,
        build=build(),
        metal=on_metal(),
        trimmable=trimmable(runner.stage.make_caches()),
        quantized_layers=runner.stage.quantized_layers,
        disk_blocks=runner.disk.names if runner.disk else None,
        disk_trouble=disk_trouble,
        store=runner.disk.store_id if runner.disk else "",
        lends=runner.disk.lends if runner.disk else "",
    )
