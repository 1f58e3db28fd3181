"""Small models of families of which files have other tensors than the model: one for each expert, say."""

from __future__ import annotations

from tests.models.hugging_face import EXPERTS, LLAMA, ZOO, Member, _causal

FAMILIES: dict[str, Member] = {
    **{name: ZOO[name] for name in ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "gpt_oss")},
    "phimoe": _causal("Phimoe", EXPERTS, num_local_experts=4),
    "glm4_moe": _causal(
        "Glm4Moe", EXPERTS, n_routed_experts=4, moe_intermediate_size=32, head_dim=8, first_k_dense_replace=1,
        n_group=1, topk_group=1,
    ),
    "ernie4_5_moe": _causal(
        "Ernie4_5_Moe", LLAMA, moe_num_experts=4, moe_k=2, moe_intermediate_size=32, moe_layer_start_index=1,
    ),
    "minimax": _causal("MiniMax", EXPERTS, num_local_experts=4, head_dim=8),
    "hunyuan_v1_moe": _causal("HunYuanMoEV1", LLAMA, num_experts=4, moe_topk=2, head_dim=8),
    "jamba": _causal(
        "Jamba", EXPERTS, num_experts=4, use_mamba_kernels=False, attn_layer_period=2, attn_layer_offset=1,
        expert_layer_period=2, expert_layer_offset=1, mamba_d_state=4, pad_token_id=0,
    ),
    "qwen3_next": _causal(
        "Qwen3Next", EXPERTS, num_experts=4, moe_intermediate_size=32, shared_expert_intermediate_size=32, head_dim=8,
        linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4,
        layer_types=["linear_attention", "full_attention"],
    ),
    "deepseek_v4": _causal(
        "DeepseekV4", EXPERTS, n_routed_experts=4, moe_intermediate_size=32, head_dim=16,
    ),
}  # fmt: skip
