"""How the families' layers are divided for tensor parallelism: plain data, no mlx.

Every parameter of a layer is named here: it is cut (by heads or by MLP width), or whole on every rank. A name that is
neither is refused, so that a parameter can never be copied to all ranks by oversight. Every entry of `SHARDING` is
held to the undivided model by `tests/loading/test_loading_shard_parity.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["q", "kv", "qkv_groups", "q_heads", "kv_heads", "mlp", "experts", "shared", "vocab"]
"""What a divided axis is made of: query widths, key or value widths, fused (queries, key, value) per kv head, one
entry per query head or per kv head, the widths of MLP, expert and shared expert, or tokens of the vocabulary."""
Width = tuple[str | int, ...]
"""A figure of config.json: the product of numbers and keys (`a|b`: b where a is missing); empty: there is none."""


@dataclass(frozen=True)
class Cut:
    """How a module's weight [..., rows, columns] is divided."""

    axis: Literal["rows", "columns"]
    """rows: each rank has its part of the outputs; columns: of the inputs, and outputs are summed over the ranks."""
    kinds: tuple[Kind, ...]
    """What the axis is made of, one after the other: several where projections are fused."""


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How a family's layers are divided. Paths are those within a layer."""

    cuts: Mapping[str, Cut]
    """By path of the module, or of a parameter that a module holds itself."""
    sums: tuple[str, ...]
    """Modules whose outputs are partial and are summed over the ranks."""
    attention: str = "self_attn"
    """Module that holds the numbers of heads."""
    whole: frozenset[str] = frozenset()
    """Modules that every rank has whole, besides all those with `norm` in the last part of their path."""
    mlp: Width = ("intermediate_size",)
    experts: Width = ()
    shared: Width = ()

    def cut_of(self, path: str) -> Cut | None:
        """The cut for a module or parameter; None where it is whole. Raises KeyError for a path that is not listed."""
        if path in self.cuts:
            return self.cuts[path]
        if path in self.whole or "norm" in path.rpartition(".")[2]:
            return None
        raise KeyError(path)


def _rows(*kinds: Kind) -> Cut:
    return Cut("rows", kinds)


def _columns(kind: Kind) -> Cut:
    return Cut("columns", (kind,))


def _attention(path: str = "self_attn", out: str = "o_proj") -> dict[str, Cut]:
    return {
        f"{path}.q_proj": _rows("q"),
        f"{path}.k_proj": _rows("kv"),
        f"{path}.v_proj": _rows("kv"),
        f"{path}.{out}": _columns("q"),
    }


def _glu(path: str = "mlp", kind: Kind = "mlp") -> dict[str, Cut]:
    return {
        f"{path}.gate_proj": _rows(kind),
        f"{path}.up_proj": _rows(kind),
        f"{path}.down_proj": _columns(kind),
    }


def _two(up: str, down: str, path: str = "mlp") -> dict[str, Cut]:
    return {f"{path}.{up}": _rows("mlp"), f"{path}.{down}": _columns("mlp")}


_FUSED_GLU = {"mlp.gate_up_proj": _rows("mlp", "mlp"), "mlp.down_proj": _columns("mlp")}
_SUMS = ("self_attn", "mlp")
_DENSE = Sharding(cuts=_attention() | _glu(), sums=_SUMS)
_COHERE = {"self_attn.q_norm": _rows("q_heads"), "self_attn.k_norm": _rows("kv_heads")}


def _moe(
    *,
    switch: str = "mlp.switch_mlp",
    shared: str = "mlp.shared_experts",
    router: tuple[str, ...] = ("mlp.gate",),
    widths: tuple[Width, Width, Width],
) -> Sharding:
    """Standard attention, and experts; `widths` are those of MLP, expert and shared expert."""
    mlp, experts, own = widths
    cuts = _attention() | _glu(switch, "experts")
    if mlp:
        cuts |= _glu()
    if own:
        cuts |= _glu(shared, "shared")
    sums = ("self_attn", switch.partition(".")[0])
    return Sharding(cuts=cuts, sums=sums, whole=frozenset(router), mlp=mlp, experts=experts, shared=own)


_WIDTH: Width = ("intermediate_size",)
_EXPERT: Width = ("moe_intermediate_size",)
_ROUTED = _moe(widths=(_WIDTH, _EXPERT, ("moe_intermediate_size", "n_shared_experts")))
_BLOCK = _moe(switch="block_sparse_moe.switch_mlp", router=("block_sparse_moe.gate",), widths=((), _WIDTH, ()))
_ERNIE_EXPERT: Width = ("moe_intermediate_size|intermediate_size",)
_BAILING_SHARED: Width = ("moe_shared_expert_intermediate_size|moe_intermediate_size", "num_shared_experts")

