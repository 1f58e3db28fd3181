"""The batch in a captured graph: the dims, numbers and constants that grow with the batch's size.

A graph is captured at one size, and there a size looks like any other number: ``loss.sum() / 8`` may divide by the
batch or by a constant. A second capture, of more sequences, shows which. It is made only for losses that leave a doubt.

The two graphs are matched node by node from the loss upwards. If a model loops over its sequences in Python, the second
graph has more terms in a sum, or more pieces in a concatenation: the first ones are matched, and the number of further
ones is noted.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from passes.program.ops.aten import aten, cut_source, is_cut, nodes_in
from passes.program.ops.groups import COPIES


def wider(inputs: Mapping[str, torch.Tensor], times: int) -> dict[str, torch.Tensor]:
    """Return the same inputs for ``times`` as many sequences, without memory."""
    return {
        name: torch.empty((times * t.shape[0], *t.shape[1:]), dtype=t.dtype, device="meta")
        for name, t in inputs.items()
    }


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclass
class TwoCaptures:
    """``others``: node of the first graph → that of the second, which has ``times`` as many sequences.

    ``more``: node → how many more terms (of a sum) or pieces (of a concatenation) the second has in its place.
    ``joins``: node of a graph with one sequence → the sum or concatenation that the second has in its place.
    ``taken``: (reader, node) if the reader in the second graph reads one of ``times`` parts of the node: in the first,
    of one sequence, a part is all of it.
    ``spread``: (reader, node) → dim, if the reader in the second graph reads copies of the node along dim.
    """

    times: int
    others: dict[fx.Node, fx.Node] = field(default_factory=dict)
    more: dict[fx.Node, int] = field(default_factory=dict)
    joins: dict[fx.Node, fx.Node] = field(default_factory=dict)
    taken: set[tuple[fx.Node | None, fx.Node]] = field(default_factory=set)
    spread: dict[tuple[fx.Node | None, fx.Node], int] = field(default_factory=dict)

    def changed(self, node: fx.Node) -> frozenset[int] | None:
        """Return the dims of ``node`` that grow with the batch; None if that is not known."""
        other = self.others.get(node)
        a, b = node.meta.get("val"), None if other is None else other.meta.get("val")
        if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.dim() == b.dim()):
            return None
        return frozenset(d for d in range(a.dim()) if a.shape[d] != b.shape[d])


def lay_on(first: fx.Graph, second: fx.Graph, constants: Collection[fx.Node], times: int) -> TwoCaptures:
    """``constants``: those of both graphs, which are compared by value and not by how they are made."""
    found = TwoCaptures(times)
    stack: list[tuple[fx.Node | None, fx.Node, fx.Node]] = [(None, _result(first), _result(second))]
    while stack:
        reader, a, b = stack.pop()
        known = a in found.others
        if not known:
            b = _same_op(found, reader, a, b)
        elif found.others[a] is not b and _is_part_of(b, found.others[a], a, times):
            found.taken.add((reader, a))
        if known or a in found.others:
            continue
        if a.target in COPIES and b.target != a.target:
            found.others[a] = b
            stack.append((a, a.all_input_nodes[0], b))
            continue
        if a.target != b.target and not (a in constants and b in constants):
            continue
        found.others[a] = b
        if a not in constants:
            stack.extend((a, x, y) for x, y in _operands(found, a, b))
    return found


def _result(graph: fx.Graph) -> fx.Node:
    result: Any = graph.output_node().args[0]
    return result[0]


def _same_op(found: TwoCaptures, reader: fx.Node | None, a: fx.Node, b: fx.Node) -> fx.Node:
    """Return the match of ``a`` in the second graph: ``b``, or the first of the terms or pieces that ``b`` joins."""
    while b.target in COPIES and b.target != a.target:
        b = b.all_input_nodes[0]
    dim = _spread_along(a, b, found.times)
    if dim is not None:
        found.spread[reader, a] = dim
        return b.all_input_nodes[0]
    if is_cut(b) and not (a.target == b.target and a.args[1:] == b.args[1:]):
        source = cut_source(b)
        if _is_part_of(b, source, a, found.times):
            found.taken.add((reader, a))
            return source
    joined = terms_of(b) if b.target is aten.add.Tensor else pieces_of(b)
    if len(joined) > 1 and (a.target != b.target or (not spine_of(a) and b.target is aten.add.Tensor)):
        found.more[a], found.joins[a] = len(joined) - 1, b
        return joined[0]
    return b


def _operands(found: TwoCaptures, a: fx.Node, b: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    if spine_of(a) and spine_of(b):
        here, there = terms_of(a), terms_of(b)
        if len(here) != len(there):
            found.more[a] = len(there) - len(here)
            found.others.update((inner, b) for inner in spine_of(a))
            yield from _ends(here, there)
            return
    if a.target is aten.cat.default and len(pieces_of(a)) != len(pieces_of(b)):
        found.more[a] = len(pieces_of(b)) - len(pieces_of(a))
    yield from zip(nodes_in((a.args, a.kwargs)), nodes_in((b.args, b.kwargs)), strict=False)


def _ends(here: list[fx.Node], there: list[fx.Node]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield terms from the front as long as they are alike, the rest from the back."""
    front = next((i for i, (a, b) in enumerate(zip(here, there, strict=False)) if a.target != b.target), len(here))
    yield from zip(here[:front], there, strict=False)
    yield from zip(reversed(here[front:]), reversed(there), strict=False)


