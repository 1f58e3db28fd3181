"""Opens a captured graph at products of slots with stacks of experts: inserts the exchange of slots there.

    slots[E, C, d]  →  products with stacks [E, …]  →  back to their tokens, weighted, summed

becomes ``send_slots`` before and ``return_slots`` after the calls that depend on the expert
(passes/moe/exchange.py). The user's code that fills slots and drops tokens is unchanged; each call in between is
shown to treat experts and slots as batch dims.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import replace

import torch
from torch import fx

from passes.errors import PlanError
from passes.moe.domain import Domain
from passes.moe.inside import border_of, check_read, inside_of, made_of, outer_of
from passes.moe.layers import ExpertLayer
from passes.moe.own_slices import stacks_of
from passes.moe.refusals import check_draws
from passes.moe.sending_slots import Sending
from passes.moe.slot_dims import MIXED, followed
from passes.moe.ties import is_product
from passes.program.ops.aten import shape_of
from passes.program.program import Program
from passes.program.weights import is_weight
from passes.rules.call import operands_of
from passes.rules.rule import RESULT
from passes.rules.table import rule_of


def open_slots(program: Program, layer: ExpertLayer, apart: Set[fx.Node]) -> ExpertLayer:
    """Put the exchange around the calls of ``layer`` on slots; returns it with the calls that send them. Raises
    PlanError if they are not understood.

    ``apart``: calls of other layers with the same stacks.
    """
    return _Opening(program, layer, apart).run()


class _Opening:
    """Owns the domain: ``stacks`` and values made of them alone, ``inside`` calls on slots."""

    def __init__(self, program: Program, layer: ExpertLayer, apart: Set[fx.Node]) -> None:
        self.apart = apart
        self.layer, self.sending = layer, Sending(program, layer)
        self.refusal = self.sending.refusal
        self.stacks = stacks_of(program, layer)
        self.of_stacks = made_of(self.stacks)
        self.inside = inside_of(self.of_stacks, apart)
        self.entries: dict[fx.Node, fx.Node] = {}  # values read from outside, and the first call that reads each
        for node in sorted(self.inside):
            for value in outer_of(node, self.inside | self.of_stacks):
                self.entries.setdefault(value, node)

    def run(self) -> ExpertLayer:
        self._check()
        experts = followed(self.stacks, (self.inside | self.of_stacks) - set(self.stacks), self.refusal)
        slots = self._slots(experts)
        sent = [self._send(value, experts[value], slots[value]) for value in self.entries]
        for node in border_of(self.inside):
            self.sending.give_back(node, self.inside, experts[node], slots[node])
        for node in sorted(self.of_stacks):
            node.meta["domain"] = Domain(experts=experts[node])
        for node in sorted(self.inside):
            node.meta["domain"] = Domain(experts=experts[node], slots=slots[node])
        return replace(self.layer, sent=tuple(sent), limit=self.sending.limit)

    # ---- checks

    def _check(self) -> None:
        check_read(self.stacks, self.inside | self.of_stacks | self.apart, self.refusal)
        check_draws(self.inside, "slots", self.refusal)
        for value, node in self.entries.items():
            if is_weight(value) or not isinstance(value.meta["val"], torch.Tensor):
                raise self.refusal(node, f"experts share {value.name}, which does not belong to one expert")

    def _slots(self, experts: dict[fx.Node, int]) -> dict[fx.Node, int]:
        """The dim of every value that counts slots. If all calls keep several, the last."""
        first, kept = next(self._products())
        self._check_known(experts, "has no dim of experts")
        refused: PlanError | None = None
        for dim in reversed(kept):
            try:
                found = followed({first: dim}, self.inside, self.refusal)
                self._check_known(found, "has no slots, or only some of them")
                return found
            except PlanError as error:
                refused = refused or error
        raise refused or self.refusal(first, "its experts have no slots")

    def _products(self) -> Iterator[tuple[fx.Node, list[int]]]:
        """(operand, dims that are kept and the stack has not) of products with stacks."""
        for node in sorted(self.inside):
            rule, read = rule_of(node) if is_product(node) else None, operands_of(node)
            stacks = [i for i, n in enumerate(read) if n in self.of_stacks]
            for i, x in enumerate(read):
                if rule is not None and stacks and i not in stacks:
                    along = [rule.sole(i, d) for d in range(len(shape_of(x)))]
                    kept = [f is not None and f.at(RESULT) is not None and not any(map(f.at, stacks)) for f in along]
                    yield x, [d for d, is_kept in enumerate(kept) if is_kept]

    def _check_known(self, known: dict[fx.Node, int], why: str) -> None:
        for value in (*sorted(self.inside), *self.entries):
            if value not in known:
                is_lost = value not in self.entries and any(n in known for n in value.all_input_nodes)
                told = MIXED if is_lost else f"{value.name} {list(shape_of(value))} {why}"
                raise self.refusal(self.entries.get(value, value), told)

    # ---- the rewrite

    def _send(self, value: fx.Node, experts: int, slots: int) -> str:
        sent = self.sending.send(value, self.entries[value], experts, slots)
        for user in [u for u in value.users if u in self.inside]:
            user.replace_input_with(value, sent)
        return sent.name
