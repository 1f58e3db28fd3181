"""Models with weights that are computed in the forward, whatever the model: cast, squashed, normed."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn.utils import parametrize

Change = Callable[[Tensor], Tensor]


class _Changed(nn.Module):
    def __init__(self, change: Change) -> None:
        super().__init__()
        self.change = change

    def forward(self, weight: Tensor) -> Tensor:
        return self.change(weight)


def squashed(weight: Tensor) -> Tensor:
    return weight.tanh()


def normed(weight: Tensor) -> Tensor:
    """Each row, or each matrix of a stack, by its own size."""
    dims = tuple(range(1, weight.dim()))
    return weight / weight.float().square().sum(dims, keepdim=True).sqrt().to(weight.dtype)


def cast(weight: Tensor) -> Tensor:
    """Through a wider dtype."""
    return (weight.float() * 0.5).to(weight.dtype)


def change_weights(model: nn.Module, change: Change) -> nn.Module:
    """``model``, with every matrix and stack in it computed from its parameter, but for embeddings."""
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.dim() > 1 and not isinstance(module, nn.Embedding):
                parametrize.register_parametrization(module, name, _Changed(change))
    return model
