"""Models that cannot be planned, each for one reason; a comment marks the line that must be named."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256  # bytes, so that `train` takes them too


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(32, VOCABULARY)

    def logits(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).flatten(0, 1)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(input_ids), labels.flatten())  # here, where an embedding is the reason


class Layer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(32, 32)

    def forward(self, input: Tensor) -> Tensor:
        return input + super().forward(input)


class BranchingLayer(Layer):
    def forward(self, input: Tensor) -> Tensor:
        if input.sum() > 0:  # here
            return -input
        return super().forward(input)


class Branch(Base):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = BranchingLayer()


class MaskedRows(Base):
    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        kept = labels.flatten() != -100
        mixed = self.logits(input_ids)[kept].cumsum(0)  # here
        return F.cross_entropy(mixed, labels.flatten()[kept])


class NumberInPython(Base):
    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        count = max((labels != -100).sum().item(), 1)  # here
        return F.cross_entropy(self.logits(input_ids), labels.flatten(), reduction="sum") / count


class Numpy(Base):
    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = torch.from_numpy(self.logits(input_ids).detach().numpy())  # here
        return F.cross_entropy(x, labels.flatten())


class HookedLayer(Layer):
    def forward(self, input: Tensor) -> Tensor:
        x = super().forward(input)
        x.register_hook(halved)  # here
        return x


def halved(gradient: Tensor) -> Tensor:  # here
    return gradient / 2


class TensorHook(Base):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = HookedLayer()


class ParameterHook(Base):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight.register_hook(halved)


class ModuleHook(Base):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] / 2,))  # here


class MaxNorm(Base):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32, max_norm=1.0)


class ScaledByFrequency(Base):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32, scale_grad_by_freq=True)


class NoLoss(Base):
    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"logits": self.logits(input_ids)}


class TwoLosses(Base):
    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.logits(input_ids)
        return {"main": F.cross_entropy(logits, labels.flatten()), "size": logits.pow(2).mean()}


class NoParameters(nn.Module):
    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return (input_ids - labels).float().mean()
