"""Small Hugging Face models of many families, built from configs alone, with inputs of one microbatch."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

BATCH, LENGTH, WIDTH, VOCABULARY = 2, 8, 32, 96
SIZES = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = SIZES | {"intermediate_size": 64, "num_key_value_heads": 2, "max_position_embeddings": 32}
EXPERTS = LLAMA | {"num_experts_per_tok": 2}
GPT = {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": 32}
T5 = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "num_layers": 2,
    "num_heads": 4,
    "d_kv": 8,
    "d_ff": 64,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
}
SEQ2SEQ = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 32,
    "decoder_start_token_id": 0,
    "pad_token_id": 1,
}
BERT = SIZES | {"intermediate_size": 64, "max_position_embeddings": 32}
IMAGE = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 16,
    "patch_size": 4,
    "num_channels": 3,
    "num_labels": 8,
}


@dataclass(frozen=True)
class Member:
    """A family: its model class, the class of its config, sizes, and what kind of batch it reads."""

    model: str
    config: str
    sizes: dict[str, Any]
    batch: str = "tokens"
    settings: dict[str, Any] = field(default_factory=dict)


def _causal(family: str, sizes: dict[str, Any] = LLAMA, **more: Any) -> Member:
    return Member(f"{family}ForCausalLM", f"{family}Config", sizes | more)


ZOO: dict[str, Member] = {
    "gpt2": Member("GPT2LMHeadModel", "GPT2Config", GPT),
    "gptj": Member("GPTJForCausalLM", "GPTJConfig", GPT | {"rotary_dim": 4}),
    "gpt_neo": _causal(
        "GPTNeo",
        SIZES,
        num_layers=2,
        attention_types=[[["global", "local"], 1]],
        num_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
        window_size=4,
    ),
    "gpt_bigcode": Member("GPTBigCodeForCausalLM", "GPTBigCodeConfig", GPT | {"multi_query": True}),
    "gpt_neox": _causal("GPTNeoX", BERT),
    "llama": _causal("Llama"),
    "llama_mqa": _causal("Llama", num_key_value_heads=1, attention_bias=True, mlp_bias=True),
    "mistral": _causal("Mistral", sliding_window=4),
    "qwen2": _causal("Qwen2"),
    "qwen3": _causal("Qwen3", head_dim=8),
    "gemma": _causal("Gemma", head_dim=8),
    "gemma2": _causal("Gemma2", head_dim=8, sliding_window=4),
    "gemma3": Member("Gemma3ForCausalLM", "Gemma3TextConfig", LLAMA | {"head_dim": 8, "sliding_window": 4}),
    "phi": _causal("Phi"),
    "phi3": _causal("Phi3", pad_token_id=0),
    "cohere": _causal("Cohere"),
    "olmo": _causal("Olmo"),
    "olmo2": _causal("Olmo2"),
    "stablelm": _causal("StableLm", use_qkv_bias=True, qk_layernorm=True),
    "starcoder2": _causal("Starcoder2"),
    "granite": _causal("Granite"),
    "nemotron": _causal("Nemotron"),
    "glm": _causal("Glm", head_dim=8, pad_token_id=0),
    "persimmon": _causal("Persimmon", qk_layernorm=True),
    "smollm3": _causal("SmolLM3", pad_token_id=0),
    "falcon_mqa": _causal("Falcon", SIZES, multi_query=True, parallel_attn=True, new_decoder_architecture=False),
    "falcon_new": _causal("Falcon", SIZES, new_decoder_architecture=True, num_kv_heads=2),
    "falcon_alibi": _causal("Falcon", SIZES, alibi=True, multi_query=False, parallel_attn=False, bias=True),
    "bloom": Member(
        "BloomForCausalLM", "BloomConfig", {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "n_layer": 2, "n_head": 4}
    ),
    "mpt": Member(
        "MptForCausalLM",
        "MptConfig",
        {"vocab_size": VOCABULARY, "d_model": WIDTH, "n_layers": 2, "n_heads": 4, "max_seq_len": 32},
    ),
    "opt": _causal("OPT", SIZES, ffn_dim=64, max_position_embeddings=32, word_embed_proj_dim=WIDTH),
    "opt_350m": _causal(
        "OPT", SIZES, ffn_dim=64, max_position_embeddings=32, word_embed_proj_dim=16, do_layer_norm_before=False
    ),
    "codegen": Member("CodeGenForCausalLM", "CodeGenConfig", GPT | {"rotary_dim": 4, "n_ctx": 32}),
    "biogpt": _causal("BioGpt", BERT),
    "xglm": _causal(
        "XGLM",
        {
            "vocab_size": VOCABULARY,
            "d_model": WIDTH,
            "num_layers": 2,
            "attention_heads": 4,
            "ffn_dim": 64,
            "max_position_embeddings": 32,
        },
    ),
    "bert": Member("BertForMaskedLM", "BertConfig", BERT, "masked"),
    "bert_classes": Member("BertForSequenceClassification", "BertConfig", BERT | {"num_labels": 3}, "classes"),
    "roberta": Member("RobertaForMaskedLM", "RobertaConfig", BERT, "masked"),
    "electra": Member("ElectraForMaskedLM", "ElectraConfig", BERT | {"embedding_size": 16}, "masked"),
    "albert": Member("AlbertForMaskedLM", "AlbertConfig", BERT | {"embedding_size": 16}, "masked"),
    "distilbert": Member(
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {
            "vocab_size": VOCABULARY,
            "dim": WIDTH,
            "n_layers": 2,
            "n_heads": 4,
            "hidden_dim": 64,
            "max_position_embeddings": 32,
        },
        "masked",
    ),
    "deberta_v2": Member(
        "DebertaV2ForMaskedLM",
        "DebertaV2Config",
        BERT | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 4},
        "masked",
    ),
    "modernbert": Member(
        "ModernBertForMaskedLM", "ModernBertConfig", BERT | {"pad_token_id": 0, "local_attention": 4}, "masked"
    ),
    "mpnet": Member("MPNetForMaskedLM", "MPNetConfig", BERT, "masked"),
    "t5": Member("T5ForConditionalGeneration", "T5Config", T5),
    "t5_gated": Member(
        "T5ForConditionalGeneration", "T5Config", T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
    ),
    "mt5": Member("MT5ForConditionalGeneration", "MT5Config", T5),
    "bart": Member("BartForConditionalGeneration", "BartConfig", SEQ2SEQ),
    "pegasus": Member("PegasusForConditionalGeneration", "PegasusConfig", SEQ2SEQ),
    "marian": Member("MarianMTModel", "MarianConfig", SEQ2SEQ),
    "vit": Member("ViTForImageClassification", "ViTConfig", IMAGE, "image"),
    "deit": Member("DeiTForImageClassification", "DeiTConfig", IMAGE, "image"),
    "dinov2": Member("Dinov2ForImageClassification", "Dinov2Config", IMAGE, "image"),
    "beit": Member("BeitForImageClassification", "BeitConfig", IMAGE, "image"),
    "mixtral": _causal("Mixtral", EXPERTS, num_local_experts=4),
    "qwen2_moe": _causal(
        "Qwen2Moe", EXPERTS, num_experts=4, moe_intermediate_size=32, shared_expert_intermediate_size=32
    ),
    "qwen3_moe": _causal("Qwen3Moe", EXPERTS, num_experts=4, moe_intermediate_size=32, head_dim=8),
    "deepseek_v3": _causal(
        "DeepseekV3",
        EXPERTS,
        n_routed_experts=4,
        moe_intermediate_size=32,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        num_key_value_heads=4,
    ),
    "gpt_oss": _causal("GptOss", EXPERTS, num_local_experts=4, head_dim=8, sliding_window=4),
    "mamba": _causal(
        "Mamba", {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "state_size": 4}
    ),
}


_FOUR, _LOCAL, _ROUTED = {"num_experts": 4}, {"num_local_experts": 4}, {"n_routed_experts": 4}
_NARROW, _HEADS, _ATTENTION = {"moe_intermediate_size": 32}, {"head_dim": 8}, {"layer_types": ["full_attention"] * 2}
_GROUPED = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
_LATENT = ZOO["deepseek_v3"].sizes
# Families of experts: what is listed above, and others.
MOE: dict[str, Member] = {
    **{name: ZOO[name] for name in ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "gpt_oss")},
    "olmoe": _causal("Olmoe", EXPERTS | _FOUR, eos_token_id=1),
    "granitemoe": _causal("GraniteMoe", EXPERTS | _LOCAL),
    "phimoe": _causal("Phimoe", EXPERTS | _LOCAL),
    "llama4": Member(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        LLAMA | _LOCAL | _HEADS | {"intermediate_size_mlp": 64, "interleave_moe_layer_step": 1},
    ),
    "ernie": _causal("Ernie4_5_Moe", EXPERTS | _NARROW, moe_num_experts=4, moe_k=2, moe_layer_start_index=0),
    "mixtral with its loss": _causal("Mixtral", EXPERTS | _LOCAL, output_router_logits=True),
    "glm4_moe": _causal("Glm4Moe", EXPERTS | _ROUTED | _NARROW | _HEADS | _GROUPED),
    "glm4_moe_lite": _causal("Glm4MoeLite", _LATENT),
    "deepseek_v2": _causal("DeepseekV2", _LATENT, topk_method="group_limited_greedy"),
    "qwen3_next": _causal(
        "Qwen3Next", EXPERTS | _FOUR | _NARROW | _HEADS | _ATTENTION, shared_expert_intermediate_size=32
    ),
    "hunyuan": _causal("HunYuanMoEV1", EXPERTS | _FOUR | _HEADS, moe_topk=2),
    "exaone_moe": _causal("ExaoneMoe", EXPERTS | _FOUR | _NARROW | _HEADS | _GROUPED),
    "jamba": _causal(
        "Jamba",
        EXPERTS | _FOUR,
        use_mamba_kernels=False,
        attn_layer_period=1,
        attn_layer_offset=0,
        expert_layer_period=1,
        expert_layer_offset=0,
    ),
    "minimax": _causal("MiniMax", EXPERTS | _LOCAL | _HEADS | _ATTENTION),
    "minimax_m2": _causal("MiniMaxM2", EXPERTS | _LOCAL | _HEADS),
    "lfm2_moe": _causal("Lfm2Moe", EXPERTS | _FOUR | _NARROW | _ATTENTION, num_dense_layers=0),
    "solar_open": _causal("SolarOpen", EXPERTS | _ROUTED | _NARROW | _HEADS),
    "granitemoeshared": _causal("GraniteMoeShared", EXPERTS | _LOCAL, shared_intermediate_size=32),
}


def build(name: str) -> nn.Module:
    """The model of a family, with weights, in train mode and without dropout."""
    return made(ZOO[name])


def made(member: Member) -> nn.Module:
    """The same of a family that is not in the zoo."""
    import transformers

    config = getattr(transformers, member.config)(**member.sizes)
    for key in vars(config):
        if key.endswith(("dropout", "drop", "pdrop", "drop_path_rate", "dropout_rate", "dropout_prob")) and isinstance(
            getattr(config, key), float
        ):
            setattr(config, key, 0.0)
    config.use_cache = False
    torch.manual_seed(0)
    return getattr(transformers, member.model)._from_config(config).train()


def batch(name: str) -> dict[str, Tensor]:
    """One microbatch; a few labels are ignored."""
    generator = torch.Generator().manual_seed(0)
    kind = ZOO[name].batch

    def ids(high: int, *shape: int) -> Tensor:
        return torch.randint(2, high, shape, generator=generator)

    if kind == "image":
        return {"pixel_values": torch.randn(BATCH, 3, 16, 16, generator=generator), "labels": ids(8, BATCH)}
    tokens = ids(VOCABULARY, BATCH, LENGTH)
    labels = ids(3, BATCH) if kind == "classes" else ids(VOCABULARY, BATCH, LENGTH)
    if kind == "tokens":
        labels[0, :2] = -100
    found = {"input_ids": tokens, "labels": labels}
    if kind in ("masked", "classes"):
        found["attention_mask"] = torch.ones_like(tokens)
        found["attention_mask"][1, -2:] = 0
    return found


def write_configs(directory: Path) -> list[Path]:
    """One directory with a config.json for each family: what a person would give as ``hf:DIR``."""
    import transformers

    found = []
    for name, member in ZOO.items():
        config = getattr(transformers, member.config)(**member.sizes)
        config.architectures = [member.model]
        config.save_pretrained(directory / name)
        found.append(directory / name)
    return found


if __name__ == "__main__":
    print("\n".join(f"hf:{path}" for path in write_configs(Path(sys.argv[1]))))
