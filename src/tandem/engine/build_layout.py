"""Build a rank group from settings: model, layers per stage, executor."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path

from msgspec import structs

from tandem.checkpoints.config import read_config
from tandem.checkpoints.files import ModelFiles, fingerprint, read_tensors
from tandem.checkpoints.generation_config import sampling_defaults
from tandem.checkpoints.resolve import resolve
from tandem.config.settings import ModelSettings, ParallelSettings, Settings
from tandem.config.several import lora_modules
from tandem.config.sizes import wired_bytes
from tandem.config.speculation import with_speculative_config
from tandem.errors import ConfigError, LayoutError, ModelError, UnsupportedModel
from tandem.executors.executor import Executor
from tandem.executors.lent_threads import lent
from tandem.launchers.base import Place
from tandem.launchers.host_addresses import role_of, stage_memory, told_memory, with_layout
from tandem.launchers.registry import launcher_kind, make_launcher
from tandem.models.adapter_files import adapter_elements, adapter_spec, read_adapter
from tandem.models.description import ModelDescription, describe
from tandem.models.draft_heads import DraftHead, head_kind, read_head
from tandem.models.dry_run import require_dry_run
from tandem.models.kv_types import require_quantizable
from tandem.models.mtp import require_head
from tandem.models.partition import split_layers
from tandem.models.pooling import pooling_of
from tandem.models.shard import plan_shards
from tandem.models.sources import lacking_mlx_vlm
from tandem.planner.profile import Profile, read_profile
from tandem.protocol.adapters import AdapterSpec
from tandem.protocol.keys import ClusterKeys
from tandem.protocol.layout import StageSpec
from tandem.protocol.request import Pooling, SamplingDefaults
from tandem.system.awake import keep_awake
from tandem.system.metal import prepare_metal
from tandem.text.tokenizer import load_tokenizer

log = logging.getLogger(__name__)

MAX_MICRO_BATCHES = 16
ALIKE = 1.1
"""Memory ratio below which machines get equal numbers of layers."""


@dataclass(frozen=True)
class RankGroupLayout:
    """Layout of a model over stages; nothing is loaded yet."""

    files: ModelFiles
    description: ModelDescription
    ranks: tuple[StageSpec, ...]
    max_context: int
    micro_batches: int
    pooling: Pooling | None = "last"
    """Pooling of embeddings; None if the model needs an unsupported pooling."""
    defaults: SamplingDefaults = SamplingDefaults()
    """Sampling defaults of requests."""
    adapters: tuple[AdapterSpec, ...] = ()
    """LoRA adapters to load at the start."""
    lora_rank: int = 0
    """Largest rank of an adapter."""
    profile: Profile | None = None
    """Measured speeds of the machines, used to plan layouts over fewer of them."""

    @property
    def served_name(self) -> str:
        """Served name of the model."""
        return self.ranks[0].model_name


def plan_layout(settings: Settings) -> RankGroupLayout:
    """Find and check the model, and split its layers over stages. Raises UsageError."""
    parallel, model = with_layout(settings.parallel), settings.model
    if parallel.data_parallel_size > 1:
        raise LayoutError(
            f"--data-parallel-size {parallel.data_parallel_size}: only `tandem serve` runs several replicas; leave it out",
            param="data_parallel_size",
        )
    files = resolve(model.model, revision=model.revision, weights=False)
    description = describe(files, vision=model.vision != "off")
    require_dry_run(files.path, description)
    if files.headers is not None and model.weights_from == "head":
        files = resolve(model.model, revision=model.revision)
    description = _senses(files.name, description, apart=model.vision_rank == "own")
    sizes = stage_sizes(parallel)
    draft, head = _find_draft_model(settings, files, description)
    if head and head.kind == "mtp":  # the rank that samples must have both layers whose keys and values it reads, whole
        if sizes[-1] > 1:
            raise LayoutError(
                f"--draft-model: the assistant reads keys and values of all heads, of which each of the last stage's {sizes[-1]} "
                "ranks has a part; give that stage one rank, as --pipeline-parallel-size does, or leave it out",
                param="draft_model",
            )
        description = replace(description, uncut=description.uncut | {*range(min(head.layers) + 1, description.num_layers)})
    ranges = split_layers(
        description.num_layers,
        len(sizes),
        layer_bytes=description.layer_bytes,
        memory=stage_memory(parallel, sizes),
        explicit=parallel.layer_split,
        uncut=description.uncut,
    )
    for size in set(sizes) - {1}:
        # Refuse models that cannot be split. Only ranks can tell whether `auto` dequantises; they refuse those cases.
        expand, whole = model.dequantize != "no", parallel.expert_parallel
        plan_shards(description, size, weights=parallel.tensor_split, dequantize=expand, expert_parallel=whole)
    adapters = _adapters(settings)
    lora_ranks = [read_adapter(one.path, description).rank for one in adapters]
    lora_rank = max([*lora_ranks, model.max_lora_rank if model.enable_lora else 0])
    _check_gpu_options(parallel, settings.scheduler.wired)
    profile = read_profile(parallel.hardware_profile, "--hardware-profile") if parallel.hardware_profile else None
    defaults = sampling_defaults(files.path, model.generation_config, model.override_generation_config)
    micro_batches = parallel.micro_batches or len(ranges)
    if not 1 <= micro_batches <= MAX_MICRO_BATCHES:
        raise LayoutError(f"--micro-batches {micro_batches}: must be 1 to {MAX_MICRO_BATCHES}", param="micro_batches")
    context = description.max_context
    if model.max_context is not None:
        if model.max_context > context:
            raise ConfigError(
                f"--max-context {model.max_context}: the model was made for {context}; choose at most that", param="max_context"
            )
        context = model.max_context
    drafts, mtp = _drafts(settings, files, description)
    if settings.scheduler.kv_dtype != "auto":
        require_quantizable(description, settings.scheduler.kv_dtype)
    _check_role(parallel, None if head else draft)
    specs = _stage_specs(replace(settings, parallel=parallel), files, description, ranges, micro_batches, drafts, draft)
    captured = head.layers if head and head.kind != "mtp" else ()
    specs = tuple(structs.replace(spec, mtp=mtp, captured_layers=captured, head=head.kind if head else "") for spec in specs)
    if captured:
        description = replace(description, payload_elements=(1 + len(captured)) * description.hidden_size)
    if loras := max(len(adapters), model.max_loras if model.enable_lora else 0):
        tensors = read_tensors(files)
        elements = [(loras + 1) * adapter_elements(tensors, description, range(*spec.layers), lora_rank) for spec in specs]
        with_loras = zip(specs, elements, strict=True)
        specs = tuple(structs.replace(spec, max_loras=loras, lora_elements=count) for spec, count in with_loras)
    return RankGroupLayout(
        files, description, specs, context, micro_batches, pooling_of(files.path, model.pooling), defaults,
        adapters, lora_rank, profile,
    )  # fmt: skip


def _senses(name: str, description: ModelDescription, *, apart: bool) -> ModelDescription:
    """Log what of a multimodal model is served, and return its description, without pictures where mlx-vlm is missing.

    `apart`: a process of its own is asked for. Raises UnsupportedModel if that has no mlx-vlm.
    """
    if not description.no_pictures and (lacking := lacking_mlx_vlm("pictures are encoded")):
        if apart:
            raise UnsupportedModel(lacking)
        description = replace(description, no_pictures=lacking)
    if not (why := description.no_pictures):
        log.info("%s: its vision tower is loaded with the first picture", name)
    elif description.left_out:
        log.warning(
            "%s: its text model alone is served, %s left out (%s); requests with other than text are refused",
            name,
            " and ".join(description.left_out),
            why,
        )
    return description


def _stage_specs(
    settings: Settings,
    files: ModelFiles,
    description: ModelDescription,
    ranges: Sequence[range],
    micro_batches: int,
    drafts: int,
    draft: ModelFiles | None,
) -> tuple[StageSpec, ...]:
    """Return the specification of each rank, in rank order. `ranges`: layers of each stage."""
    parallel, model = settings.parallel, settings.model
    sizes = stage_sizes(parallel)
    kv_disk = str(Path(settings.scheduler.kv_disk).expanduser().absolute()) if settings.scheduler.kv_disk else ""
    if Path(kv_disk).is_file():
        raise ConfigError(f"--kv-disk {kv_disk}: is not a directory; give another", param="kv_disk")
    return tuple(
        StageSpec(
            model_path=str(files.path),
            home=str(Path.home()),
            model_name=(model.served_name or (files.name,))[0],
            rank=sum(sizes[:stage]) + part,
            stage_sizes=sizes,
            layers=(layers.start, layers.stop),
            tensor_split=parallel.tensor_split,
            micro_batches=micro_batches,
            dtype=model.dtype,
            dequantize=model.dequantize,
            attention=model.attention,
            fuse_projections=model.fuse_projections,
            vocab_size=description.vocab_size,
            max_memory=settings.scheduler.max_memory,
            memory_share=settings.scheduler.memory_fraction / sum(sizes),
            eos_token_ids=description.eos_token_ids,
            channel="tcp" if parallel.channel == "auto" else parallel.channel,
            backend=parallel.backend,
            blas=parallel.blas,
            device=parallel.device,
            fast_sync=parallel.fast_sync,
            wired=wired_bytes(settings.scheduler.wired),
            log_level=settings.process.log_level,
            log_format=settings.process.log_format,
            weights_from=model.weights_from,
            hub=files.hub,
            trust_remote_code=model.trust_remote_code,
            drafts=drafts,
            draft_path=str(draft.path) if draft else "",
            expert_parallel=parallel.expert_parallel,
            kv_disk=kv_disk,
            kv_disk_bytes=int((settings.scheduler.kv_disk_gb or 20) * 1e9),
            kv_dtype=settings.scheduler.kv_dtype,
            kv_space=kv_space(model, files) if kv_disk else "",
            vision=model.vision != "off",
            encoder_seconds=settings.scheduler.step_timeout if model.vision_rank == "own" else 0.0,
        )
        for stage, layers in enumerate(ranges)
        for part in range(sizes[stage])
    )


def say_what_is_idle(settings: Settings, layout: RankGroupLayout) -> None:
    """Log a warning for each option that has no effect in this layout."""
    backend = settings.parallel.backend
    if backend not in ("auto", "any") and max(layout.ranks[0].stage_sizes) == 1:
        log.warning(
            "--backend %s does nothing here; it joins the ranks of a stage, and each stage has one rank "
            "(--tensor-parallel-size gives it more)",
            backend,
        )
    if layout.ranks[0].encoder_seconds and (why := layout.description.no_pictures):
        log.warning("--vision-rank own does nothing here; the model takes no pictures: %s", why)
    if layout.profile is not None and launcher_kind(settings.parallel).here:
        log.warning("--hardware-profile does nothing here; it is for ranks on several machines, when one is lost")


def kv_space(model: ModelSettings, files: ModelFiles) -> str:
    """Return the KV namespace: a digest of model and adapter files, and the dequantisation mode. Compute type and versions
    are added by the ranks. Raises ConfigError if weights are incomplete."""
    if files.headers is not None:
        raise ConfigError(
            "--kv-disk: needs all of the model's weights on this machine, to tell them from others; "
            "download the model (tandem model get), or leave it out",
            param="kv_disk",
        )
    directories = [files.path, *([Path(model.adapter_path).expanduser()] if model.adapter_path else [])]
    digest = fingerprint(*directories)
    return f"{digest}-{model.dequantize}"


def _adapters(settings: Settings) -> tuple[AdapterSpec, ...]:
    """Return the LoRA adapters to load at the start. Raises UsageError."""
    named = lora_modules(settings)
    paths = {"": settings.model.adapter_path, **named} if settings.model.adapter_path else named
    return tuple(adapter_spec(index, name, str(path)) for index, (name, path) in enumerate(paths.items(), 1))


def _check_role(parallel: ParallelSettings, draft: ModelFiles | None) -> None:
    """Raise ConfigError for a prefill or decode replica with a draft model, whose sequences cannot migrate to others."""
    if draft is not None and (role := role_of(parallel)) != "both":
        raise ConfigError(
            f"role {role} with --draft-model: a draft model's KV does not go from replica to replica; leave one out",
            param="roles",
        )


def _check_gpu_options(parallel: ParallelSettings, wired: str) -> None:
    """Raise ConfigError for fast fences or wired weights if no rank runs on a Mac's GPU."""
    no_mac = sys.platform != "darwin" and launcher_kind(parallel).here
    for name, value, asked in (("wired", wired, wired_bytes(wired)), ("fast_sync", "on", parallel.fast_sync == "on")):
        what = f"--{name.replace('_', '-')} {value}: is about the GPUs of Macs, and"
        if asked and parallel.device == "cpu":
            raise ConfigError(f"{what} --device cpu leaves them idle; leave one out", param=name)
        if asked and no_mac:
            raise ConfigError(f"{what} all ranks run on this machine, which is none; leave it out", param=name)


