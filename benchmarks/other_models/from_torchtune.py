"""Language models of the package torchtune."""

from __future__ import annotations

from typing import Any

from torch import nn

from benchmarks.other_models.heads import LanguageModel

SIZES: dict[str, Any] = {"vocab_size": 96, "num_layers": 2, "num_heads": 4, "embed_dim": 64, "max_seq_len": 32}


def llama3() -> nn.Module:
    from torchtune.models.llama3 import llama3 as build

    return LanguageModel(build(**SIZES, num_kv_heads=2, intermediate_dim=128))


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


def gemma() -> nn.Module:
    from torchtune.models.gemma import gemma as build

    return LanguageModel(build(**SIZES, num_kv_heads=1, head_dim=16, intermediate_dim=128))


def gemma2() -> nn.Module:
    from torchtune.models.gemma2 import gemma2 as build

    return LanguageModel(build(**SIZES, num_kv_heads=2, head_dim=16, intermediate_dim=128, sliding_window_size=8))


def qwen2() -> nn.Module:
    from torchtune.models.qwen2 import qwen2 as build

    return LanguageModel(build(**SIZES, num_kv_heads=2, intermediate_dim=128, tie_word_embeddings=True))


def mistral() -> nn.Module:
    from torchtune.models.mistral import mistral as build

    return LanguageModel(build(**SIZES, num_kv_heads=2, intermediate_dim=128))
