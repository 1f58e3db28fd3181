"""The model of the runs with experts: Mixtral of transformers unchanged, in a shape in which experts dominate.

2 layers, 256 wide, 16 experts 1024 wide, 2 for each token: 25.2 M of its 29.8 M parameters are experts'.
"""

import torch
from torch import Tensor, nn

from benchmarks.model import LENGTH, VOCABULARY, WIDTH

CONFIG = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 1024, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 4, "num_local_experts": 16, "num_experts_per_tok": 2,
    "max_position_embeddings": LENGTH,
}  # fmt: skip


class Mixtral(nn.Module):
    """``forward(tokens, targets)`` gives the loss."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import MixtralConfig, MixtralForCausalLM

        self.inner = MixtralForCausalLM(MixtralConfig(**CONFIG))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.inner(input_ids=tokens, labels=targets).loss


def build_experts() -> nn.Module:
    torch.manual_seed(1234)
    return Mixtral()
