"""Questions of data that PyTorch answers in one op, asked as a branch would ask them.

torch.equal(a, b)          bool((a == b).all())
torch.allclose(a, b)       bool(isclose(a, b).all())
masked_select(x, mask)     x[mask], both expanded to one shape
take_along_dim(x, i, d)    x.gather(d, i), if all other dims are known to be equal, or depend on data
bincount(x, minlength=n)   stack([(x == 0).sum(), …]), if every x is the index of one of n

``F.ctc_loss``, which makes a tensor with a data-dependent size, is one loss for each sequence, then its reduction:

ctc_loss(p, targets [b, s], …)                                 ctc_losses(p, targets, …)
ctc_loss(p, labels[mask], …, mask.sum(-1))                     ctc_losses(p, the selected of each row first, …)
reduction = mean                                               (losses / target_lengths.clamp(min=1)).mean()
"""

from collections.abc import Callable, Sequence
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental import proxy_tensor
from torch.overrides import TorchFunctionMode

from passes.program.known_values import node_of
from passes.program.ops.aten import aten, named, packet_of, shape_of
from passes.program.ops.ctc import ctc_losses
from passes.program.ops.groups import PERMUTES, RESHAPES, SAME

MOST_ITEMS = 256
_SELECTS = ("masked_select", "__getitem__")
_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}
FIX = (
    "give ctc_loss targets [batch, length] and a tensor of their lengths, "
    "or labels[mask] of labels [batch, length] and mask.sum(-1)"
)
Refuse = Callable[[str, str], Any]


class SpelledOut(TorchFunctionMode):
    """Replaces such calls while it is active. ``refuse(what, fix)`` raises PlanError at the user's line.

    Owns the selections by masks in this export: the result, its source and its mask.
    """

    def __init__(self, refuse: Refuse) -> None:
        super().__init__()
        self._selected: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._refuse = refuse

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        spell = self._ctc if name == "ctc_loss" else _SPELLED.get(name)
        is_traced = bool(args) and isinstance(args[0], FakeTensor)
        found = spell(*args, **kwargs) if spell is not None and is_traced else None
        made = func(*args, **kwargs) if found is None else found
        if name in _SELECTS and len(args) == 2 and isinstance(made, FakeTensor):
            self._note(made, *args)
        return made

    def _note(self, made: Tensor, source: Any, mask: Any) -> None:
        if isinstance(source, Tensor) and isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.dim() == 2:
            self._selected[id(made)] = made, source, mask

    def _ctc(
        self,
        log_probs: Tensor,
        targets: Tensor,
        input_lengths: Tensor | Sequence[int],
        target_lengths: Tensor | Sequence[int],
        blank: int = 0,
        reduction: str | int = "mean",
        zero_infinity: bool = False,
    ) -> Tensor | None:
        """Return None for one sequence without a batch, which is left to PyTorch."""
        if log_probs.dim() != 3:
            return None
        given, lengths = _tensor(input_lengths, log_probs), _tensor(target_lengths, log_probs)
        rows = targets if targets.dim() == 2 else self._in_rows(targets, lengths)
        if rows is None:
            self._refuse("ctc_loss gets the targets of all sequences in one row, with data-dependent ends", FIX)
        losses = ctc_losses(log_probs, rows, given, lengths, blank, zero_infinity)
        how = _REDUCTIONS[reduction] if isinstance(reduction, str) else reduction
        if how == _REDUCTIONS["none"]:
            return losses
        return losses.sum() if how == _REDUCTIONS["sum"] else (losses / lengths.clamp(min=1)).mean()

    def _in_rows(self, made: Tensor, lengths: Tensor) -> Tensor | None:
        """Return the selected of each row before the others; None if ``lengths`` do not count them."""
        found = self._selected.get(id(made))
        if found is None or found[1].shape != found[2].shape or not _counts(lengths, found[2]):
            return None
        return found[1].gather(1, (~found[2]).long().argsort(dim=1, stable=True))


def _bincount(x: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> torch.Tensor | None:
    """Return None if a number of ``minlength`` or more would make the result longer."""
    mode = proxy_tensor.get_proxy_mode()
    node = node_of(x, mode.tracer) if mode is not None else None
    if weights is not None or not 0 < minlength <= MOST_ITEMS or node is None or not _is_index(node, minlength):
        return None
    return torch.stack([(x == i).sum() for i in range(minlength)])


def _is_index(node: fx.Node, size: int) -> bool:
    """Return whether no value is ``size`` or more: positions along a dim of at most that size."""
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


def _taken(x: Tensor, indices: Tensor, dim: int | None = None) -> Tensor | None:
    """Return None if one may be broadcast along a dim of the other."""
    if dim is None or x.dim() != indices.dim():
        return None
    pairs = zip(x.shape, indices.shape, strict=True)
    alike = (type(a) is type(b) and (isinstance(a, torch.SymInt) or a == b) for a, b in pairs)
    is_alike = all(same or d == dim % x.dim() for d, same in enumerate(alike))
    return x.gather(dim, indices) if is_alike else None


def _masked_select(x: Tensor, mask: Tensor) -> Tensor | None:
    if mask.dtype != torch.bool:
        return None
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    return x.expand(shape)[mask.expand(shape)]


_SPELLED: dict[str, Callable[..., Any]] = {
    "equal": lambda a, b: a.shape == b.shape and bool((a == b).all()),
    "allclose": lambda *args, **kwargs: bool(torch.isclose(*args, **kwargs).all()),
    "bincount": _bincount,
    "take_along_dim": _taken,
    "masked_select": _masked_select,
    "_assert_async": lambda truth, message="": torch._assert(truth, message) or truth,
}


def _tensor(lengths: Tensor | Sequence[int], like: Tensor) -> Tensor:
    return lengths if isinstance(lengths, Tensor) else torch.tensor(list(lengths), device=like.device)


def _counts(lengths: Tensor, mask: Tensor) -> bool:
    """Return whether ``lengths`` are ``mask.sum(-1)``."""
    mode = proxy_tensor.get_proxy_mode()
    sums, rows = (_made_by(node_of(t, mode.tracer)) if mode is not None else None for t in (lengths, mask))
    if sums is None or sums.target is not aten.sum.dim_IntList or list(sums.args[1]) not in ([-1], [1]):  # pyright: ignore
        return False
    return _made_by(sums.args[0]) is rows


def _made_by(node: Any) -> fx.Node | None:
    """Return the call behind casts and copies."""
    while isinstance(node, fx.Node) and node.target in SAME:
        node = node.all_input_nodes[0]
    return node if isinstance(node, fx.Node) else None
