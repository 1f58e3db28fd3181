"""One expert's part of a value: a single index of a dim, by slice, select, or as one of the parts of a split."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import getitem
from typing import Any

from torch import fx

from passes.program.ops.aten import named, shape_of
from passes.program.ops.groups import CUTS, SPLITS


@dataclass(frozen=True, slots=True)
class Pick:
    """``node``: index ``number`` of ``whole`` along ``dim``; ``keeps``: as a dim of size 1."""

    node: fx.Node
    whole: fx.Node
    dim: int
    number: int
    keeps: bool


def pick_of(node: fx.Node) -> Pick | None:
    """None for a call that takes anything else."""
    call = node.all_input_nodes[0] if node.target is getitem else node
    if call.target not in (SPLITS if node.target is getitem else CUTS):
        return None
    whole, given = call.all_input_nodes[0], named(call)
    dim = int(given.get("dim") or 0) % len(shape_of(whole))
    size, keeps = shape_of(whole)[dim], len(shape_of(node)) == len(shape_of(whole))
    is_one = len(call.meta["val"]) == size if node.target is getitem else not keeps or shape_of(node)[dim] == 1
    number: Any = node.args[1] if node.target is getitem else given.get("index", given.get("start")) or 0
    return Pick(node, whole, dim, number % size, keeps) if is_one else None


def picks(whole: fx.Node, dim: int) -> Iterator[Pick]:
    """All of a value along a dim."""
    parts = [part for user in whole.users if user.target in SPLITS for part in user.users]
    for node in (*whole.users, *parts):
        found = pick_of(node)
        if found is not None and (found.whole, found.dim) == (whole, dim):
            yield found
