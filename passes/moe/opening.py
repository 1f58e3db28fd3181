"""The opening of a layer of experts: its choices and errors, and the calls of the exchange of rows.

    here  = meet(count_experts(chosen))                   the rows of each expert that come to this rank
    order = argsort(chosen)    token = order // k         the pairs of token and choice, by expert
    rows  = x[token], w[order], gate[token, expert]       → dispatch → experts → give_back → in the order of the pairs

A model that sorts its rows itself needs ``meet``, ``dispatch`` and ``give_back`` alone.

Values of all experts that are no stack of the layer, but are read with one, are the factors of an adapter:

    W' = baddbmm(W[E, i, o], a[E, i, r], b[E, r, o])

The stack is sharded over ep. The factors are views of weights that every rank has: each rank reads its own experts'
slices of them, and its gradient of such a weight is that of these slices.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from operator import getitem
from typing import Any

from torch import Tensor, fx

from passes.errors import PlanError
from passes.moe import exchange
from passes.moe.domain import ROWS, STACK, Domain
from passes.moe.layers import ExpertLayer, check_draws
from passes.moe.routing import Routing
from passes.moe.ties import is_number
from passes.program.builder import Builder, erase_unread
from passes.program.ops.aten import aten, shape_of
from passes.program.program import Program
from passes.program.source_lines import where_of
from passes.program.walks import between, operands, readers, walk
from passes.program.weights import is_weight
from passes.rules.follow import follow

Layers = Iterable[ExpertLayer]
OF_STACKS = "the stack of experts changes its layout"


class Opening:
    """The rewrite that puts the exchange around the calls of ``layer`` that depend on the expert. ``run`` returns the
    layer with its present calls; it raises PlanError if the layer is not understood.

    ``apart``: calls of other ``layers`` with the same weights. ``num_here``: experts on each rank of ep. ``alone``:
    rows stay on their rank (``ep`` is 0), so no other draws for them.
    """

    FIX = ""  # what to write instead

    def __init__(self, program: Program, layer: ExpertLayer, layers: Layers = (), ep: int = 0) -> None:
        self.num_here, self.alone = layer.num_experts // max(ep, 1), not ep
        self.program, self.graph, self.layer = program, program.graph.graph, layer
        self.apart = _apart_from(program, layer, layers)
        self.routing = Routing(layer.num_experts, [program.node(name) for name in layer.chosen], layer.top_k)

    def run(self) -> ExpertLayer:
        raise NotImplementedError

    def refusal(self, node: fx.Node, why: str) -> PlanError:
        """Return the error for a call that is not understood."""
        what = f"these {self.layer.num_experts} experts cannot be distributed over ep: {why}"
        return PlanError(what, where=where_of(node), fix=f"{self.FIX}, or set mesh.ep: 1")

    def replaced(self, end: fx.Node, whole: fx.Node, **changes: Any) -> ExpertLayer:
        """Return the layer with ``changes``, and with ``whole`` in the place of ``end``."""
        combined = whole.name if end.name == self.layer.combined else self.layer.combined
        end.replace_all_uses_with(whole)
        erase_unread(self.graph, [end])
        return replace(self.layer, combined=combined, **changes)

    def check_distinct(self) -> None:
        if not self.routing.are_distinct:
            raise self.refusal(self.routing.chosen[0], "its choices are not the result of one topk")

    def check_named(self, weights: Iterable[fx.Node]) -> None:
        """Raise if layout-invariant dropout draws for ``weights``, values made of weights alone."""
        if drawn := sorted(node for node in weights if "draw" in node.meta):
            error = self.refusal(drawn[0], "layout_invariant dropout has no names for elements of weights")
            raise PlanError(error.what, where=error.where, fix=f"write dropout: fast; or {error.fix}")

    def check_read(self, stacks: Iterable[fx.Node], inside: Collection[fx.Node]) -> None:
        for stack in stacks:
            if any(u not in inside for u in stack.users):
                raise self.refusal(stack, "a stack of experts is read outside the expert layer")


class StackOpening(Opening):
    """Owns ``stacks``, each with its dim of experts, and ``of_stacks``: these and values made of them alone."""

    def __init__(self, program: Program, layer: ExpertLayer, layers: Layers, ep: int) -> None:
        super().__init__(program, layer, layers, ep)
        self.stacks = _stacks_of(program, layer)
        self.of_stacks = made_of(self.stacks)
        self.check_named(self.of_stacks)

    def stack_dims(self) -> dict[fx.Node, int]:
        """Return the dim of experts of all of these."""
        return follow(self.stacks, self.of_stacks - set(self.stacks), self.refusal, OF_STACKS, every=True)


class RunsOpening(StackOpening):
    """Owns ``inside``: calls on rows or slots; ``read``: each call that reads a value from outside, and the value;
    ``entries``: these values, with the first call that reads each."""

    HELD = ""

    def __init__(self, program: Program, layer: ExpertLayer, layers: Layers, ep: int) -> None:
        super().__init__(program, layer, layers, ep)
        self.inside = self._inside()
        known = self.inside | self.of_stacks
        self.check_read(self.stacks, known | self.apart)
        check_draws(self.inside, self.HELD, self.refusal)
        read = [(node, value) for node in sorted(self.inside) for value in node.all_input_nodes if value not in known]
        self.read = [(node, value) for node, value in read if not is_number(value)]
        self.entries: dict[fx.Node, fx.Node] = {}
        for node, value in self.read:
            if is_weight(value) or not isinstance(value.meta["val"], Tensor):
                raise self.refusal(node, f"experts share {value.name}, which does not belong to one expert")
            self.entries.setdefault(value, node)

    def enter(self, bring: Callable[[fx.Node, Builder], fx.Node]) -> None:
        """Let calls inside read each entry on the ranks of its experts."""
        for value, reader in self.entries.items():
            brought = bring(value, Builder(self.graph, reader, value))
            for user in [u for u in value.users if u in self.inside]:
                user.replace_input_with(value, brought)

    def leave(self, give_back: Callable[[fx.Node, Builder], fx.Node]) -> None:
        """Let calls outside read each result on its own rank again."""
        for node in _border_of(self.inside):
            back = give_back(node, Builder(self.graph, node.next, node))
            for user in [u for u in node.users if u not in self.inside and u is not back]:
                user.replace_input_with(node, back)

    def mark(self, experts: Mapping[fx.Node, int], of: Callable[[fx.Node], Domain]) -> None:
        """Mark all values. ``experts``: that dim of values made of stacks; ``of``: the mark of a call inside."""
        for node in self.of_stacks | self.inside:
            node.meta["domain"] = of(node) if node in self.inside else Domain(experts=experts[node])

    def _inside(self) -> set[fx.Node]:
        """Return calls that read stacks, and calls between them; then calls that read only such values."""
        seeds = {u for n in self.of_stacks for u in n.users} - self.of_stacks - self.apart
        inside = between(seeds, seeds)
        while len(border := _border_of(inside)) > 1:
            after = {u for n in border for u in n.users if u.op == "call_function"} - inside
            joined = {u for u in after if inside.issuperset(u.all_input_nodes)}
            if not joined:
                break
            inside |= joined
        return inside


def _border_of(inside: set[fx.Node]) -> list[fx.Node]:
    """Return calls inside that others read, in the graph's order."""
    return [n for n in sorted(inside) if any(u not in inside for u in n.users)]


