"""Where the batch stands in a captured graph: which dims, and which plain numbers, grow with the number of sequences.

A graph is captured at one size, and there a size looks like any other number: ``loss.sum() / 8`` may divide by the
batch or by a constant. A second capture, of twice as many sequences, tells: what changes along is the batch. It costs
as much as the first, so it is made only for losses that leave a doubt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

TIMES = 2


@dataclass(frozen=True)
class BatchDims:
    """``dims``: node name → dims that hold the batch.

    ``powers``: (node name, argument) → 1 for a number in proportion to the batch, -1 for one in inverse proportion,
    None for one that changes otherwise; constants are not in it.
    """

    dims: dict[str, frozenset[int]]
    powers: dict[tuple[str, int], int | None]


def wider(inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same inputs for TIMES as many sequences, without memory."""
    return {name: torch.empty((TIMES * t.shape[0], *t.shape[1:]), dtype=t.dtype, device="meta")
            for name, t in inputs.items()}


def compare_captures(first: fx.Graph, second: fx.Graph) -> BatchDims:
    """What differs between two captures of one model, the second with TIMES as many sequences."""
    others = {node.name: node for node in second.nodes}
    dims: dict[str, frozenset[int]] = {}
    powers: dict[tuple[str, int], int | None] = {}
    for node in first.nodes:
        other = others.get(node.name)
        if other is None or node.target != other.target:
            continue
        changed = _changed_dims(node, other)
        if changed is not None:
            dims[node.name] = changed
        for position, (a, b) in enumerate(zip(node.args, other.args, strict=False)):
            if is_number(a) and is_number(b) and a != b:
                powers[node.name, position] = _power(a, b)
    return BatchDims(dims, powers)


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _changed_dims(node: fx.Node, other: fx.Node) -> frozenset[int] | None:
    a, b = node.meta.get("val"), other.meta.get("val")
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.dim() == b.dim()):
        return None
    return frozenset(d for d in range(a.dim()) if a.shape[d] != b.shape[d])


def _power(a: float, b: float) -> int | None:
    for power in (1, -1):
        if abs(b - a * TIMES**power) <= 1e-9 * abs(b):
            return power
    return None
