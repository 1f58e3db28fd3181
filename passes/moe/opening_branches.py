"""A captured graph is opened at experts that are branches of their own: each gets the rows that chose it, no others.

    combined[t] = Σ_e tip_e[t]        tip_e = g_e · branch_e(x),  g_e[t] = 0 where t did not choose e

    order = argsort(chosen), rows = x[order // k], gates = stack(g)[chosen[order], order // k]
    rows, gates → dispatch → part e → branch e, as it is written → join → give_back → back in order, summed over k

Every ep rank runs the branches of its experts alone: the graph has as many as each rank has experts, and they read the
weights of any. So all ranks run one graph; the weights keep their names. Of an expert its parameters and its parts of
stacks are known:

    self.up[e].weight      a parameter            own_member(up[e], up[e + E/ep], …)
    w1[e], w1.unbind(0)[e]                        a slice w1[e:e + 1] of the rank's own
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from torch import fx

from passes.moe import exchange
from passes.moe.branch_facts import bared, check_hidden, end_of, hides_nothing, is_true, weight_of
from passes.moe.domain import ROWS, Domain
from passes.moe.layers import Dispatch, ExpertLayer, ExpertWeight
from passes.moe.opening import Exchange, Layers, Opening, made_of
from passes.moe.ties import Pick, picks
from passes.moe.token_rows import DroppedRows, TokenRows
from passes.program.builder import Builder, erase_unread
from passes.program.ops.aten import aten, has_floats, shape_of, without_reshapes
from passes.program.ops.groups import FILLED, PRODUCTS, Ops
from passes.program.program import Program
from passes.program.walks import between
from passes.program.weights import is_weight
from passes.rules.follow import stays_zero

STOPPING = FILLED | Ops("detach")  # no gradient goes through them
AT_ONCE = 1 << 22  # elements of gates in a trial


class LoopOpening(Opening):
    """Owns the branches: for each expert the ``tips`` that it ends in, its ``weights`` with values made of them alone,
    and its ``bodies``: calls that read these, in the graph's order."""

    def __init__(self, program: Program, layer: ExpertLayer, layers: Layers, ep: int) -> None:
        super().__init__(program, layer, layers, ep)
        self.every = [program.node(name) for name in layer.tips]
        each = len(self.every) // layer.num_experts
        self.tips = [self.every[e * each : (e + 1) * each] for e in range(layer.num_experts)]

    def hold_weights(self) -> None:
        """Find the weights and the bodies. Raises the error of the refusal for a stack with another reader."""
        parts = [self._parts_of(weight) for weight in self.layer.weights]
        self.weights = [made_of(chain(*own)) for own in zip(*parts, strict=True)]
        self.check_named(chain(*self.weights))
        self.bodies = [
            sorted(between(weights, tips, lambda n: n not in self.apart) - weights)
            for weights, tips in zip(self.weights, self.tips, strict=True)
        ]

    def _parts_of(self, weight: ExpertWeight) -> list[list[fx.Node]]:
        """Return for each expert the nodes that have its part."""
        if weight.dim < 0:
            own = map(self.program.node, weight.nodes)  # a layer applied before reads the first by own_member
            return [[n, *(u for u in n.users if u.target is exchange.own_member and u.args[0] is n)] for n in own]
        stack = self.program.node(weight.nodes[0])
        parts: list[list[fx.Node]] = [[] for _ in range(self.layer.num_experts)]
        for pick in sorted(picks(stack, weight.dim), key=lambda pick: pick.node):
            parts[pick.number].append(self._as_slice(pick))
        if not self.alone:
            self.check_read([stack], [*chain(*parts)])
            stack.meta["domain"] = Domain(experts=weight.dim)
        return parts

    def own_members(self, place: fx.Node, number: int) -> dict[fx.Node, fx.Node]:
        """Return the parameters of one of the rank's experts, each with its counterparts on all ranks: read by values
        made of it, and to be read by the branch. ``place``: before the first reader."""
        found: dict[fx.Node, fx.Node] = {}
        for weight in self.layer.weights if self.num_here < self.layer.num_experts else ():
            if weight.dim < 0:
                own, *others = [self.program.node(name) for name in weight.nodes[number :: self.num_here]]
                made = [n for n in own.users if n in self.weights[number] and n.target is not exchange.own_member]
                build = Builder(self.graph, min([*made, place]), self.bodies[number][0])
                found[own] = build.call(exchange.own_member, own, *others, domain=Domain())
                if len({bool(n.meta["grad"]) for n in (own, *others)}) > 1:
                    found[own] = build.call(exchange.with_gradient, found[own], domain=Domain())
                for node in made:
                    node.replace_input_with(own, found[own])
        self._pass_gradients({own for own, read in found.items() if read.target is exchange.with_gradient}, number)
        return found

    def _pass_gradients(self, weights: set[fx.Node], number: int) -> None:
        """Mark values made of weights that train on other ranks: they have a gradient on all."""
        for node in sorted({*self.weights[number], *self.bodies[number]}) if weights else ():
            passes = node.op == "call_function" and node.target not in STOPPING and "stopped" not in node.meta
            if passes and has_floats(node) and any(n in weights or n.meta["grad"] for n in node.all_input_nodes):
                node.meta["grad"] = True

    def mark_weights(self) -> None:
        for node in set().union(*self.weights):
            node.meta["domain"] = Domain()

    def _as_slice(self, pick: Pick) -> fx.Node:
        """Return the call that takes the part, as a slice; its readers get the same value."""
        if pick.node.target is aten.slice.Tensor:
            return pick.node
        build = Builder(self.graph, pick.node, pick.node)
        part = build.call(aten.slice.Tensor, pick.whole, pick.dim, pick.number, pick.number + 1)
        pick.node.replace_all_uses_with(part)
        erase_unread(self.graph, [pick.node])
        return part