def stage_sizes(parallel: ParallelSettings) -> tuple[int, ...]:
    """Return the number of ranks of each stage. Raises LayoutError for contradictory settings."""
    stages, ranks = parallel.pipeline_parallel_size, parallel.tensor_parallel_size
    if parallel.parallel is None:
        sizes = (ranks,) * stages
    else:
        sizes = parallel.parallel
        if stages not in (1, len(sizes)) or ranks != 1:
            raise LayoutError(
                f"--parallel {','.join(map(str, sizes))} says all there is to say; leave out "
                "--pipeline-parallel-size and --tensor-parallel-size",
                param="parallel",
            )
    if not sizes or min(sizes) < 1:
        raise LayoutError("every stage needs at least one rank", param="parallel")
    if parallel.executor == "inline" and not launcher_kind(parallel).here:
        raise LayoutError(
            "--executor inline: computes in the engine's process, not on the machines of --launcher "
            f"{parallel.chosen_launcher}; leave one out",
            param="executor",
        )
    if max(sizes) > 1 and len(sizes) > 1 and parallel.channel == "mlx":
        raise LayoutError("--channel mlx joins stages of one rank each; use tcp with tensor parallelism", param="channel")
    if parallel.expert_parallel and max(sizes) == 1:
        raise LayoutError(
            "--expert-parallel shares experts among the ranks of a stage, and each stage has one; give "
            "--tensor-parallel-size, or leave it out",
            param="expert_parallel",
        )
    if parallel.tensor_split is not None and any(len(parallel.tensor_split) != size for size in sizes):
        raise LayoutError(
            f"--tensor-split names {len(parallel.tensor_split)} shares for stages of "
            f"{','.join(map(str, sizes))} ranks; give one for each rank of a stage",
            param="tensor_split",
        )
    return sizes


