"""Questions of data that PyTorch answers in one op, asked as a branch would ask them.

torch.equal(a, b)          bool((a == b).all())
torch.allclose(a, b)       bool(isclose(a, b).all())
bincount(x, minlength=n)   stack([(x == 0).sum(), …]), where every x is the index of one of n
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental import proxy_tensor
from torch.overrides import TorchFunctionMode

from planner.capture.known_values import node_of
from planner.capture.selection.space import PERMUTES, RESHAPES, SAME
from planner.graph.ops.aten import aten, named, packet_of, shape_of

MOST_ITEMS = 256


class SpelledOut(TorchFunctionMode):
    """While it is entered."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        spell = _SPELLED.get(getattr(func, "__name__", ""))
        if spell is not None and args and isinstance(args[0], FakeTensor):
            found = spell(*args, **(kwargs or {}))
            return func(*args, **(kwargs or {})) if found is None else found
        return func(*args, **(kwargs or {}))


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and bool((a == b).all())


def _allclose(*args: Any, **kwargs: Any) -> bool:
    return bool(torch.isclose(*args, **kwargs).all())


def _bincount(x: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> torch.Tensor | None:
    """None where a number of ``minlength`` or more would make the result longer."""
    mode = proxy_tensor.get_proxy_mode()
    node = node_of(x, mode.tracer) if mode is not None else None
    if weights is not None or not 0 < minlength <= MOST_ITEMS or node is None or not _is_index(node, minlength):
        return None
    return torch.stack([(x == i).sum() for i in range(minlength)])


def _is_index(node: fx.Node, size: int) -> bool:
    """Whether no value is ``size`` or more: places along a dim of at most that size."""
    while packet_of(node.target) in SAME | RESHAPES | PERMUTES:
        node = node.all_input_nodes[0]
    source = node.all_input_nodes[0] if node.all_input_nodes else None
    if source is None:
        return False
    if packet_of(node.target) is not aten.argmax:
        if node.target is not getitem or node.args[1] != 1 or packet_of(source.target) not in _PLACES:
            return False
        node, source = source, source.all_input_nodes[0]
    dim = named(node).get("dim")
    return dim is not None and shape_of(source)[int(dim)] <= size


_PLACES = (aten.topk, aten.sort, aten.max, aten.min)
_SPELLED: dict[str, Callable[..., Any]] = {
    "equal": _equal,
    "allclose": _allclose,
    "bincount": _bincount,
    "_assert_async": lambda truth, message="": torch._assert(truth, message) or truth,
}
