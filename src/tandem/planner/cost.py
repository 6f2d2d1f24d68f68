"""Predicted memory and time of layouts: a roofline for each machine, an alpha-beta model for each link. Pure.

*Roofline* (Williams, Waterman, Patterson: Roofline, CACM 52(4), 2009): the time of work is the larger of reading its
bytes and doing its arithmetic. A decode step of a layer with b rows at context c reads its weights once, and the rows'
KV. It takes 2 b FLOP per parameter, plus 4 b c FLOP per query head and head dimension in attention:

    t_layer = max(bytes / bandwidth, flop / rate) + overhead

*Alpha-beta* (Hockney, Parallel Computing 20(3), 1994): a message of m bytes takes alpha + m / beta. All-reduce of m
bytes over n ranks (Thakur, Rabenseifner, Gropp, IJHPCA 19(1), 2005):

    ring:  2 (n - 1) alpha + 2 (n - 1) / n * m / beta
    mesh:  alpha + (n - 1) m / beta      every rank sends everything to every other at once; the smaller is used

All-gather of m bytes in all, for the logits that the last stage's ranks share:

    ring:  (n - 1) alpha + (n - 1) / n * m / beta
    mesh:  alpha + (n - 1) / n * m / beta

Mixture of experts: b rows that choose k of E experts independently touch E (1 - (1 - k / E)^b) of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, TypedDict, Unpack

from tandem.models import footprint
from tandem.models.description import ModelDescription
from tandem.planner.hardware import Link, Machine, Network
from tandem.planner.types import Experts, Request

BANDWIDTH_EFFICIENCY = 0.80
"""Fraction of the nominal memory bandwidth that decoding reaches (docs/planning.md, Calibration)."""
FLOPS_EFFICIENCY = 0.65
"""Fraction of the nominal FLOP/s that prefill reaches."""
EXPERT_OVERHEAD = 2.5
"""Factor on a machine's overhead per layer for layers with experts, which launch more kernels."""
_LARGEST = {2: 0.564, 3: 0.846, 4: 1.029, 5: 1.163, 6: 1.267, 7: 1.352, 8: 1.424}
"""Expected largest of n standard normal samples, by n."""


class RankShare(NamedTuple):
    """Part of a stage on one rank."""

    machine: int
    share: float
    """Fraction of the layers' weights and of the head."""
    kv: float
    """Fraction of the kv heads."""
    sharing: int = 1
    """Ranks among which whole experts are distributed; 1 if each expert is split, or the stage has one rank."""


class _Changes(TypedDict, total=False):
    description: ModelDescription
    machines: Sequence[Machine]
    links: Sequence[Link]
    request: Request
    experts: Experts | None