def make_executor(settings: Settings, layout: RankGroupLayout, lending: ClusterKeys | None = None) -> Executor:
    """Return the executor that the settings select. The inline one imports mlx into this process. `lending`: keys for KV
    transfers, as for `Engine`; unused by the inline executor, whose replicas share one disk."""
    keep_awake()
    kind, here = settings.parallel.executor, launcher_kind(settings.parallel).here
    if kind == "inline" and len(layout.ranks) > 1:
        raise LayoutError(f"--executor inline runs one rank, not {len(layout.ranks)}; use cluster", param="executor")
    if kind == "inline" or (kind == "auto" and here and len(layout.ranks) == 1):
        if settings.parallel.standby_ranks:
            raise LayoutError(
                "--standby-ranks is for ranks in processes of their own, and this one is the engine's; leave it "
                "out, or give --executor cluster",
                param="standby_ranks",
            )
        from tandem.comm.blas import preload_blas

        prepare_metal(layout.ranks[0].fast_fences)
        preload_blas(settings.parallel.blas)
        lent(partial(import_module, "tandem.executors.inline"))
        from tandem.executors.inline import InlineExecutor

        return InlineExecutor(layout.ranks[0], step_timeout_s=settings.scheduler.step_timeout)
    from tandem.executors.cluster import ClusterExecutor

    told = settings.parallel.layer_split or told_memory(settings.parallel)
    return ClusterExecutor(
        list(layout.ranks),
        make_launcher(settings),
        start_timeout_s=settings.scheduler.start_timeout,
        step_timeout_s=settings.scheduler.step_timeout,
        rejoin_timeout_s=settings.scheduler.rejoin_timeout,
        fit=None if told else partial(fit_memory, layout.description),
        standbys=settings.parallel.standby_ranks > 0,
        lending=lending,
    )


