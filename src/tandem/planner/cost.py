"""Predicted memory and time of layouts: a roofline for each machine, an alpha-beta model for each link. Pure.

*Roofline* (Williams, Waterman, Patterson: Roofline, CACM 52(4), 2009): work takes as long as the slower of reading its
bytes and doing its arithmetic. A decode step of a layer with b rows at context c reads its weights once and the rows'
KV, and does 2 b FLOP a parameter plus 4 b c FLOP per query head and head dimension in attention:

    t_layer = max(bytes / bandwidth, flop / rate) + overhead

*Alpha-beta* (Hockney, Parallel Computing 20(3), 1994): a message of m bytes takes alpha + m / beta. All-reduce of m
bytes over n ranks (Thakur, Rabenseifner, Gropp, IJHPCA 19(1), 2005):

    ring:  2 (n - 1) alpha + 2 (n - 1) / n * m / beta
    mesh:  alpha + (n - 1) m / beta      every rank sends all of it to every other at once; the lesser of the two

and all-gather of m bytes in all, for the logits that the ranks of the last stage share: (n - 1) alpha + (n - 1) / n *
m / beta in a ring, alpha + (n - 1) / n * m / beta in a mesh.

Mixture of experts: b rows that choose k of E experts independently touch E (1 - (1 - k / E)^b) of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from tandem.models.description import ModelDescription
from tandem.models.footprint import compute_item, layer_state_bytes, token_bytes, token_elements
from tandem.planner.hardware import Link, Machine, Network
from tandem.planner.types import Experts, Request

BANDWIDTH_EFFICIENCY = 0.80
"""Share of the nominal memory bandwidth that decoding reaches (docs/planning.md, Calibration)."""
FLOPS_EFFICIENCY = 0.65
"""Share of the nominal FLOP/s that prefill reaches."""
EXPERT_OVERHEAD = 2.5
"""A layer with experts launches more kernels: factor on a machine's overhead per layer."""
RUNTIME_BYTES = 512 * 2**20
"""Python, MLX and compiled kernels of a rank."""
AHEAD_BYTES = 2**30
"""Most that is counted for the layer that a GPU is given before the one before it is done. It would be given more where
there is room; at the limit of its memory MLX waits."""
_LARGEST = {2: 0.564, 3: 0.846, 4: 1.029, 5: 1.163, 6: 1.267, 7: 1.352, 8: 1.424}
"""How far the largest of so many normal deviates lies above their average, on average."""
_FUSED_HEAD_DIMS = (64, 80, 128)
"""Head dimensions for which MLX's GPU attention does not store its scores."""
_SCALE_BITS = {"mxfp4": 8, "mxfp8": 8, "nvfp4": 8}
"""Bits of scale per group; affine has a scale and a bias of the model's type."""


class RankShare(NamedTuple):
    """What one rank holds of its stage."""

    machine: int
    share: float
    """Of the layers' weights, and of the head."""
    kv: float
    """Of the kv heads."""
    sharing: int = 1
    """Ranks that share out experts whole; 1 where experts are divided, or the stage has one rank."""


