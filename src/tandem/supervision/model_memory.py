"""Memory plan of several models: needs of each model per machine, and the shared budget."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from tandem.checkpoints.files import ModelFiles
from tandem.config.settings import Settings
from tandem.config.sizes import counted_memory
from tandem.engine.build_layout import RankGroupLayout, plan_layout
from tandem.errors import OutOfMemory, UsageError
from tandem.kv.budget import held_sequences
from tandem.launchers.host_addresses import hosts_for, told_memory
from tandem.launchers.registry import LAUNCHERS, launcher_kind
from tandem.models.description import ModelDescription
from tandem.models.draft_heads import describe_draft
from tandem.models.footprint import picture_bytes, rank_position, rank_states, rank_weights
from tandem.processes.device import this_device
from tandem.protocol.layout import StageSpec
from tandem.supervision.replica_process import divided, replica_settings

HERE = "this machine"
MARGIN = 1.03
"""Ratio of weights in memory to their size in the files."""
KV_PART = 4
"""Divisor of the budget that limits a KV cache without `kv_tokens`. Below the limit it holds the longest context."""
LEAST_TOKENS = 512
_MIB = 2**20


@dataclass(frozen=True)
class Machines:
    """Machines that ranks may run on."""

    memory: dict[str, int]
    """Bytes of memory by machine; empty when unknown."""
    gpu: bool
    """True where ranks compute on GPUs, judged by this machine."""


@dataclass(frozen=True)
class Footprint:
    """Memory needs of one model."""

    weights: dict[str, int]
    """Bytes of weights on each machine."""
    needs: dict[str, int]
    """Bytes on each machine with the KV cache; empty when the machines' memory is unknown."""
    kv_tokens: int
    max_context: int


def look_at_machines(settings: Settings) -> Machines:
    """Return this machine, or the machines of the hostfile if it states their memory.

    Raises UsageError when the memory is unknown and `max_loaded` is unset.
    """
    parallel, kind = settings.parallel, launcher_kind(settings.parallel)
    _refuse_by_hand(settings)
    here = this_device(parallel.device)
    memory = {HERE: here.memory_bytes} if kind.here else {}
    if told := told_memory(parallel):
        memory = dict(zip((host.ssh for host in hosts_for(parallel)), told, strict=True))
    if not memory and settings.models.max_loaded is None:
        raise UsageError(
            "several models on other machines need to know how many fit: give each host its `memory` in "
            "the hostfile, or say --max-loaded 1 (or more)",
            param="max_loaded",
        )
    return Machines(memory, here.gpu)


def budget_of(settings: Settings, machines: Machines) -> dict[str, int]:
    """Return the bytes that all loaded models together may use on each machine."""
    share, most = settings.scheduler.memory_fraction, settings.scheduler.max_memory
    return {name: int(counted_memory(size, share, most) * share) for name, size in machines.memory.items()}