class Costs:
    """Memory and time of parts of one model on the given machines. Sums over ranges of layers are cached."""

    def __init__(
        self,
        description: ModelDescription,
        machines: Sequence[Machine],
        links: Sequence[Link],
        request: Request,
        experts: Experts | None = None,
    ) -> None:
        self.model, self.machines, self.links, self.request, self.experts = (
            description,
            tuple(machines),
            tuple(links),
            request,
            experts,
        )
        self.network = Network(machines, links)
        self.context = request.context or 1
        self._used = experts.used if experts else 0
        self._items = [footprint.compute_item(description, request.dtype, gpu=m.gpu) for m in machines]
        self._factors = [
            footprint.expansion(
                description, request.dtype, gpu=m.gpu, dequantize=footprint.dequantizes(request.dequantize, gpu=m.gpu)
            )
            for m in machines
        ]
        self._token_bytes = [footprint.token_bytes(description, item, request.kv_dtype) for item in self._items]
        self._reads: dict[int, list[float]] = {}

    def changed(self, **changes: Unpack[_Changes]) -> Costs:
        """Return costs with some inputs replaced."""
        return Costs(
            changes.get("description", self.model),
            changes.get("machines", self.machines),
            changes.get("links", self.links),
            changes.get("request", self.request),
            changes.get("experts", self.experts),
        )

    @property
    def layers_alike(self) -> bool:
        """True if all layers have the same number of bytes."""
        experts = self.experts.layer_bytes if self.experts else ()
        return len(set(self.model.layer_bytes)) == 1 and len(set(experts)) <= 1

    # ---- the model in memory

    def item(self, machine: int) -> int:
        """Return the bytes of one activation or KV element."""
        return self._items[machine]

    @cached_property
    def stored_param_bytes(self) -> float:
        """Average bytes of a parameter in the files."""
        return footprint.param_bytes(self.model)

    def factor(self, machine: int) -> float:
        """Return bytes in memory per byte in the files: 1 unless weights are cast or expanded."""
        return self._factors[machine]

    def kv_bytes(self, part: RankShare) -> float:
        """Return a rank's average KV bytes of one token in one layer. Windowed layers count as full attention, as in
        the engine's budget."""
        return self._token_bytes[part.machine] * self.model.cache_share(part.kv)

    def state(self, part: RankShare, layers: int, streams: int) -> float:
        """Return a rank's bytes of recurrent state for `streams` sequences; split over ranks even if a latent cache is
        replicated."""
        return footprint.layer_state_bytes(self.model, self.item(part.machine)) * part.kv * layers * streams

    def weights(self, part: RankShare, start: int, stop: int) -> float:
        """Return the bytes of a rank's weights: its share of layers start..stop and of the head, plus replicated
        weights, a vision tower on the first stage, and the room of LoRA adapters."""
        request = self.request
        slots = request.max_loras + 1 if request.max_loras else 0  # one of zeros
        loras = slots * request.max_lora_rank * request.lora_elements * (stop - start) * self.item(part.machine)
        stored = footprint.stored_bytes(self.model, start, stop, part.share) + (0 if start else self.model.vision_bytes)
        if self._drafts and stop == self.model.num_layers:  # on each rank of the stage, though one has it
            stored += footprint.mtp_stored(self.model, start, 1 if part.share == 1 else 2)
        return stored * self.factor(part.machine) + loras

    @cached_property
    def _drafts(self) -> bool:
        """True if `--speculative-method auto` takes the checkpoint's draft head."""
        return self.model.mtp_bytes > 0 and not self.model.no_drafts

    def position(self, part: RankShare, start: int, stop: int) -> float:
        """Return a rank's bytes of KV of one token, with the draft head's."""
        head = self._drafts and stop == self.model.num_layers
        own = self.kv_bytes(part) * (stop - start)
        return own + (footprint.mtp_position(self.model, self.item(part.machine)) if head else 0)

    def held_states(self, part: RankShare, layers: int, streams: int) -> float:
        """Return a rank's bytes of recurrent state for `streams` sequences; with drafts also of the state before a step."""
        return self.state(part, layers, streams) * (1 + self._drafts)

    def kv(self, part: RankShare, start: int, stop: int, streams: int) -> float:
        """Return a rank's bytes of KV and recurrent state for `streams` sequences of the requested context."""
        return self.position(part, start, stop) * streams * self.context + self.held_states(part, stop - start, streams)

    def headroom(self, part: RankShare, streams: int, *, last: bool, first: bool = False, alone: bool = False) -> float:
        """Return the bytes besides weights and KV: runtime, activations of a prefill chunk, pictures, and a batch's logits.

        A GPU starts a layer before the previous one ends, unless the layer is `alone` in its stage.
        """
        activations = footprint.activation_bytes(
            self.model,
            tokens=self.chunk(part.machine),
            context=self.context,
            item=self.item(part.machine),
            share=part.share,
            kv=part.kv,
            mlp_width=self._mlp_width,
            experts_used=self._used,
            gpu=self.machines[part.machine].gpu,
            alone=alone,
        )
        activations += footprint.picture_bytes(self.model) if first else 0
        return footprint.RUNTIME_BYTES + activations + (2 * streams * self.model.vocab_size * 4 if last else 0)

    def chunk(self, machine: int) -> int:
        """Return the prompt tokens per prefill step."""
        return min(footprint.prefill_chunk(self.request.prefill_chunk, gpu=self.machines[machine].gpu), self.context)

    def budget(self, machine: int) -> int:
        """Return the bytes available to the plan."""
        return int(self.machines[machine].memory * self.request.memory_fraction)

    @cached_property
    def _attending(self) -> float:
        """Fraction of the layers with attention; recurrent layers add nothing to a token's cache."""
        full = 2 * self.model.num_kv_heads * self.model.head_dim
        return 1.0 if self.model.replicated_cache else min(1.0, footprint.token_elements(self.model) / full)

    @cached_property
    def _mlp_width(self) -> float:
        """MLP columns that a token uses; if the description has none, estimated from a layer's bytes."""
        model = self.model
        known = max(model.mlp_width, model.expert_width * self._used + model.shared_width)
        if known:
            return known
        attention = 2 * model.hidden_size * model.head_dim * (model.num_heads + model.num_kv_heads)
        return max(self._active[1] - attention, 0.0) / (3 * model.hidden_size)

    # ---- time

    def rank_time(self, part: RankShare, start: int, stop: int, rows: int, *, prefill: bool = False) -> float:
        """Return the seconds of one rank's part in a step, without waiting: decode of `rows`, or prefill of `rows`
        prompt tokens."""
        model, machine, layers = self.model, part.machine, stop - start
        context = self.context / 2 if prefill else self.context  # average over a prompt; for decode the end of an answer
        kv = self.kv_bytes(part) * layers * context * (1 if prefill else rows)
        kv += self.state(part, layers, 1 if prefill else rows)
        read = self._range(self._touched(rows), start, stop) * part.share * self.factor(machine) + kv
        if part.sharing > 1:
            experts = self._range(self._routed, start, stop) * (1 - (1 - self._used_share) ** rows)
            read += (self._fullest(part.sharing, rows) - 1) * experts * part.share * self.factor(machine)
        attention = 4 * rows * context * model.num_heads * model.head_dim * part.kv * layers * self._attending
        flop = 2 * rows * self._range(self._active, start, stop) * part.share + attention
        seconds = max(read / self._bandwidth(machine), flop / self._flops(machine))
        if stop == model.num_layers and not prefill:
            seconds += self._head_time(part, rows)
        return seconds + self._overhead(machine) * layers

    @staticmethod
    def _range(sums: Sequence[float], start: int, stop: int) -> float:
        return sums[stop] - sums[start]

    def _touched(self, rows: int) -> list[float]:
        """Return running sums over the layers of the stored bytes that a step with `rows` reads."""
        if rows not in self._reads:
            touched = 1 - (1 - self._used_share) ** rows
            each = (n - (1 - touched) * self._expert_bytes(i) for i, n in enumerate(self.model.layer_bytes))
            self._reads[rows] = list(accumulate(each, initial=0.0))
        return self._reads[rows]

    @cached_property
    def _routed(self) -> list[float]:
        """Running sums over the layers of the routed experts' stored bytes."""
        return list(accumulate((self._expert_bytes(i) for i in range(self.model.num_layers)), initial=0.0))

    def _fullest(self, ranks: int, rows: int) -> float:
        """Return the experts that the busiest rank reads, as a multiple of the average rank's.

        Choices fall on ranks independently. With m choices per rank, counts deviate by about sqrt(m). The largest of n
        normal samples is c_n deviations above the mean (Tippett, Biometrika 17, 1925); at most all m n.
        """
        each = max(self._used * rows / ranks, 1e-9)
        return min(1 + _LARGEST.get(ranks, math.sqrt(2 * math.log(ranks))) / math.sqrt(each), float(ranks))

    @cached_property
    def _active(self) -> list[float]:
        """Running sums over the layers of the parameters that a token uses."""
        each = (n - (1 - self._used_share) * self._expert_bytes(i) for i, n in enumerate(self.model.layer_bytes))
        return [n / self.stored_param_bytes for n in accumulate(each, initial=0.0)]

    def all_reduce(self, machines: Sequence[int], rows: int) -> float:
        """Return the seconds to all-reduce the hidden states of `rows` in a stage; 0 for one rank, inf without a link."""
        n = len(machines)
        if n == 1:
            return 0.0
        link = self.network.worst(machines)
        if link is None:
            return float("inf")
        size = self._message(machines, rows)
        ring = 2 * (n - 1) * link.latency + 2 * (n - 1) / n * size / link.bandwidth
        mesh = link.latency + (n - 1) * size / link.bandwidth
        return self._fence(link, machines) + (min(ring, mesh) if link.mesh else ring)

    def gather_logits(self, machines: Sequence[int], rows: int) -> float:
        """Return the seconds to all-gather the logits of `rows` among the last stage's ranks."""
        n = len(machines)
        link = self.network.worst(machines) if n > 1 else None
        if link is None:
            return 0.0
        size = rows * self.model.vocab_size * max(self.item(m) for m in machines)
        wait = self._fence(link, machines) + (1 if link.mesh else n - 1) * link.latency
        return wait + (n - 1) / n * size / link.bandwidth

    def _fence(self, link: Link, machines: Sequence[int]) -> float:
        return link.fence if link.fence is not None else max(self.machines[machine].fence for machine in machines)

    def hop(self, source: Sequence[int], target: Sequence[int], rows: int) -> float:
        """Return the seconds to send the hidden states of `rows` to the next stage; inf without a link."""
        links = [self.network.between(a, b) for a in source[:1] for b in target]
        known = [x for x in links if x is not None]
        if len(known) < len(links):
            return float("inf")
        size = self._message(source, rows)
        return max((x.hop_latency or x.latency) + size / (x.hop_bandwidth or x.bandwidth) for x in known)

    def _message(self, machines: Sequence[int], rows: int) -> int:
        return rows * (self.model.payload_elements or self.model.hidden_size) * max(self.item(m) for m in machines)

    def _head_time(self, part: RankShare, rows: int) -> float:
        stored = (self.model.head_bytes + (self.model.embed_bytes if self.model.tied_head else 0)) * part.share
        flop = 2 * rows * stored / self.stored_param_bytes
        return max(stored * self.factor(part.machine) / self._bandwidth(part.machine), flop / self._flops(part.machine))

    def _bandwidth(self, machine: int) -> float:
        return self.machines[machine].bandwidth * (1 if self.machines[machine].measured else BANDWIDTH_EFFICIENCY)

    def _flops(self, machine: int) -> float:
        return self.machines[machine].flops * (1 if self.machines[machine].measured else FLOPS_EFFICIENCY)

    def _overhead(self, machine: int) -> float:
        return self.machines[machine].layer_overhead * (EXPERT_OVERHEAD if self.experts else 1)

    def _expert_bytes(self, layer: int) -> int:
        return self.experts.layer_bytes[layer] if self.experts else 0

    @property
    def _used_share(self) -> float:
        return self._used / self.experts.count if self.experts else 1.0
