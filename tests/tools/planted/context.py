"""Faults of the exchanges over cp: keys and values gathered, their gradients scattered, chunks in zigzag."""

from typing import Any

import torch
from torch import Tensor

from passes.ops import context, flash, gathered_attention
from passes.ops.context import local_rows
from tests.tools.planted.fault import Fault, Function, on_other_axis


def _own_again(tensors: Any, dim: int, axis: Any, phase: str) -> list[Tensor]:
    return [torch.cat([x] * axis.size, dim) for x in tensors]


def _own_chunks(tensors: Any, dim: int, axis: Any, phase: str) -> list[Tensor]:
    return [local_rows(x, dim, axis) for x in tensors]


def _twice(whole: Function) -> Function:
    return lambda *args, **named: [2 * x for x in whole(*args, **named)]


def _on_wrong_axis(whole: Function) -> Function:
    return lambda tensors, dim, axis, phase: whole(tensors, dim, on_other_axis(axis), phase)


def _one_on_wrong_axis(whole: Function) -> Function:
    return lambda x, dim, axis, phase: whole(x, dim, on_other_axis(axis), phase)


def _chunks_as_they_come(parts: Tensor, dim: int, axis: Any) -> Tensor:
    return torch.cat(list(parts.unbind(0)), dim)


def _last_part_alone(parts: Any) -> Any:
    """Keys before a chunk are forgotten."""
    return parts[-1]


FAULTS = {
    "attention: all-gather of keys left out": Fault(
        gathered_attention, "gathered_together", lambda whole: _own_again, seed=177
    ),
    "attention: all-gather of keys on the wrong axis": Fault(
        gathered_attention, "gathered_together", _on_wrong_axis, seed=216
    ),
    "attention: reduce-scatter of gradients of keys left out": Fault(
        gathered_attention, "scattered_sums", lambda whole: _own_chunks, seed=0
    ),
    "attention: reduce-scatter of gradients of keys doubled": Fault(
        gathered_attention, "scattered_sums", _twice, seed=0
    ),
    "attention: reduce-scatter of gradients of keys on the wrong axis": Fault(
        gathered_attention, "scattered_sums", _on_wrong_axis, seed=69
    ),
    "attention: keys before a chunk left out": Fault(flash, "merged", lambda whole: _last_part_alone, seed=177),
    "sequence: chunks in the order of ranks": Fault(context, "_in_order", lambda whole: _chunks_as_they_come, seed=0),
    "sequence: all-gather left out": Fault(
        context, "gathered", lambda whole: lambda x, dim, axis, phase: torch.cat([x] * axis.size, dim), seed=30
    ),
    "sequence: reduce-scatter of the gradient left out": Fault(
        context, "scattered_sum", lambda whole: lambda x, dim, axis, phase: local_rows(x, dim, axis), seed=30
    ),
    "sequence: reduce-scatter of the gradient doubled": Fault(
        context, "scattered_sum", lambda whole: lambda *args, **named: 2 * whole(*args, **named), seed=30
    ),
    "sequence: reduce-scatter of the gradient on the wrong axis": Fault(
        context, "scattered_sum", _one_on_wrong_axis, seed=1492
    ),
    "products of what is gathered: reduce-scatter of the gradient left out": Fault(
        gathered_attention, "scattered_sum", lambda whole: lambda x, dim, axis, phase: local_rows(x, dim, axis), seed=35
    ),
    "products of what is gathered: all-gather in the backward left out": Fault(
        gathered_attention,
        "gathered",
        lambda whole: (
            lambda x, dim, axis, phase: (
                torch.cat([x] * axis.size, dim) if phase == "backward" else whole(x, dim, axis, phase)
            )
        ),
        seed=35,
    ),
}
