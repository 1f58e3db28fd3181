"""Opens a captured graph at stacks of experts that multiply every token, or are looked up for each token.

    made[t, e] = f(x[t], W[e])          for all experts: results that a token did not choose are zero by its gate, or
    not picked made[t, j] = f(x[t], W[chosen[t, j]])

Either is rewritten for the pairs of a token and an expert that it chose, sorted by expert: rows [n, features..],
products of stacks as grouped products, between ``dispatch`` and ``give_back`` (passes/moe/exchange.py).
"""

from collections.abc import Iterable, Mapping
from math import prod

from torch import fx

from passes.moe import exchange
from passes.moe.domain import STACK, Domain
from passes.moe.layers import Dispatch, ExpertLayer, check_draws
from passes.moe.opening import Exchange, Layers, StackOpening
from passes.moe.pair_ops import HeldRows, PairOps, stack_of
from passes.moe.ties import is_number, lookup
from passes.moe.token_rows import Counts, Layout, Part, followed
from passes.program.builder import Builder
from passes.program.ops.aten import aten, is_random, packet_of, reduced_dims, shape_of
from passes.program.ops.groups import PRODUCTS
from passes.program.program import Program
from passes.program.walks import between, in_order, readers, walk
from passes.program.weights import is_weight
from passes.rules.follow import stays_zero
from passes.rules.moves import reshape
from passes.rules.rule import RESULT, Call, operands_of
from passes.rules.table import rule_of

MOST = 400  # calls of one layer