def footprint(settings: Settings, machines: Machines, budget: dict[str, int]) -> Footprint:
    """Lay out the model of these settings and return its memory needs. Raises UsageError for an invalid model or layout."""
    _refuse_by_hand(settings)
    weights: dict[str, int] = {}
    per_token: dict[str, int] = {}
    context = 0
    for index in range(settings.parallel.data_parallel_size):
        mine = replica_settings(settings, index)
        layout = plan_layout(mine)
        context = layout.max_context
        hosts = [host.ssh for host in hosts_for(mine.parallel)]
        names = [hosts[spec.rank] if hosts else HERE for spec in layout.ranks]
        for name in set(names):
            specs = [spec for spec, host in zip(layout.ranks, names, strict=True) if host == name]
            sequences = held_sequences(mine.scheduler.max_batch_size, layout.micro_batches)
            sizes = [_weights(layout, spec, machines.gpu, sequences) for spec in specs]
            # The ranks of a machine get equal shares, so the largest rank sets the size.
            weights[name] = weights.get(name, 0) + int(MARGIN * max(sum(sizes), max(sizes) * len(sizes)))
            per_token[name] = per_token.get(name, 0) + sum(
                rank_position(layout.description, spec, _draft(layout, spec), gpu=machines.gpu) for spec in specs
            )
    if not machines.memory:
        return Footprint(weights, {}, 0, context)
    if unknown := weights.keys() - budget.keys():
        raise UsageError(
            f"the memory of {', '.join(sorted(unknown))} is not known: a model's hosts must be among "
            "those of [parallel], with their `memory`",
            param="hostfile",
        )
    room = min(budget[name] // KV_PART // max(per_token[name], 1) for name in weights)
    tokens = settings.scheduler.kv_tokens or max(min(context, room), LEAST_TOKENS)
    needs = {name: weights[name] + tokens * per_token[name] for name in weights}
    return Footprint(weights, needs, tokens, context)


def granted(settings: Settings, needs: dict[str, int], machines: Machines, at_once: int | None) -> Settings:
    """Return settings whose `memory_fraction` limits the engine to its needs.

    Without known needs it is an equal share among `at_once` models (None: one).
    """
    if needs:
        # Rounded up: a rounding error of the share could lose a token and fail the start.
        share = min(max(bytes_ / machines.memory[name] for name, bytes_ in needs.items()) * 1.0001, 1.0)
        scheduler = dataclasses.replace(settings.scheduler, memory_fraction=share)
    else:
        scheduler = divided(settings.scheduler, 1 if launcher_kind(settings.parallel).own_devices else at_once or 1)
    return dataclasses.replace(settings, scheduler=scheduler)


def check_fit(name: str, model: Footprint, budget: dict[str, int], pinned: dict[str, dict[str, int]]) -> None:
    """Raise OutOfMemory, with the figures, if the model cannot fit beside the `pinned` ones even with all others unloaded."""
    others = {other: needs for other, needs in pinned.items() if other != name}
    for machine, need in model.needs.items():
        beside = sum(needs.get(machine, 0) for needs in others.values())
        if need + beside > budget[machine]:
            with_others = f", and {', '.join(others)} (--pinned-models) {_mib(beside)}" if beside else ""
            raise OutOfMemory(
                f"model {name} can never be loaded: it needs {_mib(need)} on {machine} ({_mib(model.weights[machine])} "
                f"of weights, the rest for a KV cache of {model.kv_tokens} tokens){with_others}, and models may use "
                f"{_mib(budget[machine])} there; use a smaller or quantised one, lower its kv_tokens, spread it over "
                "more machines, or raise --memory-fraction",
                param="memory_fraction",
            )


def _refuse_by_hand(settings: Settings) -> None:
    if launcher_kind(settings.parallel).by_hand:
        others = ", ".join(name for name, kind in LAUNCHERS.items() if not kind.by_hand)
        raise UsageError(
            f"--launcher {settings.parallel.chosen_launcher}: ranks that join by hand stay with one "
            f"model; several models need ranks that Tandem starts ({others})",
            param="launcher",
        )


def _weights(layout: RankGroupLayout, spec: StageSpec, gpu: bool, sequences: int) -> int:
    """Return the bytes of a rank's weights and adapters, of pictures, and of recurrent states for `sequences` sequences."""
    pictures = 0 if spec.layers[0] else picture_bytes(layout.description, spec)
    states = pictures + rank_states(layout.description, spec, sequences, gpu=gpu)
    return states + rank_weights(layout.description, spec, _draft(layout, spec), gpu=gpu)


def _draft(layout: RankGroupLayout, spec: StageSpec) -> ModelDescription | None:
    """Return the draft model or head of the rank, which only the sampling stage has; else None."""
    if not (spec.samples and spec.draft_path):
        return None
    files = ModelFiles(path=Path(spec.draft_path), name=Path(spec.draft_path).name)
    return describe_draft(files, spec, layout.description)


def _mib(count: int) -> str:
    return f"{count / _MIB:.1f} MiB"
