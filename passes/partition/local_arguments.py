"""The arguments of an op that computes a rank's part, over cp or tp: sizes and bounds are those of its part.

reshape, expand, full   sizes of the local result
split, slice            bounds in the local row of segments
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from passes.partition.options.base import Option
from passes.partition.options.forms import Form
from passes.partition.options.layout import pieces_of
from passes.program.ops.aten import shape_of
from passes.types.types import Placement


def local_arguments(node: fx.Node, option: Option, size: int) -> list[Any]:
    """The arguments of ``node``, of the full program, for one rank."""
    change = CHANGES.get(option.form)
    return change(node, option, size) if change else list(node.args)


def _sizes(node: fx.Node, option: Option, size: int) -> list[Any]:
    args, place = list(node.args), 1 if node.all_input_nodes else 0
    if option.out.is_sharded:
        args[place] = list(option.out.local_shape(shape_of(node), size))
    return args


def _split(node: fx.Node, option: Option, size: int) -> list[Any]:
    args: list[Any] = list(node.args)
    if option.out.is_sharded and option.out.dim == args[2]:
        args[1] = _local_sizes(option.out, args[1], size)
    return args


def _segment(node: fx.Node, option: Option, size: int) -> list[Any]:
    args: list[Any] = list(node.args)
    whole = sum(option.args[0].sizes)
    before, length, _ = _local_sizes(option.args[0], [args[2], args[3] - args[2], whole - args[3]], size)
    args[2:4] = before, before + length
    return args


def _strided(node: fx.Node, option: Option, size: int) -> list[Any]:
    args: list[Any] = list(node.args)
    args[3] = option.args[0].local_size(size)
    return args


def _local_sizes(cut: Placement, sizes: list[int], size: int) -> list[int]:
    pieces = pieces_of(cut, sizes)
    assert pieces is not None
    return [p.local_size(size) if p.is_sharded else n for p, n in zip(pieces, sizes, strict=True)]


CHANGES: dict[Form, Callable[[fx.Node, Option, int], list[Any]]] = {
    Form.SIZES: _sizes,
    Form.SPLIT: _split,
    Form.SEGMENT: _segment,
    Form.STRIDED: _strided,
}
