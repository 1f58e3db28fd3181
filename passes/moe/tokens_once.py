"""Tokens go once to each rank of their experts, not once for each expert, and come back summed.

    dispatch(x[token], here)                          →   dispatch_tokens(x, token, here)
    w · give_back(rows, here), in the order of
    the pairs, summed over a token's choices          →   combine(rows · dispatch(w, here), token, here, t)

Weights that are wider than the rows make products and sums so wide; the sums travel in the rows' dtype. A layer that
sums otherwise returns row by row; one with values that are no copies of tokens sends row by row. How a model adds up
the results of a token's rows is seen in its graph:

    rows [n, h] by expert → (· w) → in the order of the pairs → [t, k, h] → (· w) → Σ over k         or w @ rows
                          → (· w) → added at the tokens of the rows
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from passes.moe import exchange
from passes.moe.domain import ROWS, STACK
from passes.moe.layers import ExpertLayer
from passes.moe.opening import Opening
from passes.moe.routing import Routing
from passes.program.builder import Builder, erase_unread
from passes.program.ops.aten import aten, named, packet_of, reduced_dims, shape_of, without_reshapes
from passes.program.ops.groups import CASTS, RESHAPES
from passes.program.program import Program
from passes.program.walks import readers, walk


def send_tokens_once(program: Program, layer: ExpertLayer, nodes: int) -> ExpertLayer:
    """Rewrite an opened ``layer`` if a token has several experts; ep spans ``nodes``. Returns it with the new calls."""
    for here in program.graph.graph.find_nodes(op="call_function", target=exchange.meet):
        if tuple(n.name for n in here.args[0].all_input_nodes) == layer.chosen and len(here.args) == 2:
            return _TokensOnce(program, layer).rewrite(here, nodes)
    return layer


class _TokensOnce(Opening):
    def _copy(self, node: fx.Node) -> tuple[fx.Node, fx.Node, int] | None:
        """Return (tokens, index, times) of a dispatch: its row i is a copy of token ``index``[i] // ``times``."""
        rows: Any = node.args[0] if node.target is exchange.dispatch else None
        if rows is None or rows.target is not aten.index.Tensor or not shape_of(rows)[1:]:
            return None
        index, source, times = only_index(rows), rows.args[0], 1
        if index is not None and shape_of(source)[0] != self.routing.num_tokens:
            times = self.routing.top_k
            source = _repeated(source, self.routing.num_tokens, times)
        return None if index is None or source is None else (source, index, times)

    def rewrite(self, before: fx.Node, nodes: int) -> ExpertLayer:
        """Rewrite the layer. ``before``: the call of ``meet`` that knows no tokens."""
        num_tokens = self.routing.num_tokens
        copies = {node: found for node in before.users if (found := self._copy(node)) is not None}
        places = {(index, times) for _, index, times in copies.values()}
        first = min(before.users)
        if self.routing.top_k == 1 or len(places) != 1 or not max(places)[0] < first:
            return self.layer
        ((token, times),) = places
        build = Builder(self.graph, first, before)
        token = token if times == 1 else build.call(aten.floor_divide.default, token, times)
        here = build.call(exchange.meet, *before.args, token, num_tokens, nodes, domain=STACK)
        before.replace_all_uses_with(here)
        self.graph.erase_node(before)
        for node, (tokens, *_) in copies.items():
            at = Builder(self.graph, node, node)
            value = at.call(aten.reshape.default, tokens, [num_tokens, *shape_of(node)[1:]])
            node.replace_all_uses_with(at.call(exchange.dispatch_tokens, value, token, here, domain=ROWS))
            erase_unread(self.graph, [node])
        backs = [node for node in here.users if node.target is exchange.give_back]
        found = sum_of(backs[0], self.routing) if len(backs) == 1 else None
        if found is None or not found.is_by(token, self.routing):
            return self.layer
        return self._summed(found, backs[0], token)

    def _summed(self, found: RowSum, back: fx.Node, token: fx.Node) -> ExpertLayer:
        """Sum the results of experts by token, weighted on their ranks."""
        rows: Any
        rows, here = back.args
        end, size, dtype = found.end, self.routing.num_tokens, rows.meta["val"].dtype
        build = Builder(self.graph, end, end)
        for weight in self._weights(build, found):
            sent = build.call(exchange.dispatch, weight, here, domain=ROWS)
            shape = [self.routing.num_rows, *(1 for _ in shape_of(rows)[1:])]
            sent = build.call(aten.reshape.default, sent, shape, domain=ROWS)
            rows = build.call(aten.mul.Tensor, rows, sent, domain=ROWS)
        whole = build.call(exchange.combine, rows, token, here, size, dtype)
        whole = build.call(aten.reshape.default, whole, list(shape_of(end)))
        if end.meta["val"].dtype != dtype:
            whole = build.call(aten.to.dtype, whole, end.meta["val"].dtype)
        whole = whole if found.base is None else build.call(aten.add.Tensor, found.base, whole)
        return self.replaced(end, whole)

    def _weights(self, build: Builder, found: RowSum) -> Iterator[fx.Node]:
        """Yield each weight [n], in the order of the rows."""
        for weight in found.by_row:
            yield build.call(aten.reshape.default, weight, [self.routing.num_rows])
        for weight in found.by_pair:
            pairs = build.call(aten.reshape.default, weight, [self.routing.num_rows])
            order = build.call(getitem, build.call(aten.sort.stable, found.inverse, stable=True), 1)
            yield build.call(aten.index.Tensor, pairs, [order])


