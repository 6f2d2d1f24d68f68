"""Tensor-parallel rules of every family: plain data, no mlx.

Every parameter of a layer has a rule: split (by heads, states or MLP width), or replicated. A parameter without a rule
is refused, so that none is replicated by oversight. `tests/loading/test_loading_shard_parity.py` compares every entry
of `SHARDING` with the undivided model.
"""

from __future__ import annotations

from dataclasses import replace

from tandem.models.families import older, rules, states
from tandem.models.families.cuts import Sharding, attention, columns, each, experts, fused, glu, rows, two

_COHERE_SHARED = "num_shared_experts|moe_num_shared_experts"
_STEP = replace(
    rules.moe(widths=(rules.WIDTH, rules.EXPERT, ())),
    cuts={**attention(), **glu(), **experts(shared="share_expert"), **rules.GATE},
    whole=frozenset({"mlp.gate", "mlp.gate.gate"}),
    shared=("share_expert_dim",),
    loose_heads=True,
)
_GPT_OSS = rules.moe(switch="mlp.experts", router=("mlp.router",), widths=((), rules.WIDTH, ()))
_DENSE = (
    "llama", "mistral", "qwen2", "qwen3", "gemma3_text", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2", "granite",
    "helium", "hunyuan_v1_dense", "internlm3", "mimo", "seed_oss", "smollm3", "telechat3", "gemma3", "llava", "minicpm",
    "ministral3", "mistral3", "nanbeige", "pixtral", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "k2_horizon", "idefics3",
    "smolvlm", "internvl",
)  # fmt: skip
_LATENT = (
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "joyai_llm_flash", "kimi_k2", "kimi_k25",
    "kimi_vl", "mistral4", "mistral_large3",
)  # fmt: skip

