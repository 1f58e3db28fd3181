"""Language models of the package litgpt: one class, many configurations."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from benchmarks.other_models.heads import LanguageModel

SIZES: dict[str, Any] = {
    "n_layer": 2,
    "n_embd": 64,
    "n_head": 4,
    "block_size": 32,
    "vocab_size": 96,
    "padded_vocab_size": 96,
    "intermediate_size": 128,
    "head_size": 16,
}


def gpt(name: str, **changed: Any) -> nn.Module:
    from litgpt.config import Config
    from litgpt.model import GPT

    return LanguageModel(GPT(Config.from_name(name, **{**SIZES, **changed})))


pythia = partial(gpt, "pythia-14m")
llama3 = partial(gpt, "Llama-3.2-1B", n_query_groups=2)
gemma2 = partial(gpt, "Gemma-2-2b", n_query_groups=2, sliding_window_size=8)
falcon = partial(gpt, "falcon-7b", n_query_groups=1)
mixtral = partial(
    gpt, "Mixtral-8x7B-v0.1", n_query_groups=2, n_expert=4, n_expert_per_token=2, moe_intermediate_size=64
)
phi2 = partial(gpt, "phi-2", n_query_groups=4)
olmo2 = partial(gpt, "OLMo-2-1124-7B", n_query_groups=4)
