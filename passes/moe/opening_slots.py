"""Opens a captured graph at slots that the model filled: of stacks of experts, or of branches.

    slots[E, C, d]  →  send_slots  →  products with stacks [E, …]          →  return_slots  →  back to their tokens
                                   →  slots of e  →  branch e  →  join     →

Filling slots, dropping, weighting and summing stay the user's own. A graph is opened only if its calls are shown to
treat experts and slots as batch dims.

    counts = how many tokens chose each expert            given once a layer, by the first call that sends
    limit  = C, if an expert was shown to fill as many of its C slots as tokens chose it, and no more
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from torch import fx

from passes.errors import PlanError
from passes.moe import exchange
from passes.moe.domain import Domain
from passes.moe.layers import Dispatch, ExpertLayer, check_draws
from passes.moe.opening import Opening, RunsOpening
from passes.moe.opening_branches import LoopOpening
from passes.moe.ties import Pick, pick_of
from passes.program.builder import Builder, erase_unread
from passes.program.ops.aten import aten, dim_of_cat, shape_of
from passes.program.ops.groups import JOINS, LAID_OUT
from passes.program.walks import operands, walk
from passes.rules.follow import follow

MIXED = "the result of one slot of one expert depends on others"


class OfSlots(Opening):
    """Owns the names of what was ``sent``, and ``limit``, which is known then. ``inside``: calls on slots; ``entries``:
    values that they read from outside, with the first reader."""

    FIX = "compute each slot with only its expert, with separate dims for experts and slots"
    sent: tuple[str, ...] = ()
    limit = 0
    inside: set[fx.Node]
    entries: dict[fx.Node, fx.Node]

    def send(self, build: Builder, value: fx.Node, experts: int, slots: int) -> fx.Node:
        """Return the slots of ``value`` on the ranks of their experts."""
        given = ()
        if not self.sent:
            self.limit, groups = self._filled(value, shape_of(value)[slots])
            takes, size = self.layer.dispatch is Dispatch.TAKEN, self.layer.num_experts
            counting = (exchange.count_taken, size) if takes else (exchange.count_by_group, size, groups)
            given = (build.call(*counting, *self.routing.chosen),)
        domain = Domain(experts=experts, slots=slots)
        sent = build.call(exchange.send_slots, value, experts, slots, *given, domain=domain)
        self.sent += (sent.name,)
        return sent

    def with_slots(self) -> ExpertLayer:
        """Return the layer with the names of the calls that send slots."""
        return replace(self.layer, sent=self.sent, limit=self.limit, tips=())

    def slot_dims(self, first: Sequence[fx.Node], experts: int) -> dict[fx.Node, int]:
        """Return the dim of slots of every value, found from one of the dims of the ``first`` beside that of
        ``experts``. If all calls keep several, the last."""
        refused = self.refusal(first[0], "its experts have no slots")
        for dim in reversed([d for d in range(len(shape_of(first[0]))) if d != experts]):
            try:
                found = follow(dict.fromkeys(first, dim), self.inside, self.refusal, MIXED)
                self.check_known(found, "has no slots, or only some of them")
                return found
            except PlanError as error:
                refused = error
        raise refused

    def check_known(self, known: dict[fx.Node, int], why: str) -> None:
        for value in (*sorted(self.inside), *self.entries):
            if value not in known:
                is_lost = value not in self.entries and any(n in known for n in value.all_input_nodes)
                told = MIXED if is_lost else f"{value.name} {list(shape_of(value))} {why}"
                raise self.refusal(self.entries.get(value, value), told)

    def _filled(self, value: fx.Node, size: int) -> tuple[int, int]:
        """Return (slots of an expert for a group of tokens, number of groups) if as many are filled as tokens chose the
        expert, else (0, 1). ``size``: the slots of an expert in ``value``, maybe of several groups."""
        weighing = map(self.program.node, self.layer.probs)
        for node in () if self.layer.dispatch is Dispatch.TAKEN else (*weighing, value):
            for slots in sorted({n for n in (size, *shape_of(node)) if n and size % n == 0}, reverse=True):
                groups = self.routing.groups_filled(node, slots)
                if groups and (slots == size or slots * groups == size):
                    return slots, groups
        return 0, 1


# ---- stacks


class SlotOpening(OfSlots, RunsOpening):
    HELD = "slots"

    def run(self) -> ExpertLayer:
        experts = follow(self.stacks, (self.inside | self.of_stacks) - set(self.stacks), self.refusal, MIXED)
        self.check_known(experts, "has no dim of experts")
        first = next(iter(self.entries))
        slots = self.slot_dims([first], experts[first])
        self.enter(lambda value, build: self.send(build, value, experts[value], slots[value]))
        self.leave(lambda node, build: build.call(exchange.return_slots, node, experts[node], slots[node]))
        self.mark(experts, lambda node: Domain(experts=experts[node], slots=slots[node]))
        return self.with_slots()


# ---- branches


class SlotBranchOpening(OfSlots, LoopOpening):
    """The opening of branches on slots. Owns for each expert its part of the slots."""

    def run(self) -> ExpertLayer:
        self.join = self._joined()
        self.hold_weights()
        self.parts = [self._part(e) for e in range(self.layer.num_experts)]
        self.inside, self.entries = {n for body in self.bodies for n in body}, {}
        first = self.parts[0]
        readers = {user for p in self.parts for user in p.node.users}
        if len({(p.whole, p.dim) for p in self.parts}) > 1 or not readers <= self.inside:
            raise self.refusal(self.join, "their branches read slices of several values")
        slots = self.slot_dims([p.node for p in self.parts], first.dim)
        build = Builder(self.graph, min(p.node for p in self.parts), first.whole)
        sent = self.send(build, first.whole, first.dim, slots[first.node])
        for number in range(self.num_here):
            self._replace(sent, number, slots)
        self.mark_weights()
        self._join(slots)
        erase_unread(self.graph, [self.join, *(p.node for p in self.parts)])
        return self.with_slots()

    # ---- facts

    def _joined(self) -> fx.Node:
        """Return the call that concatenates all experts' results, in their order."""
        join = next(iter(self.every[0].users))
        is_all = join.target in JOINS and list(join.args[0]) == self.every  # pyright: ignore
        if not is_all or any(len(tip.users) != 1 for tip in self.every):
            raise self.refusal(self.every[0], "their results for slots are not combined with one cat or stack")
        return join

    def _part(self, number: int) -> Pick:
        """Return the part of the slots of a branch; calls that lay it out join the branch."""
        body, found = {*self.bodies[number]}, dict[Pick, None]()
        read = [v for n in self.bodies[number] for v in n.all_input_nodes if v not in body | self.weights[number]]
        for node in walk(read, operands, stop=lambda n: n.target not in LAID_OUT):
            part = pick_of(node)
            if node.target in LAID_OUT:
                body.add(node)
            elif part and part.number == number and shape_of(part.whole)[part.dim] == self.layer.num_experts:
                found[part] = None
            else:
                raise self.refusal(min(body), f"it reads {node.name}, which is not a slice of all slots")
        if len(found) != 1:
            raise self.refusal(self.tips[number][0], "a branch reads more than its slice of all slots")
        check_draws(body, "slots", self.refusal)
        self.bodies[number] = sorted(body)
        return next(iter(found))

    # ---- the rewrite

    def _replace(self, sent: fx.Node, number: int, slots: dict[fx.Node, int]) -> None:
        """Let one branch compute the slots that are on its rank."""
        part, body = self.parts[number], self.bodies[number]
        build, domain = Builder(self.graph, body[0], part.node), Domain(slots=slots[part.node])
        part.node.replace_all_uses_with(build.call(exchange.slots_of, sent, part.dim, number, True, domain=domain))
        own = self.own_members(body[0], number)
        for node in body:
            node.meta["domain"] = Domain(slots=slots[node] if node in self.inside else -1)
            for weight in [n for n in node.all_input_nodes if n in own]:
                node.replace_input_with(weight, own[weight])

    def _join(self, slots: dict[fx.Node, int]) -> None:
        """Replace the join: results with a dim of experts, sent back to the slots' own ranks."""
        build = Builder(self.graph, self.join, self.join)
        dim, shape = dim_of_cat(self.join), list(shape_of(self.every[0]))
        at, tips = slots[self.every[0]], list(chain(*self.tips[: self.num_here]))
        if shape[dim] != 1 or at == dim:  # behind each other in a dim that they have
            shape.insert(dim, 1)
            at += at >= dim
            tips = [build.call(aten.reshape.default, t, shape, domain=Domain(slots=at)) for t in tips]
        shape[dim] = self.layer.num_experts
        val = tips[0].meta["val"].new_empty(shape, device="meta")
        made = build.call(exchange.join, *tips, dim=dim, val=val, domain=Domain(experts=dim, slots=at))
        back = build.call(exchange.return_slots, made, dim, at)
        if tuple(shape) != shape_of(self.join):
            back = build.call(aten.reshape.default, back, list(shape_of(self.join)))
        self.join.replace_all_uses_with(back)
