"""Opens a captured graph at experts that are branches of their own, each on its part of a value with all slots.

    made = stack([branch_e(slots[e]) for e])        slots[E, C, d]

    slots → send_slots → slots_of e → branch e, unchanged → join → return_slots

Every ep rank runs the branches of its experts alone (``Domain.number``); their weights keep their names.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

from torch import fx

from passes.errors import PlanError
from passes.moe import exchange
from passes.moe.building import Builder, erase_unread
from passes.moe.domain import Domain
from passes.moe.layers import ExpertLayer
from passes.moe.one_expert import weights_of_each
from passes.moe.picks import Pick, pick_of
from passes.moe.refusals import check_draws
from passes.moe.sending_slots import Sending
from passes.moe.slot_dims import followed
from passes.program.ops.aten import aten, named, shape_of
from passes.program.ops.groups import JOINS, LAID_OUT
from passes.program.program import Program
from passes.program.walks import operands, readers, walk


def open_slot_branches(program: Program, layer: ExpertLayer, apart: Set[fx.Node]) -> ExpertLayer:
    """Put the exchange around the branches of ``layer``; returns it with the calls that send slots. Raises PlanError if
    they are not understood. ``apart``: calls of other layers with the same weights.
    """
    return _Opening(program, layer, apart).run()


class _Opening:
    """Owns the branches: for each expert ``weights`` with values made of them alone, the ``tip`` that it ends in, the
    ``bodies`` between, and the ``parts`` that they read."""

    def __init__(self, program: Program, layer: ExpertLayer, apart: Set[fx.Node]) -> None:
        self.apart = apart
        self.graph, self.layer, self.sending = program.graph.graph, layer, Sending(program, layer)
        self.refusal = self.sending.refusal
        self.tips = [program.node(name) for name in layer.tips]
        self.join = self._joined()
        self.weights = weights_of_each(program, layer, self.refusal, alone=False)
        self.parts: list[Pick] = []
        self.bodies = [self._body(e) for e in range(layer.num_experts)]

    def run(self) -> ExpertLayer:
        whole, experts = self._whole()
        slots = self._slots()
        first = self.parts[0]
        at = slots[first.node] + (not first.keeps and slots[first.node] >= experts)
        sent = self.sending.send(whole, min(p.node for p in self.parts), experts, at)
        for number, part in enumerate(self.parts):
            self._replace(part, sent, number, slots)
        self._join(slots)
        erase_unread(self.graph, [self.join, *(p.node for p in self.parts)])
        return replace(self.layer, sent=(sent.name,), limit=self.sending.limit, tips=())

    # ---- facts

    def _joined(self) -> fx.Node:
        """The call that concatenates all experts' results, in their order."""
        join = next(iter(self.tips[0].users))
        is_all = join.target in JOINS and list(join.args[0]) == self.tips  # pyright: ignore
        if not is_all or any(len(tip.users) != 1 for tip in self.tips):
            raise self.refusal(self.tips[0], "their results for slots are not combined with one cat or stack")
        return join

    def _body(self, number: int) -> list[fx.Node]:
        """Calls of a branch from its part of the slots on, in the graph's order; finds the part."""
        weights, tip = self.weights[number], self.tips[number]
        below = set(walk(weights, readers, into=lambda n: n <= tip and n not in self.apart)) - weights
        body = below & set(walk([tip], operands, into=lambda n: n >= min(weights)))
        work = [v for n in sorted(body) for v in n.all_input_nodes if v not in body and v not in weights]
        found: dict[Pick, None] = {}
        while work:
            node = work.pop()
            part = pick_of(node)
            if part is not None and part.number == number and shape_of(part.whole)[part.dim] == self.layer.num_experts:
                found[part] = None
            elif node.target in LAID_OUT and node not in body:
                body.add(node)
                work += node.all_input_nodes
            else:
                raise self.refusal(min(body), f"it reads {node.name}, which is not a slice of all slots")
        if len(found) != 1:
            raise self.refusal(tip, "a branch reads more than its slice of all slots")
        self.parts += found
        check_draws(body, "slots", self.refusal)
        return sorted(body)

    def _whole(self) -> tuple[fx.Node, int]:
        """The common value of all parts, and its dim of experts."""
        found = {(p.whole, p.dim, p.keeps) for p in self.parts}
        if len(found) != 1 or any(u not in self._inside() for p in self.parts for u in p.node.users):
            raise self.refusal(self.join, "their branches read slices of several values")
        whole, dim, _ = found.pop()
        return whole, dim

    def _inside(self) -> set[fx.Node]:
        return {n for body in self.bodies for n in body}

    def _slots(self) -> dict[fx.Node, int]:
        """The dim of slots of each value of the branches. If all calls keep several, the last."""
        part, inside = self.parts[0], self._inside()
        skipped = {part.dim} if part.keeps else set()
        refused: PlanError | None = None
        for dim in reversed([d for d in range(len(shape_of(part.node)) - 1) if d not in skipped]):
            try:
                found = followed({p.node: dim for p in self.parts}, inside, self.refusal)
            except PlanError as error:
                refused = refused or error
                continue
            if all(n in found for n in inside):
                return found
        raise refused or self.refusal(min(inside), "the result of one slot of one expert depends on others")

    # ---- the rewrite

    def _replace(self, part: Pick, sent: fx.Node, number: int, slots: dict[fx.Node, int]) -> None:
        """One branch on the slots that are on its rank."""

        def domain(node: fx.Node) -> Domain:
            return Domain(slots=slots.get(node, -1), number=number, num_experts=self.layer.num_experts)

        build, val = Builder(self.graph, self.bodies[number][0], part.node), part.node.meta["val"]
        own = build.call(exchange.slots_of, sent, part.dim, number, part.keeps, val=val, domain=domain(part.node))
        part.node.replace_all_uses_with(own)
        for node in self.bodies[number]:
            node.meta["domain"] = domain(node)
        for node in sorted(self.weights[number]):
            node.meta["domain"] = Domain(number=number, num_experts=self.layer.num_experts)

    def _join(self, slots: dict[fx.Node, int]) -> None:
        """Replace the join: results with a dim of experts, sent back to the slots' own ranks."""
        dim, shape = int(named(self.join)["dim"]) % len(shape_of(self.join)), list(shape_of(self.tips[0]))
        at, tips, size = slots[self.tips[0]], self.tips, self.layer.num_experts
        if shape[dim] != 1 or at == dim:  # behind each other in a dim that they have
            build = Builder(self.graph, self.join, self.join)
            shape.insert(dim, 1)
            at += at >= dim
            of_one = [Domain(slots=at, number=e, num_experts=size) for e in range(size)]
            tips = [build.call(aten.reshape.default, t, shape, domain=d) for t, d in zip(tips, of_one, strict=True)]
        shape[dim] = size
        build = Builder(self.graph, self.join, self.join)
        val = tips[0].meta["val"].new_empty(shape, device="meta")
        made = build.call(exchange.join, *tips, dim=dim, val=val, domain=Domain(experts=dim, slots=at))
        back = self.sending.give_back(made, {made}, dim, at)
        if tuple(shape) != shape_of(self.join):
            back = Builder(self.graph, self.join, self.join).call(aten.reshape.default, back, list(shape_of(self.join)))
        self.join.replace_all_uses_with(back)