def _repeated(value: fx.Node, num_tokens: int, times: int) -> fx.Node | None:
    """Return the tokens that ``value`` [num_tokens · times, …] repeats, each as often."""
    node = without_reshapes(value)
    if node.target is not aten.expand.default:
        return None
    tokens: Any = node.args[0]
    before, after = shape_of(tokens), shape_of(node)
    dims = [d for d in range(len(after)) if before[d] != after[d]]
    if len(dims) != 1 or after[dims[0]] != times or prod(after[: dims[0]]) != num_tokens:
        return None
    return tokens if prod(after[dims[0] + 1 :]) == prod(shape_of(value)[1:]) else None


# ---- how a model adds up the rows of a token


@dataclass(frozen=True)
class RowSum:
    """A sum of the rows of each token. ``end``: the value of tokens, to which ``base`` was added. ``inverse``: the
    place of each pair among the rows, or ``token``: that of each row. Weights are factors, one of each row: ``by_row``
    in the order of rows, ``by_pair`` in the order of the pairs."""

    end: fx.Node
    by_row: tuple[fx.Node, ...] = ()
    by_pair: tuple[fx.Node, ...] = ()
    inverse: fx.Node | None = None
    token: fx.Node | None = None
    base: fx.Node | None = None

    def is_by(self, token: fx.Node, routing: Routing) -> bool:
        """Return whether exactly the rows of each token are added up, each once, ``token`` being that of each row."""
        if self.token is token:
            return True
        given = self.token or self.inverse
        assert given is not None

        def adds(found: list[Tensor], _: Tensor, __: list[Tensor]) -> bool:
            given, of_row = found
            if self.token is not None:
                return given.equal(of_row)
            pairs = torch.arange(routing.num_rows).to(given.dtype)
            return given.sort().values.equal(pairs) and of_row[given].equal((pairs // routing.top_k).to(of_row.dtype))

        return routing.holds([given, token], adds)


def sum_of(rows: fx.Node, routing: Routing) -> RowSum | None:
    """Return the sum that alone reads ``rows``, through weights and orders; None if they are used otherwise."""
    found, node = RowSum(rows), rows
    while len(node.users) == 1 and found.end is rows:
        (user,) = node.users
        step = _step(found, node, user, routing)
        if step is None:
            return None
        found, node = step, user
    dtype = rows.meta["val"].dtype
    is_whole = found.end is not rows and (found.end.meta["val"].dtype == dtype or _is_cast(found, dtype))
    return found if is_whole else None


def _is_cast(found: RowSum, dtype: torch.dtype) -> bool:
    """Return whether a sum that is wider than the rows is read in their dtype alone, and is a sum of them alone."""
    below = set(walk(found.end.users, readers, stop=lambda n: n.target not in RESHAPES))
    ends = [n for n in below if n.target not in RESHAPES]
    has_base = found.base is not None and bool(found.base.all_input_nodes)
    return not has_base and all(n.target in CASTS and n.meta["val"].dtype == dtype for n in ends)


def _step(found: RowSum, node: fx.Node, user: fx.Node, routing: Routing) -> RowSum | None:
    packet, is_paired = packet_of(user.target), found.inverse is not None
    weight = _weight(node, user, routing.num_rows)
    if weight is not None:
        by_row, by_pair = ((), (weight,)) if is_paired else ((weight,), ())
        return replace(found, by_row=(*found.by_row, *by_row), by_pair=(*found.by_pair, *by_pair))
    if user.target is aten.index.Tensor and not is_paired:
        index = only_index(user)
        return replace(found, inverse=index) if index is not None and user.args[0] is node else None
    if packet is aten.index_add and not is_paired:
        given = named(user)
        is_sum = given["source"] is node and given["dim"] == 0 and given["alpha"] == 1
        is_by_token = is_sum and shape_of(user)[0] == routing.num_tokens
        return replace(found, end=user, token=given["index"], base=given["self"]) if is_by_token else None
    if packet is aten.reshape and is_paired:
        return found
    if packet is aten.sum and is_paired and _is_over_choices(node, user, routing):
        return replace(found, end=user)
    if packet is aten.bmm and is_paired and user.args[1] is node:
        weights, values = (shape_of(n) for n in user.all_input_nodes)
        is_of_choices = weights[1:] == (1, routing.top_k) and values[1] == routing.top_k
        if not is_of_choices or prod(weights) != routing.num_rows:
            return None
        return replace(found, end=user, by_pair=(*found.by_pair, user.args[0]))  # pyright: ignore[reportArgumentType]
    return None


def _weight(node: fx.Node, user: fx.Node, num_rows: int) -> fx.Node | None:
    """Return the factor of ``node``, a number for each row, that keeps its shape and rounds it to no narrower dtype."""
    if user.target is not aten.mul.Tensor or len(user.all_input_nodes) != 2:
        return None
    (weight,) = (n for n in user.all_input_nodes if n is not node)
    shape, own = shape_of(node), shape_of(weight)
    leads = [d for d in range(1, len(shape) + 1) if prod(shape[:d]) == num_rows]
    dtype = user.meta["val"].dtype
    same = shape_of(user) == shape and torch.promote_types(dtype, node.meta["val"].dtype) == dtype
    return weight if same and any(own == shape[:d] + (1,) * (len(shape) - d) for d in leads) else None


def only_index(user: fx.Node) -> fx.Node | None:
    """Return the index of a lookup along the first dim alone."""
    indices: Any = user.args[1]
    return indices[0] if len(indices) == 1 and len(shape_of(indices[0])) == 1 else None


def _is_over_choices(node: fx.Node, user: fx.Node, routing: Routing) -> bool:
    shape, dims = shape_of(node), reduced_dims(user)
    if len(dims) != 1 or user.meta["val"].dtype != node.meta["val"].dtype:
        return False
    (dim,) = dims
    return shape[dim] == routing.top_k and prod(shape[: dim + 1]) == routing.num_rows
