"""The code that users write around a model that returns logits or images: a module that computes the loss.

vit = build(Classifier, "vit_pytorch:ViT", dim=64, depth=2)     # vit() is Classifier(ViT(dim=64, depth=2))
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F


def build(head: Callable[[nn.Module], nn.Module], where: str, *args: Any, **sizes: Any) -> Callable[[], nn.Module]:
    """A builder without arguments: ``head`` around the model that ``where``, package.module:name, makes of the rest.
    The package is imported when it is called.
    """

    def builder() -> nn.Module:
        return head(made(where, *args, **sizes))

    return builder


def made(where: str, *args: Any, **sizes: Any) -> Any:
    module, name = where.split(":")
    return getattr(import_module(module), name)(*args, **sizes)


class LanguageModel(nn.Module):
    """Cross-entropy of the next-token logits; ``call`` calls the model, unless it takes the ids alone."""

    def __init__(self, net: nn.Module, call: Callable[[nn.Module, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.net = net
        self.call = call

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.net(input_ids) if self.call is None else self.call(self.net, input_ids)
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))


class Classifier(nn.Module):
    """Cross-entropy of one label a sample."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.net(images), labels)


class Regression(nn.Module):
    """Mean squared error to ``target``; every other input is the model's own argument."""

    def __init__(self, net: nn.Module, output: Callable[[Any], Tensor] | None = None) -> None:
        super().__init__()
        self.net = net
        self.output = output

    def forward(self, target: Tensor, **inputs: Tensor) -> Tensor:
        predicted = self.net(**inputs)
        return F.mse_loss(predicted if self.output is None else self.output(predicted), target)


class OwnLoss(nn.Module):
    """The network computes the loss itself; ``more``: the arguments that make it do so."""

    def __init__(self, net: nn.Module, **more: Any) -> None:
        super().__init__()
        self.net, self.more = net, more

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.net(input_ids, **self.more)
