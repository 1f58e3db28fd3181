"""DPO (Rafailov et al. 2023) with LoRA: the reference is the base without its adapters, so one model is held. A row of
ids and labels [pairs, 2, length] is a pair, chosen then rejected; labels are -100 outside of the answer. Needs peft.

    meshwright verify examples/dpo_lora.py:build examples/dpo_lora.yaml
    meshwright train examples/dpo_lora.py:build SPEC --data FILE    # of prepare --chosen FIELD --rejected FIELD
"""

import peft
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM


class DPO(torch.nn.Module):
    def __init__(self, policy: torch.nn.Module, beta: float = 0.1) -> None:
        super().__init__()
        self.policy, self.beta = policy, beta

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        def answers() -> torch.Tensor:  # log P of each answer, [pairs, 2]
            logits, wanted = self.policy(input_ids.flatten(0, 1)).logits[:, :-1], labels.flatten(0, 1)[:, 1:]
            return -F.cross_entropy(logits.transpose(1, 2), wanted, reduction="none").sum(-1).view(-1, 2)

        with torch.no_grad(), self.policy.disable_adapter():
            reference = answers()
        chosen, rejected = (answers() - reference).unbind(1)
        return -F.logsigmoid(self.beta * (chosen - rejected)).mean()


def build() -> DPO:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=97, **sizes))
    return DPO(peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"])))
