"""How torch.export comes to record a Function with a backward of its own as one call.

    meshwright::own_backward(Tensor[] tensors, str key) -> Tensor[]

An op of PyTorch's dispatcher, so that every step of an export can handle it. ``key`` finds the OwnBackward
while a model is captured (``calls_recorded``), and is the same when the model is exported again. Canonical form
replaces the op by the OwnBackward itself, without the key.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from passes.program.ops.own_backward import OwnBackward

_CALLS: dict[str, OwnBackward] = {}
_LIBRARY = torch.library.Library("meshwright", "DEF")
_LIBRARY.define("own_backward(Tensor[] tensors, str key) -> Tensor[]")


@contextmanager
def calls_recorded() -> Iterator[None]:
    """Calls recorded within live as long as this."""
    before = dict(_CALLS)
    try:
        yield
    finally:
        _CALLS.clear()
        _CALLS.update(before)


def record(call: OwnBackward, tensors: list[Tensor]) -> Any:
    """The results of ``call``, as one call of the graph under export."""
    _CALLS[call.key] = call
    return call.returned(OWN_BACKWARD(tensors, call.key))


def recorded(key: str) -> OwnBackward:
    return _CALLS[key]


def _outputs(tensors: list[Tensor], key: str) -> list[Tensor]:
    return [output.empty() for output in _CALLS[key].made]


class GradientAsked(Exception):
    """The forward itself asks for a gradient through a Function with a backward of its own."""


def _refuse(context: Any, *gradients: Any) -> Any:
    raise GradientAsked(f"the forward computes a gradient through {context.name}, which has a backward of its own")


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.name = _CALLS[inputs[1]].__name__


torch.library.register_fake("meshwright::own_backward", _outputs, lib=_LIBRARY)
torch.library.impl("meshwright::own_backward", "CompositeExplicitAutograd", _outputs, lib=_LIBRARY)
torch.library.register_autograd("meshwright::own_backward", _refuse, setup_context=_remember, lib=_LIBRARY)
OWN_BACKWARD: Any = torch.ops.meshwright.own_backward.default