def _spread_along(a: fx.Node, b: fx.Node, times: int) -> int | None:
    """The dim along which ``b`` repeats a value of the shape of ``a``, once for each sequence; None if it does not."""
    if b.target is not aten.expand.default or a.target == b.target or not isinstance(a.meta.get("val"), torch.Tensor):
        return None
    here, there, source = (n.meta["val"].shape for n in (a, b, b.all_input_nodes[0]))
    if here != source or len(here) != len(there):
        return None
    grown = [d for d, (m, n) in enumerate(zip(here, there, strict=True)) if m != n]
    return grown[0] if len(grown) == 1 and (here[grown[0]], there[grown[0]]) == (1, times) else None


# ---- sums, concatenations and cuts


def spine_of(node: fx.Node) -> list[fx.Node]:
    """Return the additions that make one sum, the last first; an inner one has no other reader. Python's sum() begins
    with ``first + 0``, which is a term."""
    spine = []
    while _adds_nodes(node) and (not spine or len(node.users) == 1):
        spine.append(node)
        node = node.args[0]  # pyright: ignore[reportAssignmentType]
    return spine


def _adds_nodes(node: fx.Node) -> bool:
    return node.target is aten.add.Tensor and not node.kwargs and all(isinstance(a, fx.Node) for a in node.args)


def terms_of(node: fx.Node) -> list[fx.Node]:
    """Return the terms of a chain of additions, in order."""
    spine: Any = spine_of(node)
    return [spine[-1].args[0], *(n.args[1] for n in reversed(spine))] if spine else [node]


def pieces_of(node: fx.Node) -> list[fx.Node]:
    pieces: Any = node.args[0] if node.target is aten.cat.default else []
    return list(pieces)


def _is_part_of(b: fx.Node, source: fx.Node, a: fx.Node, times: int) -> bool:
    """Return whether ``b`` is cut from ``source`` and has the shape of ``a``, which is all of its source."""
    if not is_cut(b) or cut_source(b) is not source:
        return False
    x, y, whole = a.meta.get("val"), b.meta.get("val"), source.meta.get("val")
    if not (isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) and isinstance(whole, torch.Tensor)):
        return False
    grown = [i for i, (m, n) in enumerate(zip(x.shape, whole.shape, strict=False)) if m != n]
    return x.shape == y.shape and len(grown) == 1 and whole.shape[grown[0]] == times * x.shape[grown[0]]
