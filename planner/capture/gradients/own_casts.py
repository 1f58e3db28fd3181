"""A forward that casts or moves modules of its own: no effect if they are of that dtype and device already.

    self.router = self.router.to(torch.float32)     of float32 weights: no effect
                                                    of others: PlanError, since the first forward changes them for good

PyTorch replaces the weights by the results of a cast, in a way that fails while these are exchanged for an export.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from torch import Tensor, nn

from planner.capture.model.exchange import storage_of

_FIX = "cast at the use (`F.linear(x, self.weight.to(x.dtype))`), or give the weights that dtype before planning"


def watched_cast(
    original: Callable[..., Any], model_of: Callable[[], nn.Module | None], refuse: Callable[[str, str], NoReturn]
) -> Callable[..., Any]:
    """Replaces ``nn.Module._apply``. ``model_of``: the model with a running forward; None outside of the watch."""

    def _apply(module: nn.Module, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
        model = model_of()
        prefix = None if model is None else _name_of(module, model)
        if prefix is None:
            return original(module, fn, *args, **kwargs)
        for name, tensor in _tensors(module):
            made = fn(tensor)
            if made is not tensor and storage_of(made) != storage_of(tensor):
                refuse(f"the forward casts or moves its own {prefix}{name}: {_change(tensor, made)}", _FIX)
        return module

    return _apply


def _name_of(module: nn.Module, model: nn.Module) -> str | None:
    """The prefix of the names of a module's weights; None for one that is not the model's (``CallSites``)."""
    names = (name for name, inner in model.named_modules() if vars(inner) is vars(module))
    return next((f"{name}." if name else "" for name in names), None)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _change(before: Tensor, after: Tensor) -> str:
    pairs = ((before.dtype, after.dtype), (before.device, after.device), (tuple(before.shape), tuple(after.shape)))
    return next((f"from {a} to {b}" for a, b in pairs if a != b), "into other memory")