def fit_memory(description: ModelDescription, specs: list[StageSpec], places: list[Place]) -> list[StageSpec]:
    """Redistribute layers by the memory of the joined machines, if all are known and differ by `ALIKE` or more."""
    memory = [place.memory_bytes for place in places]
    if specs[0].stages == 1 or not all(memory) or max(memory) < ALIKE * min(memory):
        return specs
    stages = [sum(memory[spec.rank] for spec in specs if spec.stage == stage) for stage in range(specs[0].stages)]
    ranges = split_layers(
        description.num_layers, len(stages), layer_bytes=description.layer_bytes, memory=stages, uncut=description.uncut
    )
    log.info("layers by the machines' memory: %s", ",".join(str(len(layers)) for layers in ranges))
    return [structs.replace(spec, layers=(ranges[spec.stage].start, ranges[spec.stage].stop)) for spec in specs]


def _drafts(settings: Settings, files: ModelFiles, description: ModelDescription) -> tuple[int, bool]:
    """Return the most drafts of a sequence in a step, and whether the model's own head makes them. Raises UsageError.

    A head that the method `auto` would take is left out with a warning if it cannot be used.
    """
    speculation, without = (with_speculative_config(settings.speculation, head=head) for head in (True, False))
    chosen = without.speculative_method == "mtp"
    if not chosen and (not description.mtp_bytes or description.no_drafts):
        speculation = without
    own = speculation.speculative_method == "mtp" and not speculation.draft_model
    if speculation.speculative_method != "none" and description.no_drafts:
        raise ConfigError(
            f"{description.family} takes no drafts: {description.no_drafts}; serve it without speculative decoding",
            param="speculative_method",
        )
    if own:
        try:
            about = description.family, description.num_layers, description.hidden_size, description.quantization
            require_head(files.name, *about, read_tensors(files))
        except ModelError as error:
            if chosen:
                raise
            log.warning("The draft head is not used; tokens are decoded without guesses: %s", error)
            speculation, own = without, False
    return speculation.num_speculative_tokens if speculation.speculative_method != "none" else 0, own


