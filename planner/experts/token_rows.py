"""Values [tokens.., rest..] seen as rows: a branch computes some rows instead of all tokens.

    [b, s, h]  →  rows [m, h], as [1, m, h]: all dims of tokens but the last are 1

The tokens' dims are the shortest run of leading dims that has as many elements as there are tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from planner.errors import PlanError
from planner.experts.building import Builder
from planner.experts.domain import Domain
from planner.experts.ids import VIEWS
from planner.experts.rows import ALONG, NORMS, PARTING
from planner.graph.ops.aten import aten, is_pointwise, named, packet_of, reduced_dims, shape_of
from planner.graph.ops.products import PRODUCTS

Refusal = Callable[[fx.Node, str], PlanError]


class TokenRows:
    """Rows of ``num_tokens`` tokens, for ``num_experts``: each one is written as if all experts had as many."""

    def __init__(self, num_tokens: int, num_experts: int) -> None:
        self.num_tokens, self.num_experts = num_tokens, num_experts
        self.num_rows = 0

    def domain(self, rows: int, number: int) -> Domain:
        """The mark of a value of one expert."""
        return Domain(rows=rows, number=number, num_experts=self.num_experts)

    def lead(self, shape: tuple[int, ...]) -> int:
        """How many leading dims are those of the tokens; 0 if none are."""
        for length in range(1, len(shape) + 1):
            if prod(shape[:length]) == self.num_tokens:
                return length
        return 0

    def flat(self, node: fx.Node, refusal: Refusal) -> list[int]:
        """The shape with one dim of tokens."""
        shape = shape_of(node)
        lead = self.lead(shape)
        if not lead:
            raise refusal(node, f"they read {node.name} {list(shape)}, which has no dim of tokens")
        return [self.num_tokens, *shape[lead:]]

    def part(self, rows: fx.Node) -> Tensor:
        """The meta value of one expert's part of ``rows``."""
        self.num_rows = shape_of(rows)[0]
        length = max(1, self.num_rows // self.num_experts)
        return torch.empty((length, *shape_of(rows)[1:]), dtype=rows.meta["val"].dtype, device="meta")

    def joined(self, part: fx.Node) -> Tensor:
        """The meta value of all experts' parts, concatenated."""
        return torch.empty((self.num_rows, *shape_of(part)[1:]), dtype=part.meta["val"].dtype, device="meta")

    def shaped(self, build: Builder, part: fx.Node, like: fx.Node, number: int) -> fx.Node:
        """Rows [m, rest..] with as many dims as ``like`` has."""
        shape = shape_of(like)
        lead = self.lead(shape)
        sizes = [1] * (lead - 1) + [shape_of(part)[0], *shape[lead:]]
        if lead == 1:
            return part
        return build.call(aten.reshape.default, part, sizes, domain=self.domain(lead - 1, number))

    def flattened(self, build: Builder, node: fx.Node, number: int) -> fx.Node:
        """The other way round."""
        rows = node.meta["domain"].rows
        if not rows:
            return node
        sizes = [shape_of(node)[rows], *shape_of(node)[rows + 1 :]]
        return build.call(aten.reshape.default, node, sizes, domain=self.domain(0, number))

    def again(
        self, build: Builder, node: fx.Node, own: Mapping[fx.Node, fx.Node], number: int, refusal: Refusal
    ) -> fx.Node:
        """A call of the branch once more, on rows. Raises the error of ``refusal`` if it mixes tokens."""
        lead = self.lead(shape_of(node))
        if not lead or not self._keeps_tokens(node, own):
            raise refusal(node, "the result of one token depends on others")
        given: Any = fx.map_arg((node.args, dict(node.kwargs)), lambda n: own.get(n, n))
        args, kwargs = given
        if packet_of(node.target) in (aten.reshape, aten.expand):
            length = next(shape_of(own[n])[own[n].meta["domain"].rows] for n in node.all_input_nodes if n in own)
            args = (args[0], [1] * (lead - 1) + [length, *shape_of(node)[lead:]], *args[2:])
        made = build.call(node.target, *args, **kwargs, domain=self.domain(lead - 1, number))
        made.meta["grad"] = node.meta["grad"]
        return made

    def _keeps_tokens(self, node: fx.Node, own: Mapping[fx.Node, fx.Node]) -> bool:
        read = [n for n in node.all_input_nodes if n in own]
        packet = packet_of(node.target)
        leads = {self.lead(shape_of(n)) for n in read}
        if 0 in leads or not leads:
            return False
        if node.target is getitem or packet in (aten.reshape, aten.to, aten.contiguous, aten.clone):
            return True
        if is_pointwise(node.target) or packet is aten.expand:
            return leads == {self.lead(shape_of(node))} and self._aligned(node, read)
        lead = max(leads)
        if packet is aten.permute:
            dims: Any = named(node)["dims"]
            return [d % len(dims) for d in dims][:lead] == list(range(lead))
        if node.target in PRODUCTS:
            return (
                len(read) == 1
                and read[0] is node.args[0]
                and packet_of(node.target) in (aten.linear, aten.matmul, aten.mm)
            )
        if node.target in ALONG:
            return not any(d < lead for d in reduced_dims(node))
        if packet in NORMS:
            return lead <= len(shape_of(node)) - len(named(node)["normalized_shape"])
        if packet in PARTING or packet in VIEWS:
            dim = int(named(node).get("dim") or 0)
            return dim % len(shape_of(read[0])) >= lead
        return False

    def _aligned(self, node: fx.Node, read: list[fx.Node]) -> bool:
        """Whether the tokens' dims of its operands are aligned with each other, and with nothing else."""
        ndim, lead = len(shape_of(node)), self.lead(shape_of(node))
        rest = [n for n in node.all_input_nodes if n not in read]
        outer = [len(shape_of(n)) for n in rest if isinstance(n.meta["val"], Tensor)]
        return all(len(shape_of(n)) == ndim for n in read) and all(size <= ndim - lead for size in outer)
