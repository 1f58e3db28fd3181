"""Faults of experts: rows and slots on their way to other ranks and back, partial results, experts that rest."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from passes.ops import experts, slots, tokens
from passes.ops.axis import has_values
from runtime.optimizer.flat import FlatOptimizer
from tests.tools.planted.fault import Fault, Function, on_other_axis


def rows_stay(way: str, over: tuple[str, ...] = ("ep", "etp")) -> Any:
    """Of ``phase`` ``way``, over one of these axes: rows of other ranks are these, as many as should come."""

    def make(whole: Function) -> Function:
        def move(rows: Tensor, splits: Any, axis: Any, phase: str) -> Tensor:
            if phase != way or axis.size == 1 or axis.name not in over:
                return whole(rows, splits, axis, phase)
            return _as_many(rows, sum(splits.sent if whole.__name__ == "_return" else splits.received))

        return move

    return make


def _as_many(rows: Tensor, num_rows: int) -> Tensor:
    return torch.cat([rows, rows.new_zeros(max(0, num_rows - len(rows)), *rows.shape[1:])])[:num_rows]


def _in_reverse(whole: Function) -> Function:
    """What comes stands in the order of ranks from the last to the first."""

    def move(rows: Tensor, splits: Any, axis: Any, phase: str) -> Tensor:
        return whole(rows, splits, axis, phase).flip(0) if axis.size > 1 else whole(rows, splits, axis, phase)

    return move


def one_part(rows: Tensor, splits: Any, axis: Any, phase: str) -> Tensor:
    came = experts._return(rows, splits, axis, phase)
    return came.view(axis.size, splits.sent[0], *rows.shape[1:])[axis.rank].clone()


def _slots_stay(x: Tensor, axis: Any, split: int, joined: int, phase: str) -> Tensor:
    return torch.cat(x.chunk(axis.size, split), joined)


def _slots_twice(x: Tensor, axis: Any, split: int, joined: int, phase: str) -> Tensor:
    sent = torch.stack(x.chunk(axis.size, split))
    first, second = torch.empty_like(sent), torch.empty_like(sent)
    if has_values(x):
        dist.all_to_all_single(first, sent, group=axis.group)
        dist.all_to_all_single(second, first.flip(0).contiguous(), group=axis.group)
    return torch.cat(second.unbind(0), joined)


def _slots_on_wrong_axis(whole: Function) -> Function:
    return lambda x, axis, **named: whole(x, on_other_axis(axis), **named)


def _none_rests(whole: Function) -> Function:
    def step(self: Any, lr: float, scale: Any, found_inf: Tensor, asked: Any) -> None:
        whole(self, lr, scale, found_inf, None if asked is None else asked + 1)

    return step


def tokens_stay(*ways: str) -> Any:
    """Of these phases."""

    def make(whole: Function) -> Function:
        def move(rows: Tensor, sent: list[int], received: list[int], axis: Any, phase: str, **how: bool) -> Tensor:
            if phase not in ways or not rows.dtype.is_floating_point or axis.size == 1:
                return whole(rows, sent, received, axis, phase, **how)
            return _as_many(rows, sum(received))

        return move

    return make


def one_of_the_rows(rows: Tensor, places: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    return rows.new_zeros(size, *rows.shape[1:]).index_put_((places,), rows).to(dtype)


FAULTS = {
    "rows of experts: all-to-all left out": Fault(experts, "_send", rows_stay("forward"), seed=122),
    "rows of experts: all-to-all back left out": Fault(experts, "_return", rows_stay("forward"), seed=3),
    "rows of experts: all-to-all of gradients left out": Fault(experts, "_return", rows_stay("backward"), seed=122),
    "rows of experts: in the wrong order": Fault(experts, "_send", _in_reverse, seed=122),
    "tokens of experts: all-to-all left out": Fault(tokens, "exchanged", tokens_stay("forward", "backward"), seed=122),
    "tokens of experts: sum left out": Fault(tokens, "_summed", lambda whole: one_of_the_rows, seed=122),
    "rows of experts: sum of parts over etp left out": Fault(experts, "_sum_of_parts", lambda whole: one_part, seed=3),
    "rows of experts: sum of parts over etp doubled": Fault(
        experts, "_sum_of_parts", lambda whole: lambda *args: 2 * whole(*args), seed=3
    ),
    "slots of experts: all-to-all left out": Fault(slots, "_exchanged", lambda whole: _slots_stay, seed=827),
    "slots of experts: all-to-all doubled": Fault(slots, "_exchanged", lambda whole: _slots_twice, seed=827),
    "slots of experts: all-to-all on the wrong axis": Fault(slots, "_exchanged", _slots_on_wrong_axis, seed=64071),
    "slots of experts: the share of another tp rank": Fault(
        slots, "placed", lambda whole: lambda own, dim, tp, size: whole(own, dim, tp, size).flip(dim), seed=12891
    ),
    "experts without tokens are updated": Fault(FlatOptimizer, "step", _none_rests, seed=182),
}
