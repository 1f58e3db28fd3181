"""Group Relative Policy Optimization (Shao et al. 2024): rollouts of a generator that follows the policy.

    python examples/grpo.py
    torchrun --nproc-per-node 2 examples/grpo.py

The engine streams its weights to the generator, bucket by bucket; the generator answers each prompt several times. Each
answer is rewarded relative to the others of its group. The generator is a plain PyTorch model here, on rank 0.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor

from examples.gpt import GPT
from meshwright import Engine, plan

LENGTH, VOCABULARY, PROMPT = 12, 32, 4
NUM_PROMPTS, GROUP = 4, 8
CLIP, KL = 0.2, 0.02


def build() -> GPT:
    torch.manual_seed(0)
    return GPT(vocabulary=VOCABULARY, length=LENGTH, width=32, num_layers=2, num_heads=2)


@torch.no_grad()
def answers(generator: GPT, step: int) -> Tensor:
    """[prompts · group, length + 1]: each prompt with sampled answers, one group after the other."""
    draw = torch.Generator().manual_seed(step)
    prompts = torch.randint(VOCABULARY, (NUM_PROMPTS, PROMPT), generator=draw)
    rows = prompts.repeat_interleave(GROUP, 0)
    while rows.shape[1] <= LENGTH:
        logits, _ = generator(rows)
        rows = torch.cat([rows, torch.multinomial(logits[:, -1].softmax(-1), 1, generator=draw)], 1)
    return rows


def reward(rows: Tensor) -> Tensor:
    """[rows]: the share of even tokens in an answer."""
    return (rows[:, PROMPT:] % 2 == 0).float().mean(1)


def batch_of(rows: Tensor) -> dict[str, Tensor]:
    """``advantages`` [rows]: the reward within the group, normalized."""
    groups = reward(rows).view(NUM_PROMPTS, GROUP)
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    targets = rows[:, 1:].clone()
    targets[:, : PROMPT - 1] = -100  # the prompt is given, not chosen
    return {"input_ids": rows[:, :-1].contiguous(), "targets": targets, "advantages": advantages.flatten()}


def grpo_loss(log_probs: Tensor, rows: dict[str, Tensor]) -> Tensor:
    """The clipped gain of each token of an answer, less its divergence from the policy that answered."""
    ratio, gain = (log_probs - rows["old"]).exp(), rows["advantages"].unsqueeze(1)
    clipped = torch.minimum(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain)
    behind = rows["old"] - log_probs
    tokens = (clipped - KL * (behind.exp() - behind - 1)) * (rows["targets"] != -100)
    return -tokens.sum() / (NUM_PROMPTS * GROUP * (LENGTH - PROMPT + 1))


def spec(num_ranks: int) -> dict:
    ids = {"shape": [LENGTH], "dtype": "int64", "high": VOCABULARY}
    return {
        "mesh": {"tp": num_ranks},
        "batch": {"global": NUM_PROMPTS * GROUP, "micro": GROUP},
        "inputs": {"input_ids": ids, "targets": {"like": "input_ids"}},
        "optimizer": {"lr": 3.0e-3},
    }


def train(num_rounds: int = 10, updates: int = 2) -> list[float]:
    """The mean reward of each round, on every rank; the same for any layout."""
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    rewards = []
    with Engine(plan(build(), spec(num_ranks))) as engine:
        generator = build()
        for step in range(num_rounds):
            engine.stream_weights(lambda bucket: generator.load_state_dict(bucket, strict=False), names="model")
            rows = answers(generator, step)
            if num_ranks > 1:
                dist.broadcast(rows, 0)  # rank 0's generator has the weights
            batch = batch_of(rows)
            batch["old"] = engine.log_probs(batch)
            for _ in range(updates):
                engine.train_step(batch, loss=grpo_loss)
            rewards.append(reward(rows).mean().item())
    return rewards


if __name__ == "__main__":
    found = train()
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"{len(found)} rounds: reward {found[0]:.3f} → {found[-1]:.3f}")
