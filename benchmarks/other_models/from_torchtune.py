"""Language models of the package torchtune."""

from __future__ import annotations

from typing import Any

from torch import nn

from benchmarks.other_models.heads import LanguageModel, build

SIZES: dict[str, Any] = {"vocab_size": 96, "num_layers": 2, "num_heads": 4, "embed_dim": 64, "max_seq_len": 32}

llama3 = build(LanguageModel, "torchtune.models.llama3:llama3", **SIZES, num_kv_heads=2, intermediate_dim=128)
gemma = build(LanguageModel, "torchtune.models.gemma:gemma", **SIZES, num_kv_heads=1, head_dim=16, intermediate_dim=128)
gemma2 = build(
    LanguageModel,
    "torchtune.models.gemma2:gemma2",
    **SIZES,
    num_kv_heads=2,
    head_dim=16,
    intermediate_dim=128,
    sliding_window_size=8,
)
qwen2 = build(
    LanguageModel,
    "torchtune.models.qwen2:qwen2",
    **SIZES,
    num_kv_heads=2,
    intermediate_dim=128,
    tie_word_embeddings=True,
)
mistral = build(LanguageModel, "torchtune.models.mistral:mistral", **SIZES, num_kv_heads=2, intermediate_dim=128)


def llama2_lora() -> nn.Module:
    """Frozen weights with trained low-rank ones beside them."""
    from torchtune.models.llama2 import lora_llama2
    from torchtune.modules.peft import get_adapter_params, set_trainable_params

    net = lora_llama2(["q_proj", "v_proj"], apply_lora_to_mlp=True, **SIZES, num_kv_heads=4, lora_rank=4, lora_alpha=8)
    set_trainable_params(net, get_adapter_params(net))
    for name, parameter in net.named_parameters():
        if "lora_b" in name:  # zero at first: then half of the gradients are
            nn.init.normal_(parameter, std=0.02)
    return LanguageModel(net)
