"""Hand the weights on while you train: a reader loads safetensors, bucket by bucket, as they appear.

    python examples/stream_weights.py

``Reader`` stands for an inference server: it knows a directory and the names of the model, nothing of the training.
The engine writes a file for each bucket, and an index last. If vLLM is installed, ``for_vllm`` gives it the same
tensors without a directory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from examples.gpt import GPT
from meshwright import Engine, plan

LENGTH, VOCABULARY = 16, 97
INDEX = "model.safetensors.index.json"


class Reader:
    """A model that takes weights from a directory, one tensor in memory at a time."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.num_files = model, 0

    @torch.no_grad()
    def load(self, directory: Path) -> None:
        own = self.model.state_dict()
        places = json.loads((directory / INDEX).read_text())["weight_map"]
        for name in sorted(set(places.values())):
            with safe_open(str(directory / name), framework="pt") as file:
                for key in file.keys():  # noqa: SIM118
                    own[key].copy_(file.get_tensor(key))
            self.num_files += 1


def for_vllm(llm: Any) -> Callable[[dict[str, Tensor]], object]:
    """A function for ``engine.stream_weights``: vLLM's own loader takes pairs of name and full tensor."""

    def take(bucket: dict[str, Tensor]) -> object:
        pairs: Iterable[tuple[str, Tensor]] = bucket.items()
        return llm.apply_model(lambda model: model.load_weights(pairs))

    return take


def spec() -> dict:
    ids = {"shape": [LENGTH], "dtype": "int64", "high": VOCABULARY}
    return {
        "mesh": {"tp": 1},
        "batch": {"global": 8, "micro": 4},
        "inputs": {"input_ids": ids, "targets": {"like": "input_ids"}},
        "optimizer": {"lr": 3.0e-3},
    }


def build() -> GPT:
    torch.manual_seed(0)
    return GPT(vocabulary=VOCABULARY, length=LENGTH, width=32, num_layers=2, num_heads=2)


def train(num_rounds: int = 3) -> list[tuple[float, float]]:
    """(loss of the engine, loss of the reader) on one batch after each round: the same weights."""
    found = []
    ids = (torch.arange(8).unsqueeze(1) + torch.arange(LENGTH + 1)) % VOCABULARY
    batch = {"input_ids": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous()}
    with Engine(plan(build(), spec())) as engine, TemporaryDirectory() as directory:
        reader = Reader(build())
        for _ in range(num_rounds):
            engine.train_step(batch)
            engine.stream_weights(directory, bucket_bytes=20_000)
            reader.load(Path(directory))
            with torch.no_grad():
                _, loss = reader.model(**batch)
            found.append((engine.evaluate(batch), loss.item()))
    return found


if __name__ == "__main__":
    for ours, theirs in train():
        print(f"loss of the engine {ours:.5f}, of the reader {theirs:.5f}")