class BranchOpening(LoopOpening):
    """Owns the branches' inputs from outside: columns, of each an entry for each expert. ``unhidden``: of calls under a
    mask that is True for all rows, the value under it. ``shared``: weights of no expert alone, as experts read them.
    ``of_choices``: the weights of each choice that are sent with its row.
    """

    FIX = "weight each expert's output with the router weights of its tokens, and add the results"

    def __init__(self, program: Program, layer: ExpertLayer, layers: Layers, ep: int) -> None:
        super().__init__(program, layer, layers, ep)
        self.end = end_of(self.every, self.routing, self.refusal)
        self.top_k, self.tokens = self._tokens()
        self.hold_weights()
        self.made: list[fx.Node] = []
        self.unhidden: dict[fx.Node, fx.Node] = {}
        self.of_choices: list[fx.Node] = []

    def run(self) -> ExpertLayer:
        self._check()
        columns = [column for column in self.columns if not self._hides_nothing(column)]
        shared = {n for column in columns for n in column if is_weight(n)}
        columns = [column for column in columns if not shared.issuperset(column)]
        build = self.build = Builder(self.graph, self.end.node, self.end.node)
        self.exchange = Exchange(build, self.routing, self.top_k)
        self.here = self.exchange.here
        self.shared = {n: n if self.alone else build.call(exchange.share, n, domain=Domain()) for n in sorted(shared)}
        brought = [self._bring(list(column)) for column in columns]
        names = self.dropped.names(build)
        names = names and self._bring([names])
        parts = []
        for number in range(self.num_here):
            own = {column[number]: rows for column, rows in zip(columns, brought, strict=True)}
            parts.append(self._branch(number, own, names))
        self.mark_weights()
        joined = build.call(exchange.join, *parts, val=self.tokens.val(parts[0], of_all=True), domain=ROWS)
        products = tuple(made.name for made in self.made if made.target in PRODUCTS)
        opened = self.replaced(self.end.node, self._sum(joined), dispatch=Dispatch.CHOSEN, tips=(), products=products)
        left = {node.name for node in self.graph.nodes}  # of the routing weights, those that are read
        probs = [*(name for name in self.layer.probs if name in left), *(node.name for node in self.of_choices)]
        return replace(opened, probs=tuple(dict.fromkeys(probs)))

    # ---- facts

    def _tokens(self) -> tuple[int, TokenRows]:
        """Return how many rows are of each token; and rows of the tokens, or of copies of them, one for each choice."""
        tokens = TokenRows(self.routing.num_tokens, self.routing.num_rows, self.num_here, self.refusal)
        if self.end.picks or tokens.lead(shape_of(self.every[0])):
            return self.routing.top_k, tokens
        return 1, TokenRows(self.routing.num_rows, self.routing.num_rows, self.num_here, self.refusal)

    def _entries(self, number: int) -> list[fx.Node]:
        """Return the inputs of a branch from outside, in the order of reading."""
        inside = {*self.bodies[number], *self.weights[number]}
        read = [v for node in self.bodies[number] for v in node.all_input_nodes if v not in inside]
        return list(dict.fromkeys(read))

    # ---- checks

    def _check(self) -> None:
        self.check_distinct()
        self.columns = [*zip(*map(self._entries, range(self.layer.num_experts)), strict=True)]
        if not self.end.picks:
            check_hidden(self.end, self._gates(), self.tokens.num_tokens, self.routing, self.refusal)
        self.dropped = DroppedRows(self.tokens, self.bodies, alone=self.alone)

    def _gates(self) -> dict[fx.Node, fx.Node]:
        """Return tip → an input of its branch that is zero for all tokens that did not choose its expert, and makes it
        zero. Raises the error of the refusal if there is none."""
        found = dict[fx.Node, fx.Node]()
        for column in sorted(self.columns, key=lambda column: column[0].meta["val"].numel()):
            if len(found) < len(self.every) and self._are_gates(column):
                for number, entry in enumerate(column):
                    zero = {entry}
                    for node in self.bodies[number]:
                        if stays_zero(node, zero):
                            zero.add(node)
                    for tip in zero.intersection(self.tips[number]):
                        found.setdefault(tip, entry)
        if left := sorted(set(self.every) - found.keys()):
            raise self.refusal(left[0], "a token may get a result from an expert that it did not choose")
        return found

    def _are_gates(self, column: Sequence[fx.Node]) -> bool:
        """Return whether each is zero for all tokens that did not choose its expert: of many experts in one trial."""
        step = max(1, AT_ONCE // column[0].meta["val"].numel())
        parts = (range(len(column))[start : start + step] for start in range(0, len(column), step))
        return all(
            self.routing.lets_through(column[own.start : own.stop], self.tokens.num_tokens, own) for own in parts
        )

    # ---- the rewrite

    def _hides_nothing(self, column: Sequence[fx.Node]) -> bool:
        """Return whether entries are masks that are True at all rows of an expert: its calls hide nothing by them."""
        reading = ((n, mask) for mask, body in zip(column, self.bodies, strict=True) for n in body)
        found = {node: hides_nothing(node, mask) for node, mask in reading if mask in node.all_input_nodes}
        is_inside = set(chain(*self.bodies)).issuperset(found.values())  # so None is none of them
        if not is_inside or not is_true(self.routing, self.tokens.num_tokens, column):
            return False
        self.unhidden |= found  # pyright: ignore[reportAttributeAccessIssue, reportOperatorIssue]
        return True

    def _bring(self, column: list[fx.Node]) -> fx.Node:
        """Return the rows of an entry, on the ranks of their experts. ``column``: the entry of each branch."""
        shape, x, firsts = self.tokens.flat(column[0]), self.exchange, dict[object, fx.Node]()
        bare = bared(self.routing, self.tokens.num_tokens, column)
        column = [firsts.setdefault((without_reshapes(n), shape_of(n)), n) for n in bare]  # reshaped in each branch
        if len(set(column)) == 1:
            return x.bring(column[0], shape, x.token)
        weight = weight_of(self.routing, self.tokens.num_tokens, column)
        if weight is not None:
            self.of_choices.append(weight)
            return x.bring(weight, [self.routing.num_rows, *shape[1:]], x.order)
        each = [self.build.call(aten.reshape.default, n, [1, *shape]) for n in column]
        return x.taken(self.build.call(aten.cat.default, each), x.expert, x.token)

    def _branch(self, number: int, brought: dict[fx.Node, fx.Node], names: fx.Node | None) -> fx.Node:
        """Compute one expert on the rows that chose it; return its result, flat over rows."""
        build, names = self.build, names and self._part(names, number)
        own, weights = dict[fx.Node, fx.Node](), self.shared | self.own_members(build.place, number)
        for entry, rows in brought.items():
            own[entry] = self.tokens.shaped(build, self._part(rows, number), entry)
        for place, node in enumerate(self.bodies[number]):
            if node in self.unhidden:
                own[node] = own[self.unhidden[node]]
                continue
            at = Builder(self.graph, build.place, node)
            if names is not None and node in self.dropped.nodes:
                sites = tuple(body[place].meta["draw"].site for body in self.bodies[number :: self.num_here])
                own[node] = self.dropped.dropped(at, node, own[node.all_input_nodes[0]], names, sites)
            else:
                if number == 0 and not self.tokens.keeps_tokens(node, own):  # all branches are alike
                    raise self.refusal(node, "the result of one token depends on others")
                own[node] = self.tokens.again(at, node, own, weights)
            self.made.append(own[node])
        tips = [self.tokens.flattened(build, own[tip]) for tip in self.tips[number]]
        summed = tips[0]
        for tip in tips[1:]:
            summed = build.call(aten.add.Tensor, summed, tip, domain=ROWS)
        return summed

    def _part(self, rows: fx.Node, number: int) -> fx.Node:
        return self.build.call(exchange.part, rows, self.here, number, val=self.tokens.val(rows), domain=ROWS)

    def _sum(self, joined: fx.Node) -> fx.Node:
        """Return rows in the order of the pairs, unchanged or summed over a token's choices, in place of the end."""
        end, build = self.end.node, self.build
        rows = self.exchange.returned(joined, summed=self.top_k > 1 and not self.end.picks)
        whole = build.call(aten.reshape.default, rows, list(shape_of(end)))
        for base in self.end.bases:
            whole = build.call(aten.add.Tensor, whole, base)
        return whole
