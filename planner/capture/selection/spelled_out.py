"""Questions of data that PyTorch answers in one op, asked as a branch would ask them.

torch.equal(a, b)          bool((a == b).all())
torch.allclose(a, b)       bool(isclose(a, b).all())
masked_select(x, mask)     x[mask], if both have one shape
bincount(x, minlength=n)   stack([(x == 0).sum(), …]), if every x is the index of one of n
ctc_loss(p, targets, …)    a loss for each sequence, then its reduction (planner.capture.selection.ctc)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental import proxy_tensor
from torch.overrides import TorchFunctionMode

from passes.program.known_values import node_of
from passes.program.ops.aten import aten, named, packet_of, shape_of
from passes.program.ops.groups import PERMUTES, RESHAPES, SAME
from planner.capture.selection.ctc import Refuse, Selected, spelled_ctc

MOST_ITEMS = 256


class SpelledOut(TorchFunctionMode):
    """While it is entered. ``refuse(what, fix)`` raises PlanError at the user's line."""

    def __init__(self, refuse: Refuse) -> None:
        super().__init__()
        self._selected, self._refuse = Selected(), refuse

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        spell = partial(spelled_ctc, self._selected, self._refuse) if name == "ctc_loss" else _SPELLED.get(name)
        is_traced = bool(args) and isinstance(args[0], FakeTensor)
        found = spell(*args, **kwargs) if spell is not None and is_traced else None
        made = func(*args, **kwargs) if found is None else found
        if name in _SELECTS and len(args) == 2 and isinstance(made, FakeTensor):
            self._selected.note(made, *args)
        return made


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and bool((a == b).all())


def _allclose(*args: Any, **kwargs: Any) -> bool:
    return bool(torch.isclose(*args, **kwargs).all())


def _masked_select(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor | None:
    return x[mask] if mask.shape == x.shape and mask.dtype == torch.bool else None


def _bincount(x: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> torch.Tensor | None:
    """None if a number of ``minlength`` or more would make the result longer."""
    mode = proxy_tensor.get_proxy_mode()
    node = node_of(x, mode.tracer) if mode is not None else None
    if weights is not None or not 0 < minlength <= MOST_ITEMS or node is None or not _is_index(node, minlength):
        return None
    return torch.stack([(x == i).sum() for i in range(minlength)])


def _is_index(node: fx.Node, size: int) -> bool:
    """Whether no value is ``size`` or more: places along a dim of at most that size."""
    while node.target in SAME | RESHAPES | PERMUTES:
        node = node.all_input_nodes[0]
    source = node.all_input_nodes[0] if node.all_input_nodes else None
    if source is None:
        return False
    if packet_of(node.target) is not aten.argmax:
        if node.target is not getitem or node.args[1] != 1:
            return False
        if packet_of(source.target) not in (aten.topk, aten.sort, aten.max, aten.min):
            return False
        node, source = source, source.all_input_nodes[0]
    dim = named(node).get("dim")
    return dim is not None and shape_of(source)[int(dim)] <= size


_SELECTS = ("masked_select", "__getitem__")
_SPELLED: dict[str, Callable[..., Any]] = {
    "equal": _equal,
    "allclose": _allclose,
    "bincount": _bincount,
    "masked_select": _masked_select,
    "_assert_async": lambda truth, message="": torch._assert(truth, message) or truth,
}
