"""Inputs of the branches of experts that need no stack over the experts: at the tokens that chose one, they are known.

    where(chosen == e, w, 0).sum(-1)     w of the pair of token and choice, a value [tokens, choices] of the model
    (chosen == e).any(-1)                True: where(it, y, 0) is y

Both are found by trials of values and gradients, so a model may write them in any way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from passes.moe.routing import Routing, leaves_of
from passes.program.ops.aten import aten, packet_of, shape_of


@dataclass(frozen=True)
class Chosen:
    """The same input of each branch, ``column``, read at the pairs of a token and an expert that it chose."""

    routing: Routing
    num_tokens: int
    column: Sequence[fx.Node]

    def weight(self) -> fx.Node | None:
        """The value of each choice that the input is at its tokens; None if it is none."""
        first = self.column[0].meta["val"]
        if first.numel() != self.num_tokens or not first.dtype.is_floating_point:
            return None
        outside = [
            n
            for n in self.routing.inputs(self.column)
            if n.meta["val"].numel() == self.routing.num_rows and n.meta["val"].dtype == first.dtype
        ]
        for values, ids in self.routing.tried(self.column):
            rows = self._rows(values, ids)
            outside = [n for n in outside if rows is not None and _is_of(rows, values[n])]
        return outside[0] if outside else None

    def is_true(self) -> bool:
        """Whether it is True at all of them."""
        if self.column[0].meta["val"].dtype is not torch.bool:
            return False
        found = [self._rows(values, ids) for values, ids in self.routing.tried(self.column)]
        return bool(found) and all(rows is not None and bool(rows.all()) for rows in found)

    def _rows(self, values: Mapping[fx.Node, Tensor], ids: list[Tensor]) -> Tensor | None:
        """At each pair in their own order [pairs, rest]; None if a branch reads another value."""
        if any(n not in values or shape_of(n) != shape_of(self.column[0]) for n in self.column):
            return None
        expert = ids[0].flatten().long()
        token = torch.arange(len(expert)) // (len(expert) // self.num_tokens)
        return torch.stack([values[n].reshape(self.num_tokens, -1) for n in self.column])[expert, token]


def _is_of(rows: Tensor, weight: Tensor) -> bool:
    """Whether rows [pairs, 1] are a weight's elements, and so are their gradients; no other value gets one."""
    if not torch.equal(rows.flatten(), weight.flatten()):
        return False
    drawn, leaves = torch.rand_like(rows), list(leaves_of(rows))
    grads = torch.autograd.grad((rows * drawn).sum(), leaves, allow_unused=True)
    wanted = [drawn.view_as(leaf) if leaf is weight else torch.zeros_like(leaf) for leaf in leaves]
    return all(torch.equal(w if g is None else g, w) for g, w in zip(grads, wanted, strict=True))


def hides_nothing(node: fx.Node, true: fx.Node) -> fx.Node | None:
    """The value that a call gives where ``true`` is True, if the call only chooses by it."""
    if packet_of(node.target) is not aten.where or len(node.args) < 2 or node.args[0] is not true:
        return None
    kept = node.args[1]
    if not isinstance(kept, fx.Node) or shape_of(kept) != shape_of(node):
        return None
    return kept if kept.meta["val"].dtype == node.meta["val"].dtype else None
