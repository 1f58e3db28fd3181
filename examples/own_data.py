r"""A data loader of your own: torch.utils.data with the engine, alone or on several processes.

    python examples/own_data.py
    torchrun --nproc-per-node 2 examples/own_data.py

Each data-parallel rank loads its own rows and gives them with ``local=True``. Ranks of one replica (tp, pp) have the
same ``engine.mesh.dp_rank``, so their samplers give them the same rows.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from examples.gpt import GPT
from meshwright import Engine, plan

LENGTH, GLOBAL = 16, 8


class Sums(Dataset):
    """Sequences x, x + d, x + 2d, … modulo 97: any data set that gives dicts of tensors."""

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = (index + (index % 7 + 1) * torch.arange(LENGTH + 1)) % 97
        return {"input_ids": ids[:-1], "targets": ids[1:]}


def spec(num_replicas: int) -> dict:
    ids = {"shape": [LENGTH], "dtype": "int64", "high": 97}
    return {
        "mesh": {"dp": num_replicas},
        "batch": {"global": GLOBAL, "micro": 2},
        "inputs": {"input_ids": ids, "targets": {"like": "input_ids"}},
        "optimizer": {"lr": 3.0e-3},
    }


def train(num_epochs: int = 2) -> list[float]:
    """The loss of every step; the same on every rank, and for any number of them."""
    torch.manual_seed(0)
    model = GPT(vocabulary=97, length=LENGTH, width=32, num_layers=2, num_heads=2)
    decided = plan(model, spec(int(os.environ.get("WORLD_SIZE", "1"))))
    losses = []
    with Engine(decided) as engine:
        mesh, data = engine.mesh, Sums()
        sampler = DistributedSampler(data, num_replicas=mesh.dp, rank=mesh.dp_rank, seed=1, drop_last=True)
        loader = DataLoader(data, batch_size=GLOBAL // mesh.dp, sampler=sampler, drop_last=True)
        for epoch in range(num_epochs):
            sampler.set_epoch(epoch)  # another order each epoch
            for batch in loader:
                losses.append(engine.train_step(batch, local=True).loss)
    return losses


if __name__ == "__main__":
    found = train()
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"{len(found)} steps: loss {found[0]:.4f} → {found[-1]:.4f}")