class Costs:
    """Bytes and seconds of pieces of one model on given machines. Sums over ranges of layers are looked up."""

    def __init__(
        self,
        description: ModelDescription,
        machines: Sequence[Machine],
        links: Sequence[Link],
        request: Request,
        experts: Experts | None = None,
    ) -> None:
        self.model = description
        self.machines = machines
        self.network = Network(machines, links)
        self.request = request
        self.context = request.context or 1
        self._experts = experts
        self._reads: dict[int, list[float]] = {}
        self._stored = list(accumulate(description.layer_bytes, initial=0))
        self._whole = list(accumulate(description.whole_bytes or (0,) * description.num_layers, initial=0))

    @property
    def layers_alike(self) -> bool:
        """All layers have the same bytes."""
        experts = self._experts.layer_bytes if self._experts else ()
        return len(set(self.model.layer_bytes)) == 1 and len(set(experts)) <= 1

    # ---- the model in memory

    def item(self, machine: int) -> int:
        """Bytes of one activation or KV element."""
        return compute_item(self.model, self.request.dtype, gpu=self.machines[machine].gpu)

    @cached_property
    def stored_param_bytes(self) -> float:
        """Bytes that a parameter takes in the files."""
        quantization, plain = self.model.quantization, 4 if self.model.dtype == "float32" else 2
        if not quantization:
            return float(plain)
        scale = _SCALE_BITS.get(str(quantization.get("mode", "affine")), 16 * plain)
        return float((quantization["bits"] + scale / quantization["group_size"]) / 8)

    def factor(self, machine: int) -> float:
        """Bytes in memory per byte in the files: not 1 where weights are cast or dequantised."""
        request, gpu = self.request, self.machines[machine].gpu
        expand = request.dequantize == "yes" or (request.dequantize == "auto" and not gpu)
        if self.model.quantization and not expand:
            return 1.0
        return self.item(machine) / self.stored_param_bytes

    def kv_bytes(self, part: RankShare) -> float:
        """A rank's KV bytes of one token in one layer, on average. Layers with a window count as full, as in the
        engine's budget."""
        each = token_bytes(self.model, self.item(part.machine), self.request.kv_dtype)
        return each * self.model.cache_share(part.kv)

    def state(self, part: RankShare, layers: int, streams: int) -> float:
        """A rank's bytes of recurrent state, which is divided also where a latent cannot be."""
        return layer_state_bytes(self.model, self.item(part.machine)) * part.kv * layers * streams

    def weights(self, part: RankShare, start: int, stop: int) -> float:
        """Bytes of a rank's weights: its share of layers start..stop and of the head, and what each rank has whole."""
        model, last = self.model, stop == self.model.num_layers
        whole = self._whole[stop] - self._whole[start]
        stored = whole + (self._stored[stop] - self._stored[start] - whole) * part.share
        stored += model.embed_bytes if start == 0 else 0
        if last:
            stored += (model.head_bytes + (model.embed_bytes if model.tied_head and start else 0)) * part.share
        return stored * self.factor(part.machine)

    def kv(self, part: RankShare, layers: int, streams: int) -> float:
        """Bytes of KV for `streams` of the wanted context, and of their recurrent state."""
        return self.kv_bytes(part) * layers * streams * self.context + self.state(part, layers, streams)

    def headroom(self, part: RankShare, streams: int, *, last: bool, alone: bool = False) -> float:
        """Bytes besides weights and KV: the runtime, the activations of a prefill chunk, a batch's logits.

        A GPU is given a layer before it is done with the one before, unless that is `alone` in its stage.
        """
        model, gpu = self.model, self.machines[part.machine].gpu
        # residual, normed input, query, output, and the MLP's gate, up and product are alive together at most, with
        # experts also what was gathered for them, and what they give
        wide = 4 * model.hidden_size + 3 * part.share * self._mlp_width
        wide += 2 * self._experts.used * model.hidden_size if self._experts else 0
        # scores, and what they are after a mask; of an index also what they are with its heads' weights
        scores = 3.0 * model.index_heads
        if not gpu or model.head_dim not in _FUSED_HEAD_DIMS:
            scores += 2 * model.num_heads * part.kv
        layer = self.chunk(part.machine) * (wide + scores * self.context) * self.item(part.machine)
        ahead = min(layer, AHEAD_BYTES) if gpu and not alone else 0
        logits = 2 * streams * model.vocab_size * 4 if last else 0
        return RUNTIME_BYTES + layer + ahead + logits

    def chunk(self, machine: int) -> int:
        """Prompt tokens in a prefill step."""
        return min(self.request.prefill_chunk or (512 if self.machines[machine].gpu else 192), self.context)

    def budget(self, machine: int) -> int:
        """Bytes that may be planned with."""
        return int(self.machines[machine].memory * self.request.memory_fraction)

    @cached_property
    def _attending(self) -> float:
        """Share of the layers that attend: others keep a state instead, and add nothing to the cache of a token."""
        full = 2 * self.model.num_kv_heads * self.model.head_dim
        return 1.0 if self.model.replicated_cache else min(1.0, token_elements(self.model) / full)

    @cached_property
    def _mlp_width(self) -> float:
        """Columns of the MLP that a token passes through; where the description has none, from a layer's bytes."""
        model, used = self.model, self._experts.used if self._experts else 0
        known = max(model.mlp_width, model.expert_width * used + model.shared_width)
        if known:
            return known
        attention = 2 * model.hidden_size * model.head_dim * (model.num_heads + model.num_kv_heads)
        return max(self._active[1] - attention, 0.0) / (3 * model.hidden_size)

    # ---- time

    def rank_time(self, part: RankShare, start: int, stop: int, rows: int, *, prefill: bool = False) -> float:
        """Seconds of one rank's part in a step: decode of `rows`, or prefill of a chunk of `rows`. Without waiting."""
        model, machine, layers = self.model, part.machine, stop - start
        context = self.context / 2 if prefill else self.context  # the average over a prompt; the end of an answer
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
        """Running sums over the layers: stored bytes that a step of `rows` reads."""
        if rows not in self._reads:
            touched = 1 - (1 - self._used_share) ** rows
            each = (n - (1 - touched) * self._expert_bytes(i) for i, n in enumerate(self.model.layer_bytes))
            self._reads[rows] = list(accumulate(each, initial=0.0))
        return self._reads[rows]

    @cached_property
    def _routed(self) -> list[float]:
        """Running sums over the layers: stored bytes of routed experts."""
        return list(accumulate((self._expert_bytes(i) for i in range(self.model.num_layers)), initial=0.0))

    def _fullest(self, ranks: int, rows: int) -> float:
        """Experts that the rank with the most of them reads, as a multiple of the average rank's.

        Choices fall on ranks independently: with m of them a rank, numbers spread by about sqrt(m), and the largest of
        n normal deviates is c_n of them above the average (Tippett, Biometrika 17, 1925), at most all m n.
        """
        used = self._experts.used if self._experts else 0
        each = max(used * rows / ranks, 1e-9)
        return min(1 + _LARGEST.get(ranks, math.sqrt(2 * math.log(ranks))) / math.sqrt(each), float(ranks))

    @cached_property
    def _active(self) -> list[float]:
        """Running sums over the layers: parameters that a token passes through."""
        each = (n - (1 - self._used_share) * self._expert_bytes(i) for i, n in enumerate(self.model.layer_bytes))
        return [n / self.stored_param_bytes for n in accumulate(each, initial=0.0)]

    def all_reduce(self, machines: Sequence[int], rows: int) -> float:
        """Seconds to sum the hidden states of `rows` over the ranks of a stage; 0 for one rank, inf if not joined."""
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
        """Seconds in which the ranks of the last stage put their parts of the logits of `rows` together."""
        n = len(machines)
        link = self.network.worst(machines) if n > 1 else None
        if link is None:
            return 0.0
        size = rows * self.model.vocab_size * max(self.item(m) for m in machines)
        wait = self._fence(link, machines) + (1 if link.mesh else n - 1) * link.latency
        return wait + (n - 1) / n * size / link.bandwidth

    def _fence(self, link: Link, machines: Sequence[int]) -> float:
        return link.fence if link.fence is not None else max(self.machines[one].fence for one in machines)

    def hop(self, source: Sequence[int], target: Sequence[int], rows: int) -> float:
        """Seconds to hand the hidden states of `rows` from one stage to the next; inf if they are not joined."""
        links = [self.network.between(a, b) for a in source[:1] for b in target]
        known = [x for x in links if x is not None]
        if len(known) < len(links):
            return float("inf")
        size = self._message(source, rows)
        return max((x.hop_latency or x.latency) + size / (x.hop_bandwidth or x.bandwidth) for x in known)

    def _message(self, machines: Sequence[int], rows: int) -> int:
        return rows * self.model.hidden_size * max(self.item(m) for m in machines)

    def _head_time(self, part: RankShare, rows: int) -> float:
        stored = (self.model.head_bytes + (self.model.embed_bytes if self.model.tied_head else 0)) * part.share
        flop = 2 * rows * stored / self.stored_param_bytes
        return max(stored * self.factor(part.machine) / self._bandwidth(part.machine), flop / self._flops(part.machine))

    def _bandwidth(self, machine: int) -> float:
        return self.machines[machine].bandwidth * (1 if self.machines[machine].measured else BANDWIDTH_EFFICIENCY)

    def _flops(self, machine: int) -> float:
        return self.machines[machine].flops * (1 if self.machines[machine].measured else FLOPS_EFFICIENCY)

    def _overhead(self, machine: int) -> float:
        return self.machines[machine].layer_overhead * (EXPERT_OVERHEAD if self._experts else 1)

    def _expert_bytes(self, layer: int) -> int:
        return self._experts.layer_bytes[layer] if self._experts else 0

    @property
    def _used_share(self) -> float:
        return self._experts.used / self._experts.count if self._experts else 1.0