def _find_draft_model(
    settings: Settings, files: ModelFiles, description: ModelDescription
) -> tuple[ModelFiles | None, DraftHead | None]:
    """Return the files of the draft model or head that the settings name, and the head; None without one.

    Raises ConfigError if its tokens differ from those of the model in `files`, ModelError if the model is unusable.
    """
    chosen = with_speculative_config(settings.speculation)
    name, head = chosen.draft_model, None
    if not name:
        return None, head
    if settings.model.weights_from == "head":
        raise ConfigError(
            f"--draft-model {name}: is read from the machine of the rank that samples, which "
            "--weights-from head does not do; leave one out",
            param="draft_model",
        )
    try:
        draft = resolve(name)
    except ModelError as error:
        flag = "--draft-model" if settings.speculation.draft_model else "--speculative-config model"
        raise type(error)(f"{flag} {error.message}", param="draft_model") from None
    if chosen.speculative_method != "draft_model":
        head = read_head(chosen.speculative_method, draft, description)
        if not (draft.path / "tokenizer.json").is_file():  # most heads have none: their vocabulary is the model's
            return draft, head
    elif kind := head_kind(read_config(draft.path)):
        raise ConfigError(f"--draft-model {name}: is a draft head; add --speculative-method {kind}", param="draft_model")
    ours = load_tokenizer(files, trust_remote_code=settings.model.trust_remote_code)
    theirs = load_tokenizer(draft, trust_remote_code=settings.model.trust_remote_code)
    for token in range(description.vocab_size if head else max(description.vocab_size, describe(draft).vocab_size)):
        mine, other = ours.token_bytes(token), theirs.token_bytes(token)
        if mine != other:
            raise ConfigError(
                f"--draft-model {name}: has another tokenizer than {files.name}: token {token} is "
                f"{other!r} there and {mine!r} here; choose a smaller model of the same family",
                param="draft_model",
            )
    return draft, head
