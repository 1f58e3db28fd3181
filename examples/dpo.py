"""Direct Preference Optimization (Rafailov et al. 2023): a loss outside the model, over log-probabilities of labels.

    python examples/dpo.py
    torchrun --nproc-per-node 2 examples/dpo.py

Rows of a batch are chosen, rejected, chosen, …: each microbatch has whole pairs. The reference model is the policy
before its first step, so its log-probabilities are computed once, and no second model is held.
"""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
from torch import Tensor

from examples.gpt import GPT
from meshwright import Engine, plan

LENGTH, VOCABULARY, PAIRS, BETA = 16, 97, 8, 0.5


def batch_of(seed: int) -> dict[str, Tensor]:
    """Of each pair the chosen row counts up by one, the rejected one is random; targets of the prompt are ignored."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(VOCABULARY, (PAIRS, 1), generator=generator)
    chosen = (start + torch.arange(LENGTH + 1)) % VOCABULARY
    rejected = torch.randint(VOCABULARY, (PAIRS, LENGTH + 1), generator=generator)
    rejected[:, :4] = chosen[:, :4]  # the prompt
    rows = torch.stack([chosen, rejected], 1).flatten(0, 1)
    targets = rows[:, 1:].clone()
    targets[:, :3] = -100
    return {"input_ids": rows[:, :-1].contiguous(), "targets": targets}


def dpo_loss(log_probs: Tensor, rows: dict[str, Tensor]) -> Tensor:
    """log_probs [rows, length] of a microbatch: 0 where a target is ignored. Its values add up over the batch."""
    chosen, rejected = (log_probs - rows["reference"]).sum(-1).view(-1, 2).unbind(1)
    return -F.logsigmoid(BETA * (chosen - rejected)).sum() / PAIRS


def spec(num_ranks: int) -> dict:
    ids = {"shape": [LENGTH], "dtype": "int64", "high": VOCABULARY}
    return {
        "mesh": {"tp": num_ranks},
        "batch": {"global": 2 * PAIRS, "micro": 4},
        "inputs": {"input_ids": ids, "targets": {"like": "input_ids"}},
        "optimizer": {"lr": 1.0e-3},
    }


def train(num_epochs: int = 3) -> list[float]:
    """The loss of every step; the same on every rank, and for any layout."""
    torch.manual_seed(0)
    model = GPT(vocabulary=VOCABULARY, length=LENGTH, width=32, num_layers=2, num_heads=2)
    decided = plan(model, spec(int(os.environ.get("WORLD_SIZE", "1"))))
    with Engine(decided) as engine:
        batches = [batch_of(seed) for seed in range(3)]
        for batch in batches:
            batch["reference"] = engine.log_probs(batch)
        return [engine.train_step(batch, loss=dpo_loss).loss for _ in range(num_epochs) for batch in batches]


if __name__ == "__main__":
    found = train()
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"{len(found)} steps: loss {found[0]:.4f} → {found[-1]:.4f}")
