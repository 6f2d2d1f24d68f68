"""Memory plan of several models: what each needs on each machine, and what they may use together."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from tandem.checkpoints.files import ModelFiles
from tandem.config.settings import Settings
from tandem.engine.build_layout import RankGroupLayout, plan_layout
from tandem.errors import OutOfMemory, UsageError
from tandem.kv.budget import held_sequences
from tandem.launchers.host_addresses import hosts_for, told_memory
from tandem.launchers.registry import LAUNCHERS, launcher_kind
from tandem.models.adapter_files import read_adapter
from tandem.models.description import ModelDescription, describe
from tandem.models.footprint import rank_position, rank_states, rank_weights
from tandem.processes.device import this_device
from tandem.protocol.layout import StageSpec
from tandem.supervision.replica_process import replica_settings

HERE = "this machine"
MARGIN = 1.03
"""Weights in memory, as a multiple of their size in the files."""
KV_PART = 4
"""Divisor of the budget: without `kv_tokens` a KV cache has room for the longest context, at most for this part."""
LEAST_TOKENS = 512
_MIB = 2**20


@dataclass(frozen=True)
class Machines:
    """The machines that ranks may run on."""

    memory: dict[str, int]
    """Bytes of memory by machine; empty when unknown."""
    gpu: bool
    """True where ranks compute on GPUs, as far as this machine can tell."""


@dataclass(frozen=True)
class Footprint:
    """Memory that one model needs."""

    weights: dict[str, int]
    """Bytes of weights on each machine."""
    needs: dict[str, int]
    """Bytes on each machine, KV cache included."""
    kv_tokens: int
    max_context: int


def look_at_machines(settings: Settings) -> Machines:
    """Return this machine, or those of the hostfile if it tells their memory. Raises UsageError if it must."""
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
    """Return the bytes that models may use together on each machine."""
    return {name: int(size * settings.scheduler.memory_fraction) for name, size in machines.memory.items()}


def footprint(settings: Settings, machines: Machines, budget: dict[str, int]) -> Footprint:
    """Return what the model of these settings needs; check it and its layout. Raises UsageError."""
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
            # The ranks of a machine get equal parts of it.
            weights[name] = weights.get(name, 0) + int(MARGIN * max(sum(sizes), max(sizes) * len(sizes)))
            per_token[name] = per_token.get(name, 0) + sum(
                rank_position(layout.description, spec, _draft(spec), gpu=machines.gpu) for spec in specs
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
    """Return settings that limit the engine to its part: that of one of `at_once` models where needs are unknown."""
    if needs:
        # Rounded up a little: a share is a float, and a token too few would be an error.
        share = min(max(bytes_ / machines.memory[name] for name, bytes_ in needs.items()) * 1.0001, 1.0)
    else:
        count = 1 if launcher_kind(settings.parallel).own_devices else at_once or 1
        share = settings.scheduler.memory_fraction / count
    return dataclasses.replace(settings, scheduler=dataclasses.replace(settings.scheduler, memory_fraction=share))


def check_fit(name: str, model: Footprint, budget: dict[str, int], pinned: dict[str, dict[str, int]]) -> None:
    """Raise OutOfMemory, with the figures, if the model fits not even beside the `pinned` ones alone."""
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
    """Bytes of weights, and of the recurrent states of so many sequences."""
    adapter = read_adapter(spec.adapter_path, layout.description).nbytes if spec.adapter_path else 0
    states = rank_states(layout.description, spec, sequences, gpu=gpu)
    return adapter + states + rank_weights(layout.description, spec, _draft(spec), gpu=gpu)


def _draft(spec: StageSpec) -> ModelDescription | None:
    """Return the draft model that a rank holds; None for most."""
    if not (spec.samples and spec.draft_path):
        return None
    return describe(ModelFiles(path=Path(spec.draft_path), name=Path(spec.draft_path).name))


def _mib(count: int) -> str:
    return f"{count / _MIB:.1f} MiB"
