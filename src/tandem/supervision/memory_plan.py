"""What each of several models takes of each machine's memory, and what they may take together."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from tandem.cache.budget import held_sequences
from tandem.checkpoints.files import ModelFiles
from tandem.config.settings import Settings
from tandem.engine.layout import GangLayout, plan_layout
from tandem.errors import OutOfMemory, UsageError
from tandem.launchers.machines import hosts_for, told_memory
from tandem.launchers.registry import LAUNCHERS, launcher_kind
from tandem.models.adapter_files import read_adapter
from tandem.models.description import ModelDescription, describe
from tandem.models.footprint import rank_position, rank_states, rank_weights
from tandem.processes.device import this_device
from tandem.protocol.layout import StageSpec
from tandem.supervision.replica import replica_settings

HERE = "this machine"
MARGIN = 1.03
"""Weights in memory, as a multiple of what headers tell."""
KV_PART = 4
"""The KV cache of a model that says nothing of `kv_tokens` has room for its longest context, or takes the budget's
fourth part if that is less."""
LEAST_TOKENS = 512
_MIB = 2**20


@dataclass(frozen=True)
class Machines:
    """Memory of the machines that ranks may run on."""

    memory: dict[str, int]
    """Bytes by machine; empty when it is not known."""
    gpu: bool
    """Ranks compute on GPUs, as far as this machine can tell."""


@dataclass(frozen=True)
class Footprint:
    """One model's part in the plan."""

    weights: dict[str, int]
    """Bytes on each machine."""
    needs: dict[str, int]
    """Bytes on each machine with the KV cache."""
    kv_tokens: int
    max_context: int


def look_at_machines(settings: Settings) -> Machines:
    """This machine, or those of the hostfile if it tells their memory. Raises UsageError where there can be no plan."""
    parallel, kind = settings.parallel, launcher_kind(settings.parallel)
    _refuse_by_hand(settings)
    here = this_device(parallel.device)
    memory = {HERE: here.memory_bytes} if kind.here else {}
    if told := told_memory(parallel):
        memory = dict(zip((host.ssh for host in hosts_for(parallel)), told, strict=True))
    if not memory and settings.models.max_loaded is None:
        raise UsageError("several models on other machines need to know how many fit: give each host its `memory` in "
                         "the hostfile, or say --max-loaded 1 (or more)", param="max_loaded")
    return Machines(memory, here.gpu)


def budget_of(settings: Settings, machines: Machines) -> dict[str, int]:
    """Bytes that models may take together on each machine."""
    return {name: int(size * settings.scheduler.memory_fraction) for name, size in machines.memory.items()}


def footprint(settings: Settings, machines: Machines, budget: dict[str, int]) -> Footprint:
    """What the model of these settings takes. Finds and checks it and its layout. Raises UsageError."""
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
            sequences = held_sequences(mine.scheduler.max_batch_size, layout.lanes)
            sizes = [_weights(layout, spec, machines.gpu, sequences) for spec in specs]
            # The ranks of a machine get equal parts of it.
            weights[name] = weights.get(name, 0) + int(MARGIN * max(sum(sizes), max(sizes) * len(sizes)))
            per_token[name] = per_token.get(name, 0) + sum(
                rank_position(layout.description, spec, _draft(spec), gpu=machines.gpu) for spec in specs)
    if not machines.memory:
        return Footprint(weights, {}, 0, context)
    if unknown := weights.keys() - budget.keys():
        raise UsageError(f"the memory of {', '.join(sorted(unknown))} is not known: a model's hosts must be among "
                         "those of [parallel], with their `memory`", param="hostfile")
    room = min(budget[name] // KV_PART // max(per_token[name], 1) for name in weights)
    tokens = settings.scheduler.kv_tokens or max(min(context, room), LEAST_TOKENS)
    needs = {name: weights[name] + tokens * per_token[name] for name in weights}
    return Footprint(weights, needs, tokens, context)


def granted(settings: Settings, needs: dict[str, int], machines: Machines, at_once: int | None) -> Settings:
    """Settings with which the engine keeps to its part: that of one of `at_once` models, where needs are not known."""
    if needs:
        # Rounded up a little: a share is a float, and a token too few would be an error.
        share = min(max(bytes_ / machines.memory[name] for name, bytes_ in needs.items()) * 1.0001, 1.0)
    else:
        count = 1 if launcher_kind(settings.parallel).own_devices else at_once or 1
        share = settings.scheduler.memory_fraction / count
    return dataclasses.replace(settings, scheduler=dataclasses.replace(settings.scheduler, memory_fraction=share))


def check_fit(name: str, found: Footprint, budget: dict[str, int], kept: dict[str, dict[str, int]]) -> None:
    """Raises OutOfMemory, with the figures, if the model cannot be loaded even beside nothing but the `kept` ones."""
    others = {one: needs for one, needs in kept.items() if one != name}
    for machine, need in found.needs.items():
        beside = sum(needs.get(machine, 0) for needs in others.values())
        if need + beside > budget[machine]:
            with_others = f", and {', '.join(others)} (--keep) {_mib(beside)}" if beside else ""
            raise OutOfMemory(
                f"model {name} can never be loaded: it needs {_mib(need)} on {machine} ({_mib(found.weights[machine])} "
                f"of weights, the rest for a KV cache of {found.kv_tokens} tokens){with_others}, and models may use "
                f"{_mib(budget[machine])} there; use a smaller or quantised one, lower its kv_tokens, spread it over "
                "more machines, or raise --memory-fraction", param="memory_fraction")


def _refuse_by_hand(settings: Settings) -> None:
    if launcher_kind(settings.parallel).by_hand:
        others = ", ".join(name for name, kind in LAUNCHERS.items() if not kind.by_hand)
        raise UsageError(f"--launcher {settings.parallel.chosen_launcher}: ranks that join by hand stay with one "
                         f"model; several models need ranks that Tandem starts ({others})", param="launcher")


def _weights(layout: GangLayout, spec: StageSpec, gpu: bool, sequences: int) -> int:
    """Bytes of weights, and of the recurrent states of so many sequences."""
    adapter = read_adapter(spec.adapter_path, layout.description).nbytes if spec.adapter_path else 0
    states = rank_states(layout.description, spec, sequences, gpu=gpu)
    return adapter + states + rank_weights(layout.description, spec, _draft(spec), gpu=gpu)


def _draft(spec: StageSpec) -> ModelDescription | None:
    """The draft model that a rank holds."""
    if not (spec.samples and spec.draft_path):
        return None
    return describe(ModelFiles(path=Path(spec.draft_path), name=Path(spec.draft_path).name))


def _mib(count: int) -> str:
    return f"{count / _MIB:.1f} MiB"
