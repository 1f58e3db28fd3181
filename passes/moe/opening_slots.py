"""Opens a captured graph at experts on slots: inserts the exchange of slots there (passes/moe/exchange.py).

    slots[E, C, d]  →  products with stacks [E, …]  →  back to their tokens, weighted, summed
    made = stack([branch_e(slots[e]) for e])        a branch for each expert, on its part of all slots

becomes ``send_slots`` before and ``return_slots`` after the calls that depend on the expert. The user's code that
fills slots and drops tokens is unchanged; each call in between is shown to treat experts and slots as batch dims. Of
branches, every ep rank runs those of its experts alone (``Domain.number``); their weights keep their names.

    counts = how many tokens chose each expert        given once a layer, by the first call that sends
    limit  = C, if an expert was shown to fill as many of its C slots as tokens chose it, and no more
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Set
from dataclasses import replace

import torch
from torch import fx

from passes.errors import PlanError
from passes.moe import exchange
from passes.moe.domain import Builder, Domain, erase_unread
from passes.moe.inside import border_of, check_read, inside_of, made_of, outer_of, stacks_of, weights_of_each
from passes.moe.layers import Dispatch, ExpertLayer, check_draws
from passes.moe.opening import Opening, read_outside
from passes.moe.rows import MIXED, followed
from passes.moe.ties import Pick, is_product, pick_of
from passes.program.ops.aten import aten, named, shape_of
from passes.program.ops.groups import JOINS, LAID_OUT
from passes.program.program import Program
from passes.program.walks import operands, readers, walk
from passes.program.weights import is_weight
from passes.rules.call import operands_of
from passes.rules.rule import RESULT
from passes.rules.table import rule_of


class _Slots(Opening):
    """The slots of one layer. Owns ``limit``: known once something was ``sent``."""

    FIX = "compute each slot with only its expert, with separate dims for experts and slots"

    def __init__(self, program: Program, layer: ExpertLayer, apart: Set[fx.Node]) -> None:
        super().__init__(program, layer, apart)
        self.limit, self.sent = 0, list[str]()

    def sending(self) -> ExpertLayer:
        """The layer, with what is sent."""
        return replace(self.layer, sent=tuple(self.sent), limit=self.limit, tips=())

    def send(self, value: fx.Node, reader: fx.Node, experts: int, slots: int) -> fx.Node:
        """Its slots on the ranks of their experts. Stands before ``reader``."""
        build, given = Builder(self.graph, reader, value), ()
        if not self.sent:
            self.limit, groups = self._filled(value, shape_of(value)[slots])
            given = (self._counts(build, groups),)
        domain, val, grad = Domain(experts=experts, slots=slots), value.meta["val"], value.meta["grad"]
        sent = build.call(exchange.send_slots, value, experts, slots, *given, val=val, domain=domain, grad=grad)
        self.sent.append(sent.name)
        return sent

    def give_back(self, node: fx.Node, inside: Collection[fx.Node], experts: int, slots: int) -> fx.Node:
        """The results of ``node``, returned to the slots' own ranks, for all readers that are not ``inside``."""
        build = Builder(self.graph, node.next, node)
        back = build.call(exchange.return_slots, node, experts, slots, val=node.meta["val"])
        read_outside(node, inside, back)
        return back

    def dims_of_slots(
        self,
        first: Collection[fx.Node],
        dims: Iterable[int],
        calls: Collection[fx.Node],
        check: Callable[[dict[fx.Node, int]], None],
    ) -> dict[fx.Node, int]:
        """The dim of slots of every value, found from one of ``dims`` of the ``first``. If all calls keep several, the
        last."""
        refused: PlanError | None = None
        for dim in reversed([*dims]):
            try:
                found = followed(dict.fromkeys(first, dim), calls, self.refusal)
                check(found)
                return found
            except PlanError as error:
                refused = refused or error
        raise refused or self.refusal(next(iter(first)), "its experts have no slots")

    def _counts(self, build: Builder, groups: int) -> fx.Node:
        size, chosen = self.layer.num_experts, self.routing.chosen
        val = torch.empty((groups, size), dtype=torch.int64, device="meta")
        if self.layer.dispatch is Dispatch.TAKEN:
            return build.call(exchange.count_taken, size, *chosen, val=val)
        return build.call(exchange.count_by_group, size, groups, *chosen, val=val)

    def _filled(self, value: fx.Node, size: int) -> tuple[int, int]:
        """(slots of an expert for a group of tokens, number of groups), if as many slots are filled as tokens chose the
        expert; (0, 1) if that is not shown. ``size``: the slots of an expert in ``value``, maybe of several groups.
        """
        weighing = map(self.program.node, self.layer.probs)
        for node in () if self.layer.dispatch is Dispatch.TAKEN else (*weighing, value):
            for slots in sorted({n for n in (size, *shape_of(node)) if n and size % n == 0}, reverse=True):
                groups = self.routing.groups_filled(node, slots)
                if groups and (slots == size or slots * groups == size):
                    return slots, groups
        return 0, 1