class PairOpening(StackOpening):
    """Owns ``way``: calls that depend on the stacks; ``zero``: values that are zero for experts not chosen."""

    FIX = "compute each token with only its experts, weighted by its router weights"

    def __init__(self, program: Program, layer: ExpertLayer, layers: Layers, ep: int) -> None:
        super().__init__(program, layer, layers, ep)
        self.combined, self.logits = program.node(layer.combined), program.node(layer.logits)
        calls = {u for n in self.of_stacks for u in n.users}
        self.looked_up = {u: found for u in calls if (found := lookup(u)) and self.routing.are_choices(found[2])}
        held = self.of_stacks | self.looked_up.keys()
        self.seeds = {u for n in held for u in n.users} - held - self.apart
        self.way = sorted(between(self.seeds, [self.combined], self._is_mine))
        self.top_k, self.num_tokens = self.routing.top_k, self.routing.num_tokens
        self.scored = self._below([self.logits, *map(program.node, layer.router)])
        self.by_choices = self._below(self.routing.chosen)
        self.zero: set[fx.Node] = set()

    def run(self) -> ExpertLayer:
        self.check_distinct()
        check_draws(self.way, "rows", self.refusal)
        end = self._end()
        build = self.build = Builder(self.graph, end, end)
        self.exchange = Exchange(build, self.routing)
        self.ops = PairOps(self.exchange, self.refusal)
        dims = self.stack_dims()
        self._hold_stacks(dims)
        whole, here = self._whole(end), self.exchange.here
        for node, dim in dims.items():  # nothing is refused from here on: a layer that is not opened has no marks
            node.meta["domain"] = Domain(experts=dim)
        products = [n.name for n in self.graph.nodes if n.target is exchange.grouped_mm and n.args[2] is here]
        return self.replaced(end, whole, dispatch=Dispatch.CHOSEN, products=tuple(products))

    # ---- facts

    def _below(self, nodes: Iterable[fx.Node]) -> set[fx.Node]:
        return set(walk(nodes, readers, into=lambda n: n <= self.combined and self._is_mine(n)))

    def _is_mine(self, node: fx.Node) -> bool:
        return node not in self.apart

    def _end(self) -> fx.Node:
        """Return the pick of experts' values, or the last reader of stacks by ids, or the sum over experts."""
        last = [n for n in self.way if n in self.seeds and self.seeds & self._below([n]) == {n}]
        ends = [n for n in self.way if self._is_pick(n)] or (last if self.looked_up else [self.combined])
        if len(ends) != 1:
            raise self.refusal(self.combined, f"their results are combined in {len(ends)} places")
        inside = between(self.seeds, ends, self._is_mine)
        left = [n for n in sorted(inside) if n not in ends and any(u not in inside for u in n.users)]
        beside = [s for s in sorted(self.seeds) if s not in inside]
        if left or beside:
            raise self.refusal([*left, *beside][0], "a per-expert result is also read elsewhere")
        return ends[0]

    def _is_pick(self, node: fx.Node) -> bool:
        """Return whether a call takes, of the values of all experts, those of the chosen."""
        if packet_of(node.target) is not aten.gather or node.args[0] not in self.way:
            return False
        index, dim = node.args[2], int(node.args[1])  # pyright: ignore
        if not isinstance(index, fx.Node) or shape_of(node.args[0])[dim] != self.layer.num_experts:  # pyright: ignore
            return False
        lead = prod(shape_of(index)[: dim % len(shape_of(index))])
        return lead == self.num_tokens and self.routing.are_choices(index)

    # ---- values

    def _hold_stacks(self, dims: Mapping[fx.Node, int]) -> None:
        """Hold stacks and values made of them, with their ``dims`` of experts, and lookups of ids in them."""
        for node, dim in dims.items():
            if any(u in self.way or u in self.looked_up for u in node.users):
                self.ops.held[node] = stack_of(self.build, node, dim)
        for node, (table, dim, ids) in sorted(self.looked_up.items()):
            if dim != dims[table] or prod(shape_of(ids)) != self.routing.num_rows:
                raise self.refusal(node, "ids look up something other than experts")
            rule, by_choice = rule_of(node), self._by_choice(shape_of(ids))
            at, ndim = operands_of(node).index(ids), len(shape_of(node))
            layout = rule and by_choice and followed(rule, {at: by_choice}, ndim)
            if layout is None:
                raise self.refusal(node, "ids look up experts in an unsupported order")
            stack = self.ops.held[table].node
            stack = self.ops.shaped(stack, [shape_of(stack)[0], *layout.features(shape_of(node))], STACK)
            self.ops.held[node] = HeldRows(stack, layout, is_stack=True)

    def _by_choice(self, shape: tuple[int, ...]) -> Layout | None:
        """Return the layout of a value [tokens.., choices], or with both in one dim, or with features behind them."""
        whole = Layout.of([self.num_tokens], [Part(Counts.CHOICES, self.top_k)], [prod(shape) // self.routing.num_rows])
        flat = (self.num_tokens, self.top_k, prod(shape) // self.routing.num_rows)
        rule = reshape(Call(self.combined, (self.combined,), (flat,), shape))
        return followed(rule, {0: whole}, len(shape)) if rule is not None else None

    def _rows_of(self, node: fx.Node) -> None:
        """Bring, or make again, all that ``node`` is made of, and ``node`` itself."""
        inside = set(self.way)
        is_end = lambda n: self._is_ready(n) or (n not in inside and self._enters(n))  # noqa: E731
        above = lambda n: () if is_end(n) else n.all_input_nodes  # noqa: E731
        for count, value in enumerate(in_order([node], step=above)):
            if self._is_ready(value):
                continue
            if count > MOST or value.op != "call_function" or is_weight(value):
                raise self.refusal(node, f"experts share {value.name}, which does not belong to one token")
            if is_random(value) or not any(n in self.ops.held for n in value.all_input_nodes):
                raise self.refusal(value, f"{value.name} {list(shape_of(value))} has no dim of tokens")
            self.ops.held[value] = self.ops.again(value)
            if stays_zero(value, self.zero):
                self.zero.add(value)

    def _is_ready(self, node: fx.Node) -> bool:
        return node in self.ops.held or is_number(node)

    def _enters(self, node: fx.Node) -> bool:
        """Bring a value of tokens, if it is seen to be one, to the ranks of their experts; return whether it is."""
        if is_weight(node):
            return False
        shape, x, num_experts = shape_of(node), self.exchange, self.layer.num_experts
        leads = [d for d in range(1, len(shape) + 1) if prod(shape[:d]) == self.num_tokens]
        both = [d for d in range(1, len(shape) + 1) if prod(shape[:d]) == self.routing.num_rows]
        counts = {shape[d] for d in leads if d < len(shape)} if node in self.scored else set[int]()
        if num_experts in counts:
            is_gate = self.routing.lets_through([node], self.num_tokens, range(num_experts))
            if not is_gate and node in self.by_choices:
                return False
            self.zero |= {node} if is_gate else set()
            lead = next(d for d in leads if shape[d : d + 1] == (num_experts,))
            layout = Layout.of(shape[:lead], [Part(Counts.EXPERTS, num_experts)], shape[lead + 1 :])
            return self._bring(node, layout, [self.num_tokens, *shape[lead:]], x.token, x.expert)
        if leads and (self.top_k == 1 or self.top_k not in counts):
            layout = Layout.of(shape[: leads[0]], features=shape[leads[0] :])
            return self._bring(node, layout, [self.num_tokens, *shape[leads[0] :]], x.token)
        layout = self._by_choice(shape) if both else None
        return layout is not None and self._bring(node, layout, [self.routing.num_rows, *shape[both[0] :]], x.order)

    def _bring(self, node: fx.Node, layout: Layout, flat: list[int], *index: fx.Node) -> bool:
        rows = self.exchange.bring(node, flat, *index)
        self.ops.held[node] = HeldRows(self.ops.shaped(rows, self.ops.row_shape(layout, shape_of(node))), layout)
        return True

    # ---- the end

    def _at_end(self, end: fx.Node) -> tuple[fx.Node, Layout]:
        """Return the rows that are given back, and the layout of the values that they stand for."""
        is_gathered = packet_of(end.target) is aten.gather
        for n in [end] if self.looked_up else end.all_input_nodes[:1] if is_gathered else end.all_input_nodes:
            self._rows_of(n)
        if self.looked_up:
            return self.ops.held[end].node, self.ops.held[end].layout
        if not is_gathered and not any(n in self.zero for n in end.all_input_nodes):
            raise self.refusal(end, "a token may get a result from an expert that it did not choose")
        return self._summed_product(end) if end.target in PRODUCTS else self._of_experts(end)

    def _of_experts(self, end: fx.Node) -> tuple[fx.Node, Layout]:
        """Return the rows of a pick among experts, or of a sum over them alone: each row is a part of it."""
        source = end.all_input_nodes[0]
        held, same = self.ops.held[source], end.meta["val"].dtype == source.meta["val"].dtype
        dim = held.layout.dim_of(Counts.EXPERTS)
        if packet_of(end.target) not in (aten.gather, aten.sum) or reduced_dims(end) != {dim} or not same:
            raise self.refusal(end, "the results of experts are not summed directly")
        return held.node, held.layout.without(dim)

    def _summed_product(self, end: fx.Node) -> tuple[fx.Node, Layout]:
        rule, factors = rule_of(end), self.ops.factors_of(end)
        given = {i: held.layout for i, held in enumerate(factors)}
        summed = [f for f in rule.factors if f.size > 1 and f.at(RESULT) is None] if rule is not None else []
        layout = followed(rule, given, len(shape_of(end)), summed=Counts.EXPERTS) if rule is not None else None
        if rule is None or layout is None or len(summed) != 1 or any(h.is_stack for h in factors):
            raise self.refusal(end, "the results of experts are not weighted and summed directly")
        return self.ops.multiplied(end, rule, layout), layout

    def _whole(self, end: fx.Node) -> fx.Node:
        """Return the value of ``end``, from its rows: as they are, or summed over a token's choices."""
        made, layout = self._at_end(end)
        if not layout.is_by_token():
            raise self.refusal(end, "the results of experts are not in the order of the tokens")
        rows = self.exchange.returned(made, summed=not self.looked_up and packet_of(end.target) is not aten.gather)
        if prod(shape_of(end)) != rows.meta["val"].numel():
            raise self.refusal(end, "the results of experts do not have one value per token")
        return self.build.call(aten.reshape.default, rows, list(shape_of(end)))