SHARDING: dict[str, Sharding] = {
    **dict.fromkeys(
        (
            "llama", "mistral", "qwen2", "qwen3", "gemma3_text", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2",
            "granite", "helium", "hunyuan_v1_dense", "internlm3", "mimo", "seed_oss", "smollm3", "telechat3",
        ),
        _DENSE,
    ),
    "qwen3_moe": _moe(widths=(_WIDTH, _EXPERT, ())),
    "gpt_oss": Sharding(
        cuts={**_attention(), "self_attn.sinks": _rows("q_heads"), **_glu("mlp.experts", "experts")},
        sums=_SUMS,
        whole=frozenset({"mlp.router"}),
        mlp=(),
        experts=_WIDTH,
    ),
    "phi3": Sharding(
        cuts={"self_attn.qkv_proj": _rows("q", "kv", "kv"), "self_attn.o_proj": _columns("q"), **_FUSED_GLU},
        sums=_SUMS,
    ),
    "apertus": Sharding(cuts=_attention() | _two("up_proj", "down_proj"), sums=_SUMS, whole=frozenset({"mlp.act_fn"})),
    "bailing_moe": Sharding(
        cuts={
            "attention.query_key_value": _rows("q", "kv", "kv"),
            "attention.dense": _columns("q"),
            **_glu(),
            **_glu("mlp.switch_mlp", "experts"),
            **_glu("mlp.shared_experts", "shared"),
        },
        sums=("attention", "mlp"),
        attention="attention",
        whole=frozenset({"mlp.gate", "mlp.gate.gate_proj"}),
        experts=_EXPERT,
        shared=_BAILING_SHARED,
    ),
    "cohere": Sharding(cuts=_attention() | _glu() | _COHERE, sums=_SUMS),
    "deepseek": _ROUTED,
    "dots1": _moe(switch="mlp.experts", widths=(_WIDTH, _EXPERT, ("moe_intermediate_size", "n_shared_experts"))),
    "ernie4_5_moe": _moe(widths=(_WIDTH, _ERNIE_EXPERT, (*_ERNIE_EXPERT, "moe_num_shared_experts"))),
    "glm": Sharding(cuts=_attention() | _FUSED_GLU, sums=_SUMS),
    "glm4": Sharding(cuts=_attention() | _FUSED_GLU, sums=_SUMS),
    "glm4_moe": _ROUTED,
    "gpt_neox": Sharding(
        cuts={
            "attention.query_key_value": _rows("qkv_groups"),
            "attention.dense": _columns("q"),
            **_two("dense_h_to_4h", "dense_4h_to_h"),
        },
        sums=("attention", "mlp"),
        attention="attention",
        mlp=(4, "hidden_size"),
    ),
    "granitemoe": _moe(
        switch="block_sparse_moe.switch_mlp", router=("block_sparse_moe.router.layer",), widths=((), _WIDTH, ())
    ),
    "internlm2": Sharding(
        cuts={
            "attention.wqkv": _rows("qkv_groups"),
            "attention.wo": _columns("q"),
            "feed_forward.w1": _rows("mlp"),
            "feed_forward.w3": _rows("mlp"),
            "feed_forward.w2": _columns("mlp"),
        },
        sums=("attention", "feed_forward"),
        attention="attention",
    ),
    "mixtral": _BLOCK,
    "nemotron": Sharding(cuts=_attention() | _two("up_proj", "down_proj"), sums=_SUMS),
    "phi": Sharding(cuts=_attention(out="dense") | _two("fc1", "fc2"), sums=_SUMS),
    "phimoe": _BLOCK,
    "qwen2_moe": _moe(
        shared="mlp.shared_expert",
        router=("mlp.gate", "mlp.shared_expert_gate"),
        widths=((), _EXPERT, ("shared_expert_intermediate_size",)),
    ),
    "solar_open": _ROUTED,
    "starcoder2": Sharding(cuts=_attention() | _two("c_fc", "c_proj"), sums=_SUMS),
}
"""By `model_type`."""

_FULL_NORM = "its norms of queries and keys run over all heads together"
_LATENT = "its latent keys and values, which all heads share, are not divided yet"
_STATES = "its recurrent layers are not divided yet"
_NESTED = "its layers, which are nested in a model of several senses, are not divided yet"
NOT_SHARDED: dict[str, str] = {
    **dict.fromkeys(
        (
            "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "joyai_llm_flash", "kimi_k2",
            "kimi_k25", "kimi_linear", "longcat_flash", "mistral4", "youtu_llm",
        ),
        _LATENT,
    ),
    **dict.fromkeys(
        (
            "baichuan_m1", "granitemoehybrid", "jamba", "lfm2", "lfm2_moe", "mamba2", "nemotron_h", "olmo_hybrid",
            "qwen3_5", "qwen3_5_moe", "qwen3_next", "recurrent_gemma", "rwkv7",
        ),
        _STATES,
    ),
    **dict.fromkeys(("gemma3", "llama4", "mistral3", "qwen3_vl", "qwen3_vl_moe"), _NESTED),
    **dict.fromkeys(("minimax", "minimax_m2"), _FULL_NORM),
    **dict.fromkeys(
        ("Klear", "afmoe", "exaone_moe", "laguna", "ministral3", "nanbeige", "step3p5"),
        "its layers are not divided yet",
    ),
    "exaone": "its attention reshapes by the model's hidden size",
    "olmo2": _FULL_NORM,
    "olmo3": _FULL_NORM,
    "olmoe": _FULL_NORM,
    "stablelm": "its norms of queries and keys are a list with one entry per head",
}
"""Why a family cannot be divided. By `model_type`."""
