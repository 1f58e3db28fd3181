"""Names of tensors in files that vLLM's loaders read, of some families of ``hub_families``.

``*`` is a number. vLLM packs q, k, v and gate, up itself, and reads one tensor for each expert; of gpt_oss, stacks.
"""

from __future__ import annotations

from typing import Any

# as the published models have them, where the families' small ones do not: biases, and layers of each kind
SIZES: dict[str, dict[str, Any]] = {
    "phimoe": {"attention_bias": True, "lm_head_bias": True},
    "deepseek_v4": {
        "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"],
        "mlp_layer_types": ["hash_moe", "moe"],
    },
}
ATTENTION = "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj"
NORMS = "input_layernorm post_attention_layernorm"
MIXTRAL = (
    "block_sparse_moe.gate block_sparse_moe.experts.*.w1 block_sparse_moe.experts.*.w2 block_sparse_moe.experts.*.w3"
)
EXPERTS = "mlp.gate mlp.experts.*.gate_proj mlp.experts.*.up_proj mlp.experts.*.down_proj"
QK_NORMS = "self_attn.q_norm self_attn.k_norm"


def names(layers: str, others: str = "", top: str = "model.embed_tokens model.norm lm_head") -> frozenset[str]:
    """``layers``: modules of a layer with a weight; ``others``: whole names in one."""
    of_layers = [f"model.layers.*.{name}.weight" for name in layers.split()]
    return frozenset(
        [*of_layers, *(f"model.layers.*.{n}" for n in others.split()), *(f"{n}.weight" for n in top.split())]
    )


V4 = {
    "embed.weight", "head.weight", "norm.weight", "hc_head_fn", "hc_head_base", "hc_head_scale",
    *(f"layers.*.{name}.weight" for name in (
        "attn_norm", "ffn_norm", "attn.wq_a", "attn.wq_b", "attn.wkv", "attn.wo_a", "attn.wo_b", "attn.q_norm",
        "attn.kv_norm", "attn.compressor.norm", "attn.compressor.wkv", "attn.compressor.wgate", "attn.indexer.wq_b",
        "attn.indexer.weights_proj", "attn.indexer.compressor.norm", "attn.indexer.compressor.wkv",
        "attn.indexer.compressor.wgate", "ffn.gate",
        "ffn.experts.*.w1", "ffn.experts.*.w2", "ffn.experts.*.w3", "ffn.shared_experts.w1", "ffn.shared_experts.w2",
        "ffn.shared_experts.w3",
    )),
    *(f"layers.*.{name}" for name in (
        "attn.attn_sink", "attn.compressor.ape", "attn.indexer.compressor.ape", "ffn.gate.tid2eid", "ffn.gate.bias",
        "hc_attn_fn", "hc_attn_base", "hc_attn_scale", "hc_ffn_fn", "hc_ffn_base", "hc_ffn_scale",
    )),
}  # fmt: skip
VLLM: dict[str, frozenset[str]] = {
    "mixtral": names(f"{ATTENTION} {NORMS} {MIXTRAL}"),
    "qwen3_moe": names(f"{ATTENTION} {NORMS} {QK_NORMS} {EXPERTS}"),
    "deepseek_v3": names(
        "self_attn.q_a_proj self_attn.q_a_layernorm self_attn.q_b_proj self_attn.kv_a_proj_with_mqa "
        f"self_attn.kv_a_layernorm self_attn.kv_b_proj self_attn.o_proj {NORMS} {EXPERTS} mlp.gate_proj mlp.up_proj "
        "mlp.down_proj mlp.shared_experts.gate_proj mlp.shared_experts.up_proj mlp.shared_experts.down_proj",
        "mlp.gate.e_score_correction_bias",
    ),
    "deepseek_v4": frozenset(V4),
    "qwen3_next": names(
        f"{ATTENTION} {NORMS} {QK_NORMS} {EXPERTS} mlp.shared_expert.gate_proj mlp.shared_expert.up_proj "
        "mlp.shared_expert.down_proj mlp.shared_expert_gate linear_attn.conv1d linear_attn.in_proj_qkvz "
        "linear_attn.in_proj_ba linear_attn.norm linear_attn.out_proj",
        "linear_attn.A_log linear_attn.dt_bias",
    ),
    "jamba": names(
        f"{ATTENTION} input_layernorm pre_ff_layernorm feed_forward.router feed_forward.experts.*.gate_proj "
        "feed_forward.experts.*.up_proj feed_forward.experts.*.down_proj feed_forward.gate_proj feed_forward.up_proj "
        "feed_forward.down_proj mamba.in_proj mamba.conv1d mamba.x_proj mamba.dt_proj mamba.out_proj "
        "mamba.dt_layernorm mamba.b_layernorm mamba.c_layernorm",
        "mamba.A_log mamba.D mamba.conv1d.bias mamba.dt_proj.bias",
        "model.embed_tokens model.final_layernorm lm_head",
    ),
    "phimoe": names(
        f"{ATTENTION} {NORMS} {MIXTRAL}",
        "input_layernorm.bias post_attention_layernorm.bias self_attn.q_proj.bias self_attn.k_proj.bias "
        "self_attn.v_proj.bias self_attn.o_proj.bias",
    ) | {"model.norm.bias", "lm_head.bias"},
    "gpt_oss": names(
        f"{ATTENTION} {NORMS} mlp.router",
        "self_attn.sinks self_attn.q_proj.bias self_attn.k_proj.bias self_attn.v_proj.bias self_attn.o_proj.bias "
        "mlp.router.bias mlp.experts.gate_up_proj mlp.experts.gate_up_proj_bias mlp.experts.down_proj "
        "mlp.experts.down_proj_bias",
    ),
}  # fmt: skip