SHARDING: dict[str, Sharding] = {
    **dict.fromkeys(_DENSE, rules.DENSE),
    **dict.fromkeys(("qwen3_moe", "qwen3_vl_moe"), rules.moe(widths=(rules.WIDTH, rules.EXPERT, ()))),
    "gpt_oss": replace(_GPT_OSS, cuts={**_GPT_OSS.cuts, "self_attn.sinks": rows("q_heads")}),
    "phi3": Sharding(cuts=fused("self_attn", "qkv_proj", "o_proj") | rules.FUSED_GLU),
    "apertus": Sharding(cuts=attention() | two("up_proj", "down_proj"), whole=frozenset({"mlp.act_fn"})),
    "bailing_moe": states.BAILING,
    "bailing_hybrid": states.LING_HYBRID,
    "bailing_moe_linear": states.LING_LINEAR,
    "bailing_moe_v3": states.LING_DELTA,
    "cohere": Sharding(cuts=attention() | glu() | rules.COHERE),
    **dict.fromkeys(("deepseek", "glm4_moe", "glm4v_moe", "solar_open"), rules.ROUTED),
    "dots1": rules.EXPERTS,
    "ernie4_5_moe": rules.moe(widths=(rules.WIDTH, rules.ERNIE_EXPERT, (*rules.ERNIE_EXPERT, "moe_num_shared_experts"))),
    **dict.fromkeys(("glm", "glm4", "glm4v"), Sharding(cuts=attention() | rules.FUSED_GLU)),
    "gpt_neox": Sharding(
        cuts=fused("attention", "query_key_value", "dense", "qkv_groups") | two("dense_h_to_4h", "dense_4h_to_h"),
        mlp=(4, "hidden_size"),
    ),
    "granitemoe": rules.moe(
        switch="block_sparse_moe.switch_mlp", router=("block_sparse_moe.router.layer",), widths=((), rules.WIDTH, ())
    ),
    "internlm2": Sharding(
        cuts=fused("attention", "wqkv", "wo", "qkv_groups") | glu("feed_forward", gate="w1", up="w3", down="w2")
    ),
    **dict.fromkeys(("mixtral", "phimoe"), rules.BLOCK),
    "nemotron": Sharding(cuts=attention() | two("up_proj", "down_proj")),
    "nemotron-nas": rules.NEMOTRON_NAS,
    "phi": Sharding(cuts=attention(out="dense") | two("fc1", "fc2")),
    "qwen2_moe": rules.moe(
        shared="mlp.shared_expert",
        router=("mlp.gate", "mlp.shared_expert_gate"),
        widths=((), rules.EXPERT, ("shared_expert_intermediate_size",)),
    ),
    "starcoder2": Sharding(cuts=attention() | two("c_fc", "c_proj")),
    **dict.fromkeys(("olmo2", "olmo3"), rules.OLMO),
    "olmoe": replace(
        rules.moe(widths=((), rules.WIDTH, ())), cuts=rules.NORMED | glu("mlp.switch_mlp", "experts"), norms=rules.NORMS
    ),
    **dict.fromkeys(("minimax", "minimax_m2"), rules.MINIMAX),
    "stablelm": replace(rules.DENSE, lists={"self_attn.q_layernorm.norms": "q_heads", "self_attn.k_layernorm.norms": "kv_heads"}),
    **dict.fromkeys(_LATENT, rules.MLA),
    **dict.fromkeys(("minicpm3", "youtu_llm"), rules.MLA_DENSE),
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_moe"), states.QWEN_DELTA),
    "qwen4_exp": states.QWEN4,
    "glm5_next": states.GLM5_NEXT,
    "olmo_hybrid": states.OLMO_HYBRID,
    "kimi_linear": states.KIMI_LINEAR,
    "kimi_k3": states.KIMI_K3,
    **dict.fromkeys(("longcat_flash", "longcat_flash_ngram"), rules.LONGCAT),
    "minimax_m3_vl": rules.MINIMAX_M3,
    "mamba2": states.mamba2("mixer"),
    "granitemoehybrid": states.GRANITE_HYBRID,
    "nemotron_h": states.NEMOTRON_H,
    "jamba": states.JAMBA,
    **dict.fromkeys(("lfm2", "lfm2-vl"), states.LFM2),
    "falcon_h1": states.FALCON,
    "plamo2": states.PLAMO2,
    "plamo3": states.PLAMO3,
    "gear": states.GEAR,
    "recurrent_gemma": states.RECURRENT_GEMMA,
    "lille-130m": older.LILLE,
    "dbrx": older.DBRX,
    "exaone": older.EXAONE,
    "gpt2": older.GPT2,
    "gpt_bigcode": older.BIGCODE,
    "gptj": older.GPTJ,
    "hunyuan": older.HUNYUAN,
    **dict.fromkeys(("phixtral", "phi-msft"), older.PHIXTRAL),
    "qwen": older.QWEN1,
    **dict.fromkeys(("gemma4", "gemma4_text", "gemma4_unified"), rules.GEMMA4),
    **dict.fromkeys(("mimo_v2", "mimo_v2_flash"), rules.MIMO_V2),
    "hy_v4": rules.HY_V4,
    "deepseek_v4": rules.DEEPSEEK_V4,
    "kolibri1": rules.moe(widths=((), rules.EXPERT, ("shared_expert_intermediate_size",))),
    "cohere2_moe": rules.moe(
        widths=(("prefix_dense_intermediate_size|intermediate_size",), rules.WIDTH, ("intermediate_size", _COHERE_SHARED))
    ),
    "mellum": rules.moe(widths=((), rules.EXPERT, ())),
    "llama4_text": Sharding(cuts=attention() | glu("feed_forward"), mlp=("intermediate_size_mlp",)),
    "muse_glimmer": Sharding(cuts={**attention(), **glu(), "self_attn.gate_proj": rows("q")}),
    "spark2_5": Sharding(
        cuts=fused("self_attn", "q_k_v_proj", "out_proj") | rules.GATE | glu(),
        counts={"self_attn.q_size": ("q",), "self_attn.kv_size": ("kv",)},
    ),
    "nanochat": Sharding(
        cuts={
            "attn.c_q": rows("q"),
            **each(rows("kv"), "attn", "c_k", "c_v"),
            "attn.c_proj": columns("q"),
            **two("c_fc", "c_proj"),
        },
        counts={"attn.hidden_size": ("q",)},
    ),
    "lfm2_moe": states.LFM2_MOE,
    "llama4": Sharding(
        cuts=attention() | glu("feed_forward") | experts("feed_forward", routed="experts", shared="shared_expert"),
        whole=frozenset({"feed_forward.router"}),
        mlp=("intermediate_size_mlp",),
        experts=rules.WIDTH,
        shared=rules.WIDTH,
    ),
    "Klear": replace(rules.EXPERTS, whole=frozenset({"mlp.gate", "mlp.coefficient", "mlp.expert_bias"})),
    "afmoe": replace(
        rules.moe(switch="mlp.experts", widths=(rules.WIDTH, rules.EXPERT, rules.MOE_SHARED)),
        cuts={**attention(), **glu(), **experts(routed="experts"), "self_attn.gate_proj": rows("q")},
        whole=frozenset({"mlp.router.gate", "mlp.expert_bias"}),
    ),
    "exaone_moe": rules.moe(widths=(rules.WIDTH, rules.EXPERT, rules.MOE_SHARED)),
    "laguna": replace(
        rules.moe(widths=(rules.WIDTH, rules.EXPERT, ())),
        cuts={**attention(), **glu(), **rules.QWEN_MOE, **rules.GATE},
        whole=frozenset({"mlp.gate", "mlp.gate.proj"}),
        shared=("shared_expert_intermediate_size",),
        loose_heads=True,
    ),
    **dict.fromkeys(("step3p5", "step3p7"), _STEP),
}
"""Rules by `model_type`."""

NOT_SHARDED: dict[str, str] = {
    "baichuan_m1": "its convolution over keys and values has weights of five axes, and windows have other heads",
    **dict.fromkeys(("falcon_mamba", "mamba"), "its layers go from position to position, and would sum at each"),
    "gemma3n": "its MLPs keep what is beyond the mean and deviation of their whole width",
    "openelm": "its layers have different numbers of heads, which have no divisor in common",
    "plamo": "its query heads take the key heads in turn, so that those of one key head do not stand together",
    "rwkv7": "its layers take the width of what they get for that of their heads together",
}
"""Reason why a family cannot run tensor-parallel, by `model_type`; covers all families missing from `SHARDING`."""