class SlotOpening(_Slots):
    """Owns the domain: ``stacks`` and values made of them alone, ``inside`` calls on slots; ``entries``: values read
    from outside, and the first call that reads each."""

    def run(self) -> ExpertLayer:
        self.stacks = stacks_of(self.program, self.layer)
        self.of_stacks = made_of(self.stacks)
        self.inside = inside_of(self.of_stacks, self.apart)
        self.entries: dict[fx.Node, fx.Node] = {}
        for node in sorted(self.inside):
            for value in outer_of(node, self.inside | self.of_stacks):
                self.entries.setdefault(value, node)
        self._check()
        experts = followed(self.stacks, (self.inside | self.of_stacks) - set(self.stacks), self.refusal)
        self._check_known(experts, "has no dim of experts")
        first, kept = next(self._products())
        no_slots = "has no slots, or only some of them"
        slots = self.dims_of_slots([first], kept, self.inside, lambda found: self._check_known(found, no_slots))
        for value, reader in self.entries.items():
            sent = self.send(value, reader, experts[value], slots[value])
            for user in [u for u in value.users if u in self.inside]:
                user.replace_input_with(value, sent)
        for node in border_of(self.inside):
            self.give_back(node, self.inside, experts[node], slots[node])
        for node in self.of_stacks | self.inside:
            node.meta["domain"] = Domain(experts=experts[node], slots=slots[node] if node in self.inside else -1)
        return self.sending()

    def _check(self) -> None:
        check_read(self.stacks, self.inside | self.of_stacks | self.apart, self.refusal)
        check_draws(self.inside, "slots", self.refusal)
        for value, node in self.entries.items():
            if is_weight(value) or not isinstance(value.meta["val"], torch.Tensor):
                raise self.refusal(node, f"experts share {value.name}, which does not belong to one expert")

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


class SlotBranchOpening(_Slots):
    """Owns the branches: for each expert ``weights`` with values made of them alone, the ``tip`` that it ends in, its
    calls (``bodies``), and its part of the slots."""

    def run(self) -> ExpertLayer:
        self.tips = [self.program.node(name) for name in self.layer.tips]
        self.join = self._joined()
        self.weights = weights_of_each(self.program, self.layer, self.refusal, alone=False)
        found = [self._body(e) for e in range(self.layer.num_experts)]
        self.bodies, self.parts = [body for body, _ in found], [part for _, part in found]
        self.inside = {n for body in self.bodies for n in body}
        self._check_parts()
        first = self.parts[0]
        kept = [d for d in range(len(shape_of(first.node)) - 1) if not (first.keeps and d == first.dim)]
        slots = self.dims_of_slots([p.node for p in self.parts], kept, self.inside, self._check_known)
        at = slots[first.node] + (not first.keeps and slots[first.node] >= first.dim)
        sent = self.send(first.whole, min(p.node for p in self.parts), first.dim, at)
        for number, part in enumerate(self.parts):
            self._replace(part, sent, number, slots)
        self._join(slots)
        erase_unread(self.graph, [self.join, *(p.node for p in self.parts)])
        return self.sending()

    # ---- facts

    def _joined(self) -> fx.Node:
        """The call that concatenates all experts' results, in their order."""
        join = next(iter(self.tips[0].users))
        is_all = join.target in JOINS and list(join.args[0]) == self.tips  # pyright: ignore
        if not is_all or any(len(tip.users) != 1 for tip in self.tips):
            raise self.refusal(self.tips[0], "their results for slots are not combined with one cat or stack")
        return join

    def _body(self, number: int) -> tuple[list[fx.Node], Pick]:
        """Calls of a branch from its part of the slots on, in the graph's order, and the part."""
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
        check_draws(body, "slots", self.refusal)
        return sorted(body), next(iter(found))

    def _check_parts(self) -> None:
        wholes = {(p.whole, p.dim, p.keeps) for p in self.parts}
        if len(wholes) != 1 or any(u not in self.inside for p in self.parts for u in p.node.users):
            raise self.refusal(self.join, "their branches read slices of several values")

    def _check_known(self, known: dict[fx.Node, int]) -> None:
        if not self.inside <= known.keys():
            raise self.refusal(min(self.inside), MIXED)

    # ---- the rewrite

    def _domain(self, number: int, slots: int = -1) -> Domain:
        return Domain(slots=slots, number=number, num_experts=self.layer.num_experts)

    def _replace(self, part: Pick, sent: fx.Node, number: int, slots: dict[fx.Node, int]) -> None:
        """One branch on the slots that are on its rank."""
        build, val = Builder(self.graph, self.bodies[number][0], part.node), part.node.meta["val"]
        domain = self._domain(number, slots[part.node])
        own = build.call(exchange.slots_of, sent, part.dim, number, part.keeps, val=val, domain=domain)
        part.node.replace_all_uses_with(own)
        for node in (*self.bodies[number], *self.weights[number]):
            node.meta["domain"] = self._domain(number, slots[node] if node in self.inside else -1)

    def _join(self, slots: dict[fx.Node, int]) -> None:
        """Replace the join: results with a dim of experts, sent back to the slots' own ranks."""
        build = Builder(self.graph, self.join, self.join)
        dim, shape = int(named(self.join)["dim"]) % len(shape_of(self.join)), list(shape_of(self.tips[0]))
        at, tips = slots[self.tips[0]], self.tips
        if shape[dim] != 1 or at == dim:  # behind each other in a dim that they have
            shape.insert(dim, 1)
            at += at >= dim
            tips = [build.call(aten.reshape.default, t, shape, domain=self._domain(e, at)) for e, t in enumerate(tips)]
        shape[dim] = self.layer.num_experts
        val = tips[0].meta["val"].new_empty(shape, device="meta")
        made = build.call(exchange.join, *tips, dim=dim, val=val, domain=Domain(experts=dim, slots=at))
        back = self.give_back(made, {made}, dim, at)
        if tuple(shape) != shape_of(self.join):
            back = build.call(aten.reshape.default, back, list(shape_of(self.join)))
        self.join.replace_all_uses_with(back)