def _stacks_of(program: Program, layer: ExpertLayer) -> dict[fx.Node, int]:
    """Return the dim of experts of each stack of ``layer``, and of a rank's own slices of other weights."""
    of_weights = [(weight.nodes[0], weight.dim) for weight in layer.weights]
    return {program.node(name): dim for name, dim in (*of_weights, *layer.beside)}


# ---- the exchange of rows


class Exchange:
    """The exchange of the rows of one layer. Owns its calls, each of which is made when it is first asked for.

    ``build``: where they are made. ``top_k``: how many consecutive rows are of one token, if not one for each choice.
    """

    def __init__(self, build: Builder, routing: Routing, top_k: int = 0) -> None:
        self.build, self.routing, self.top_k = build, routing, top_k or routing.top_k

    @cached_property
    def counts(self) -> fx.Node:
        """The number of rows of each expert."""
        return self.build.call(exchange.count_experts, self.routing.size, *self.routing.chosen)

    @cached_property
    def ends(self) -> fx.Node:
        """The ends of the rows of each expert."""
        return self.build.call(aten.cumsum.default, self.counts, 0)

    @cached_property
    def here(self) -> fx.Node:
        """The rows of each expert that come to this rank, by an exchange of counts."""
        return self.build.call(exchange.meet, self.counts, self.routing.num_rows, domain=STACK)

    @cached_property
    def _flat(self) -> fx.Node:
        return self.build.call(aten.reshape.default, self.routing.chosen[0], [self.routing.num_rows])

    @cached_property
    def order(self) -> fx.Node:
        """The pairs of token and choice, by expert."""
        return self._sorted(self._flat)

    @cached_property
    def token(self) -> fx.Node:
        """The token of each row."""
        return self.build.call(aten.floor_divide.default, self.order, self.top_k)

    @cached_property
    def expert(self) -> fx.Node:
        """The expert of each row."""
        return self.build.call(aten.index.Tensor, self._flat, [self.order])

    @cached_property
    def places(self) -> fx.Node:
        """The place of each pair among the rows."""
        return self._sorted(self.order)

    def _sorted(self, values: fx.Node) -> fx.Node:
        return self.build.call(getitem, self.build.call(aten.sort.stable, values, stable=True), 1)

    def dispatch(self, rows: fx.Node, build: Builder | None = None) -> fx.Node:
        """Return rows by expert, on the ranks of their experts."""
        return (build or self.build).call(exchange.dispatch, rows, self.here, domain=ROWS)

    def bring(self, value: fx.Node, shape: list[int], *index: fx.Node) -> fx.Node:
        """Return the rows of a value in this shape, on the ranks of their experts; ``index``: of its first dims."""
        return self.taken(self.build.call(aten.reshape.default, value, shape), *index)

    def taken(self, value: fx.Node, *index: fx.Node) -> fx.Node:
        """Return the same of a value with these first dims."""
        return self.dispatch(self.build.call(aten.index.Tensor, value, list(index)))

    def give_back(self, rows: fx.Node, build: Builder | None = None) -> fx.Node:
        """Return the results of the rows, at their own places."""
        return (build or self.build).call(exchange.give_back, rows, self.here)

    def returned(self, rows: fx.Node, *, summed: bool) -> fx.Node:
        """Give the results back: return those of each pair, or ``summed`` over the choices of each token."""
        pairs = self.build.call(aten.index.Tensor, self.give_back(rows), [self.places])
        if not summed:
            return pairs
        shape = [self.routing.num_rows // self.top_k, self.top_k, *shape_of(rows)[1:]]
        return self.build.call(aten.sum.dim_IntList, self.build.call(aten.reshape.default, pairs, shape), [1])


# ---- the calls of a layer, and values made of its stacks


def _apart_from(program: Program, layer: ExpertLayer, layers: Layers) -> frozenset[fx.Node]:
    """Return the calls of other layers with weights of ``layer``: of a layer that a model applies several times."""
    held, found = {name for weight in layer.weights for name in weight.nodes}, set[fx.Node]()
    for other in layers:
        if other.tokens != layer.tokens and held & {n for w in other.weights for n in w.nodes}:
            tokens, logits, combined = map(program.node, (other.tokens, other.logits, other.combined))
            found |= between([tokens, logits], [combined]) - {tokens}
    return frozenset(found)


def made_of(stacks: Iterable[fx.Node]) -> set[fx.Node]:
    """Return stacks, and calls that read nothing else."""
    known = set(stacks)
    reading = lambda n: [u for u in n.users if u.op == "call_function" and known.issuperset(u.all_input_nodes)]  # noqa: E731
    for node in walk(known, reading):
        known.add(node)
    return known


def take_own_slices(program: Program, layer: ExpertLayer) -> ExpertLayer:
    """Rewrite ``program`` so that stacks are read with a rank's own slices; returns the layer with these."""
    made, own = made_of(_stacks_of(program, layer)), list[tuple[str, int]]()
    changed = walk([program.node(weight.nodes[0]) for weight in layer.weights], readers, into=made.__contains__)
    way = set(walk(changed, operands, into=made.__contains__))
    for name, dim in layer.beside:
        value = program.node(name)
        at = sorted(way & set(value.users))
        build = Builder(program.graph.graph, at[0], value)
        taken = build.call(exchange.own_slices, value, dim, domain=Domain(experts=dim))
        for reader in at:
            reader.replace_input_with(value, taken)
        own.append((taken.name, dim))
    return replace(layer, beside=tuple(own))
