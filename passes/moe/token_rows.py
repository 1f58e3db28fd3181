"""Values [tokens.., rest..] seen as rows: a branch computes some rows instead of all tokens.

    [b, s, h]  →  rows [m, h], as [1, m, h]: all dims of tokens but the last are 1

The tokens' dims are the shortest run of leading dims that has as many elements as there are tokens. Numbers of dropout
belong to a token, and follow it to the rank of its expert:

    names = name_rows(t)  →  names[token] → dispatch → part e  →  drop_rows(rows, p, names)

So each element is dropped as in one process (``dropout: layout_invariant``). Without names a rank would draw for rows
that others have too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from passes.errors import PlanError
from passes.moe import exchange
from passes.moe.domain import Builder, Domain, domain_of
from passes.moe.layers import Refusal, check_draws
from passes.program.ops.aten import aten, draws, is_pointwise, is_random, shape_of
from passes.program.ops.groups import WITH_SIZES
from passes.program.program import Program
from passes.program.source_lines import where_of
from passes.rules.call import operands_of
from passes.rules.rule import RESULT, Factor, OpRule, Role
from passes.rules.table import rule_of
from passes.types.draw import Draw


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
        self,
        build: Builder,
        node: fx.Node,
        own: Mapping[fx.Node, fx.Node],
        shared: Mapping[fx.Node, fx.Node],
        number: int,
        refusal: Refusal,
    ) -> fx.Node:
        """A call of the branch once more, on rows. ``shared``: weights, without tokens. Raises the error of ``refusal``
        if it mixes tokens."""
        lead = self.lead(shape_of(node))
        if not lead or not self._keeps_tokens(node, own):
            raise refusal(node, "the result of one token depends on others")
        given: Any = fx.map_arg((node.args, dict(node.kwargs)), lambda n: own.get(n, shared.get(n, n)))
        args, kwargs = given
        length = next(shape_of(own[n])[own[n].meta["domain"].rows] for n in node.all_input_nodes if n in own)
        sizes, val = [1] * (lead - 1) + [length, *shape_of(node)[lead:]], node.meta["val"]
        if node.target in WITH_SIZES:
            args = (args[0], sizes, *args[2:])
        is_known = number > 0 and isinstance(val, Tensor)  # the same call of the first branch was run
        val = torch.empty(sizes, dtype=val.dtype, device="meta") if is_known else None
        made = build.call(node.target, *args, **kwargs, val=val, domain=self.domain(lead - 1, number))
        made.meta["grad"] = node.meta["grad"]
        return made

    def _keeps_tokens(self, node: fx.Node, own: Mapping[fx.Node, fx.Node]) -> bool:
        """Whether the tokens' dims of all that it reads are those of the result, in the same order, and no other
        operand has them."""
        rule = rule_of(node)
        operands = operands_of(node)
        if rule is None or (draws(node.target) and not is_pointwise(node.target)):
            return False
        found = [self._token_factors(rule, i, shape_of(n)) for i, n in enumerate(operands) if n in own]
        out = self._token_factors(rule, RESULT, shape_of(node))
        if not found or any(f.role is not Role.EACH for factors in (out, *found) for f in factors):
            return False
        if any(f.at(i) for f in _counting(out) for i, n in enumerate(operands) if n not in own):
            return False
        lead = self.lead(shape_of(node))
        stay = all((p := f.at(RESULT)) is not None and p.dim < lead for factors in found for f in factors)
        return stay and all(_counting(factors) == _counting(out) for factors in found)

    def _token_factors(self, rule: OpRule, operand: int, shape: tuple[int, ...]) -> list[Factor]:
        """From the outermost to the innermost."""
        return [f for dim in range(self.lead(shape)) for f in reversed(rule.along(operand, dim))]


def _counting(factors: list[Factor]) -> list[Factor]:
    return [f for f in factors if f.size > 1]


# ---- dropout of rows


class DroppedRows:
    """Owns what names the tokens: the dims of tokens of every draw of the branches, which must agree."""

    def __init__(
        self, tokens: TokenRows, bodies: Iterable[list[fx.Node]], refusal: Refusal, *, alone: bool = False
    ) -> None:
        """``alone``: dropout without names may draw here."""
        drawing = [node for body in bodies for node in body if is_random(node)]
        self.tokens = tokens
        self.nodes = {n for n in drawing if n.target is aten.dropout.default and "draw" in n.meta}
        is_drawn = {n for n in drawing if n in self.nodes or (alone and n.target is aten.dropout.default)}
        check_draws([n for n in drawing if n not in is_drawn], "rows", refusal)
        found = {self._of_tokens(node) for node in self.nodes}
        if len(found) > 1 or None in found:
            raise refusal(min(self.nodes), "the draws of dropout are not named by token")
        self.draw = next(iter(found), None)

    def _of_tokens(self, node: fx.Node) -> Draw | None:
        """The draw's dims of tokens; None if others count sequences, or are sharded."""
        draw: Draw = node.meta["draw"]
        lead = self.tokens.lead(shape_of(node))
        dims = [draw.batch[0]] if draw.batch is not None else []
        dims += [draw.cut.dim] if draw.cut is not None else []
        return replace(draw, site=-1, shape=draw.shape[:lead]) if max(dims, default=0) < lead else None

    def names(self, build: Builder) -> fx.Node | None:
        """Of all tokens that this rank has; None if nothing is dropped."""
        if self.draw is None:
            return None
        val = torch.empty((self.tokens.num_tokens, 2), dtype=torch.int64, device="meta")
        made = build.call(exchange.name_rows, self.tokens.num_tokens, val=val, grad=False)
        made.meta["draw"] = self.draw
        return made

    def dropped(self, build: Builder, node: fx.Node, rows: fx.Node, names: fx.Node, domain: Domain) -> fx.Node:
        """The dropout ``node`` of the branch, of rows with these names."""
        draw: Draw = node.meta["draw"]
        lead = self.tokens.lead(shape_of(node))
        made = build.call(exchange.drop_rows, rows, node.args[1], names, val=rows.meta["val"], domain=domain)
        made.meta["draw"] = Draw(draw.site, draw.shape[lead:], None, by_sample=False)
        made.meta["grad"] = node.meta["grad"]
        return made


def check_places(program: Program) -> None:
    """Raise PlanError, at its line, for named draws of rows that experts hold, but for dropout by their tokens."""
    for node in program.graph.graph.nodes:
        if "draw" in node.meta and domain_of(node) is not None and node.target is not exchange.drop_rows:
            raise PlanError(
                f"dropout: layout_invariant: {node.target} acts on the rows of experts with ep or etp, "
                f"{list(shape_of(node))}",
                where=where_of(node),
                fix="write dropout: fast, or draw by F.dropout in experts of a loop over modules",
            )
