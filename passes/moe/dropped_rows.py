"""Dropout inside experts that are branches: its numbers belong to a token, and follow it to the rank of its expert.

    names = name_rows(t)  →  names[token] → dispatch → part e  →  drop_rows(rows, p, names)

So each element is dropped as in one process (``dropout: layout_invariant``). Without names a rank would draw for rows
that others have too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import fx

from passes.errors import PlanError
from passes.moe import exchange
from passes.moe.building import Builder
from passes.moe.domain import Domain, domain_of
from passes.moe.refusals import Refusal, check_draws
from passes.moe.token_rows import TokenRows
from passes.program.ops.aten import aten, is_random, shape_of
from passes.program.program import Program
from passes.program.source_lines import where_of
from passes.types.draw import Draw


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
