"""What no CUDA graph captures: calls that wait for the device, have no fixed shape, or run Python of their own.

Also a part that cannot run as one call: cut in two by a stage, or reading what was made of its own values outside.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from planner.decisions import Decisions
from planner.graph.ops.own_backward import OwnBackward

aten = torch.ops.aten
_DYNAMIC = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
Refusal = tuple[fx.Node, str]  # the first call that is in the way, and why


def refusal(nodes: Sequence[fx.Node], stage: int, decisions: Decisions) -> Refusal | None:
    """Why no graph captures a part of a block; None where one does."""
    for found in uncapturable(nodes):
        return found
    for node in nodes:
        if decisions.stages.stage_of[node.name] != stage:
            return node, f"{node.target} runs on another stage than the block begins on"
    returning = _comes_back(nodes)
    if returning is None:
        return None
    return returning, f"{returning.target} reads what left the region and was computed on outside"


def uncapturable(nodes: Iterable[fx.Node]) -> Iterator[Refusal]:
    """The calls that no graph captures, wherever they stand."""
    for node in nodes:
        if isinstance(node.target, OwnBackward):
            yield node, f"{node.target} is an autograd.Function of its own, which may do anything in Python"
        elif _waits(node):
            yield node, f"the shape that {node.target} gives depends on values: the host would wait for them"


def _waits(node: fx.Node) -> bool:
    """Whether the host needs a value of the device: an index that is a mask does, unless it fills with one number."""
    args: Any = node.args
    if node.target in (aten.index.Tensor, aten.index_put.default):
        return any(map(_is_mask, args[1])) and not _fills(node)
    if node.target is aten.one_hot.default:
        return (args[1:] or (-1,))[0] == -1
    return bool(_DYNAMIC & set(getattr(node.target, "tags", ())))


def _is_mask(index: Any) -> bool:
    return isinstance(index, fx.Node) and index.meta["val"].dtype in (torch.bool, torch.uint8)


def _fills(node: fx.Node) -> bool:
    args: Any = node.args
    return node.target is aten.index_put.default and args[2].meta["val"].numel() == 1 and args[3:] != (True,)


def _comes_back(nodes: Sequence[fx.Node]) -> fx.Node | None:
    """A node of the region that reads what others made of the region's values."""
    inside, outside = set(nodes), set[fx.Node]()
    node, last = nodes[0], nodes[-1]
    while node is not last.next:
        reads_outside = any(n in outside for n in node.all_input_nodes)
        if node in inside:
            if reads_outside:
                return node
        elif reads_outside or any(n in inside for n in node.all_input_nodes):
            outside.add(node)
        node = node.next
    return None
