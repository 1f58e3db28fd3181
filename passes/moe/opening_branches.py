"""A captured graph is opened at experts that are branches of their own: each gets the rows that chose it, no others.

    combined[t] = Σ_e tip_e[t]        tip_e = g_e · branch_e(x),  g_e[t] = 0 where t did not choose e

    order = argsort(chosen), rows = x[order // k], gates = stack(g)[chosen[order], order // k]
    rows, gates → dispatch → part e → branch e, as it is written → join → give_back → back in order, summed over k

Every ep rank runs the branches of its experts alone (``Domain.number``); their weights keep their names.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace

from torch import fx

from passes.moe import exchange
from passes.moe.branch_facts import Chosen, check_hidden, end_of, hides_nothing
from passes.moe.domain import ROWS, Builder, Domain, erase_unread
from passes.moe.inside import weights_of_each
from passes.moe.layers import Dispatch, ExpertLayer
from passes.moe.opening import Exchange, Opening
from passes.moe.rows import stays_zero
from passes.moe.token_rows import DroppedRows, TokenRows
from passes.program.ops.aten import aten, shape_of, without_reshapes
from passes.program.ops.products import PRODUCTS
from passes.program.program import Program
from passes.program.walks import operands, readers, walk
from passes.program.weights import is_weight


class BranchOpening(Opening):
    """Owns the branches: for each expert its ``weights`` with values made of them alone, its ``bodies`` on tokens, and
    their inputs from outside: entries, the same for all experts or one for each. ``unhidden``: of calls under a mask
    that is True for all rows, the value under it. ``shared``: weights of no expert alone, as experts read them.
    ``of_choices``: the weights of each choice that are sent with its row.
    """

    FIX = "weight each expert's output with the router weights of its tokens, and add the results"

    def __init__(self, program: Program, layer: ExpertLayer, apart: Set[fx.Node], *, alone: bool = False) -> None:
        """``alone``: every rank has all experts, so no other draws for its rows."""
        super().__init__(program, layer, apart)
        self.alone, self.top_k = alone, self.routing.top_k
        self.num_tokens = self.routing.num_rows // self.top_k
        every = [program.node(name) for name in layer.tips]
        each = len(every) // layer.num_experts
        self.tips = [every[e * each : (e + 1) * each] for e in range(layer.num_experts)]
        self.end = end_of(every, self.routing, self.refusal)
        self.tokens = self._tokens(every[0])
        self.weights = weights_of_each(program, layer, self.refusal, alone=alone)
        self.bodies = [self._body(e) for e in range(layer.num_experts)]
        self.made: list[fx.Node] = []
        self.unhidden: dict[fx.Node, fx.Node] = {}
        self.shared: dict[fx.Node, fx.Node] = {}
        self.of_choices: list[fx.Node] = []

    def run(self) -> ExpertLayer:
        self._check()
        entries = [self._entries(e) for e in range(self.layer.num_experts)]
        entries = self._without_masks(entries)
        shared = {n for own in entries for n in own if is_weight(n)}
        entries = [[n for n in own if n not in shared] for own in entries]
        build = self.build = Builder(self.graph, self.end.node, self.end.node)
        self.exchange = Exchange(build, self.routing, self.top_k)
        self.here = self.exchange.here
        self.shared = {n: n if self.alone else build.call(exchange.share, n, domain=Domain()) for n in sorted(shared)}
        brought = [self._bring(_without_repeats(column)) for column in zip(*entries, strict=True)]
        names = self.dropped.names(build)
        names = names and self._bring([names])
        parts = []
        for number, own in enumerate(entries):
            for weight in sorted(self.weights[number]):
                weight.meta["domain"] = self.tokens.domain(-1, number)
            parts.append(self._branch(number, dict(zip(own, brought, strict=True)), names))
        whole = self._sum(build.call(exchange.join, *parts, val=self.tokens.joined(parts[0]), domain=ROWS))
        products = [made.name for made in self.made if made.target in PRODUCTS]
        combined = whole.name if self.end.node.name == self.layer.combined else self.layer.combined
        found = {"products": tuple(products), "combined": combined, "probs": self._probs()}
        return replace(self.layer, dispatch=Dispatch.CHOSEN, tips=(), **found)

    def _probs(self) -> tuple[str, ...]:
        """The routing weights that are read: of each choice, or of each expert."""
        left = {node.name for node in self.graph.nodes}
        names = [*(name for name in self.layer.probs if name in left), *(node.name for node in self.of_choices)]
        return tuple(dict.fromkeys(names))

    # ---- facts

    def _tokens(self, tip: fx.Node) -> TokenRows:
        """Rows of the tokens, or of copies of them, one for each choice."""
        tokens = TokenRows(self.num_tokens, self.layer.num_experts)
        if not self.end.picks and not tokens.lead(shape_of(tip)):
            self.num_tokens, self.top_k = self.routing.num_rows, 1
            return TokenRows(self.num_tokens, self.layer.num_experts)
        return tokens

    def _body(self, number: int) -> list[fx.Node]:
        """Calls of a branch that read its weights, in the graph's order."""
        weights = self.weights[number]
        first, last = min(weights), max(self.tips[number])  # nodes of one graph are in its order: no walk beyond
        below = set(walk(weights, readers, into=lambda n: n <= last and n not in self.apart)) - weights
        return sorted(below & set(walk(self.tips[number], operands, into=lambda n: n >= first)))

    def _entries(self, number: int) -> list[fx.Node]:
        """The inputs of a branch from outside, in the order of reading."""
        inside = {*self.bodies[number], *self.weights[number]}
        read = [v for node in self.bodies[number] for v in node.all_input_nodes if v not in inside]
        return list(dict.fromkeys(read))

    # ---- checks

    def _check(self) -> None:
        self.check_distinct()
        if len({len(body) for body in self.bodies} | {0}) != 2:
            raise self.refusal(self.end.node, "their branches differ")
        if not self.end.picks:
            gates = {tip: self._gate(number, tip) for number, tips in enumerate(self.tips) for tip in tips}
            check_hidden(self.end, gates, self.num_tokens, self.routing, self.refusal)
        self.dropped = DroppedRows(self.tokens, self.bodies, self.refusal, alone=self.alone)

    def _gate(self, number: int, tip: fx.Node) -> fx.Node:
        """The input of a branch that is zero for all tokens that did not choose its expert, and makes its tip zero."""
        entries = sorted(self._entries(number), key=lambda n: n.meta["val"].numel())
        for entry in entries:
            if not self.routing.lets_through(entry, number, self.num_tokens):
                continue
            zero = {entry}
            for node in self.bodies[number]:
                if stays_zero(node, zero):
                    zero.add(node)
            if tip in zero:
                return entry
        raise self.refusal(tip, "a token may get a result from an expert that it did not choose")

    # ---- the rewrite

    def _without_masks(self, entries: list[list[fx.Node]]) -> list[list[fx.Node]]:
        """The entries but for masks that are True at all rows of an expert, under which its calls hide nothing then."""
        kept = [True] * len(entries[0])
        for place, column in enumerate(zip(*entries, strict=True)):
            found = [self._hidden_by(number, mask) for number, mask in enumerate(column)]
            if None not in found and Chosen(self.routing, self.num_tokens, column).is_true():
                kept[place] = False
                self.unhidden |= {node: value for of in found for node, value in (of or {}).items()}
        return [[entry for entry, keep in zip(own, kept, strict=True) if keep] for own in entries]

    def _hidden_by(self, number: int, mask: fx.Node) -> dict[fx.Node, fx.Node] | None:
        """Calls of a branch that read ``mask``, with the values that they would hide; None if one does otherwise."""
        found = {node: hides_nothing(node, mask) for node in self.bodies[number] if mask in node.all_input_nodes}
        inside = {*self.bodies[number]}
        if any(value is None or value not in inside for value in found.values()):
            return None
        return {node: value for node, value in found.items() if value is not None}

    def _bring(self, column: list[fx.Node]) -> fx.Node:
        """The rows of an entry, on the ranks of their experts. ``column``: the entry of each branch."""
        shape, x = self.tokens.flat(column[0], self.refusal), self.exchange
        if len(set(column)) == 1:
            return x.bring(column[0], shape, x.token)
        weight = Chosen(self.routing, self.num_tokens, column).weight()
        if weight is not None:
            self.of_choices.append(weight)
            return x.bring(weight, [self.routing.num_rows, *shape[1:]], x.order)
        each = [self.build.call(aten.reshape.default, n, [1, *shape]) for n in column]
        return x.taken(self.build.call(aten.cat.default, each), x.expert, x.token)

    def _branch(self, number: int, brought: dict[fx.Node, fx.Node], names: fx.Node | None) -> fx.Node:
        """The body of one expert on the rows that chose it; returns its result, flat over rows."""
        build, names = self.build, names and self._part(names, number)
        own: dict[fx.Node, fx.Node] = {}
        for entry, rows in brought.items():
            own[entry] = self.tokens.shaped(build, self._part(rows, number), entry, number)
        for node in self.bodies[number]:
            if node in self.unhidden:
                own[node] = own[self.unhidden[node]]
                continue
            at = Builder(self.graph, build.place, node)
            if names is not None and node in self.dropped.nodes:
                rows = own[node.all_input_nodes[0]]
                own[node] = self.dropped.dropped(at, node, rows, names, rows.meta["domain"])
            else:
                own[node] = self.tokens.again(at, node, own, self.shared, number, self.refusal)
            self.made.append(own[node])
        tips = [self.tokens.flattened(build, own[tip], number) for tip in self.tips[number]]
        summed = tips[0]
        for tip in tips[1:]:
            summed = build.call(aten.add.Tensor, summed, tip, domain=self.tokens.domain(0, number))
        return summed

    def _part(self, rows: fx.Node, number: int) -> fx.Node:
        given = {"val": self.tokens.part(rows), "domain": self.tokens.domain(0, number)}
        return self.build.call(exchange.part, rows, self.here, number, **given)

    def _sum(self, joined: fx.Node) -> fx.Node:
        """Rows in the order of the pairs, as they are or summed over a token's choices, instead of the end."""
        end, build = self.end.node, self.build
        rows = self.exchange.returned(joined, summed=self.top_k > 1 and not self.end.picks)
        whole = build.call(aten.reshape.default, rows, list(shape_of(end)))
        for base in self.end.bases:
            whole = build.call(aten.add.Tensor, whole, base)
        end.replace_all_uses_with(whole)
        erase_unread(self.graph, [end])
        return whole


def _without_repeats(column: Sequence[fx.Node]) -> list[fx.Node]:
    """The inputs of the branches, each that is another in a shape of its own replaced by the first that is so too."""
    firsts: dict[tuple[fx.Node, tuple[int, ...]], fx.Node] = {}
    return [firsts.setdefault((without_reshapes(node), shape_of(node)), node) for node in column]
