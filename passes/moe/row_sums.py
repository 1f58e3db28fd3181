"""How a model adds up the results of a token's rows, as seen in its graph.

rows [n, h] by expert → (· w) → in the order of the pairs → [t, k, h] → (· w) → Σ over k         or w @ rows
                      → (· w) → added at the tokens of the rows

Weights may be wider than the rows, as float32 beside bfloat16, if the sum is cast back to the rows' dtype.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from passes.moe.routing import Routing
from passes.program.ops.aten import aten, named, packet_of, reduced_dims, shape_of
from passes.program.ops.groups import CASTS, RESHAPES
from passes.program.walks import readers, walk


@dataclass(frozen=True)
class RowSum:
    """``end``: the value of tokens, to which ``base`` was added. ``inverse``: the place of each pair among the rows, or
    ``token``: that of each row. Weights are factors, one of each row: ``by_row`` in the order of rows, ``by_pair`` in
    the order of the pairs.
    """

    end: fx.Node
    by_row: tuple[fx.Node, ...] = ()
    by_pair: tuple[fx.Node, ...] = ()
    inverse: fx.Node | None = None
    token: fx.Node | None = None
    base: fx.Node | None = None

    def is_by(self, token: fx.Node, routing: Routing) -> bool:
        """Whether exactly the rows of each token are added up, each once, ``token`` being that of each row."""
        if self.token is token:
            return True
        given = self.token or self.inverse
        assert given is not None
        tried = [
            bool(values) and self._adds(values[given], values[token], routing)
            for values, _ in routing.tried([token, given])
        ]
        return bool(tried) and all(tried)

    def _adds(self, given: Tensor, token: Tensor, routing: Routing) -> bool:
        if self.token is not None:
            return given.equal(token)
        places = torch.arange(routing.num_rows, device=given.device)
        is_each_once = given.sort().values.equal(places.to(given.dtype))
        return is_each_once and token[given].equal((places // routing.top_k).to(token.dtype))


def sum_of(rows: fx.Node, routing: Routing) -> RowSum | None:
    """The sum that alone reads ``rows``, through weights and orders; None if they are used otherwise."""
    found, node = RowSum(rows), rows
    while len(node.users) == 1 and found.end is rows:
        (user,) = node.users
        step = _step(found, node, user, routing)
        if step is None:
            return None
        found, node = step, user
    is_whole = found.end is not rows and (
        found.end.meta["val"].dtype == rows.meta["val"].dtype or _is_cast(found, rows)
    )
    return found if is_whole else None


def _is_cast(found: RowSum, rows: fx.Node) -> bool:
    """Whether a sum that is wider than the rows is read in their dtype alone, and is a sum of them alone."""
    seen = list(walk([found.end], readers, stop=lambda n: n is not found.end and n.target not in RESHAPES))
    ends = [n for n in seen if n is not found.end and n.target not in RESHAPES]
    has_base = found.base is not None and any(isinstance(n, fx.Node) for n in tree_leaves(found.base.args))
    dtype = rows.meta["val"].dtype
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
        return _added(found, node, user, routing)
    if packet is aten.reshape and is_paired:
        return found
    if packet is aten.sum and is_paired and _is_over_choices(node, user, routing):
        return replace(found, end=user)
    if packet is aten.bmm and is_paired and user.args[1] is node and _is_of_choices(user, routing):
        return replace(found, end=user, by_pair=(*found.by_pair, user.args[0]))  # pyright: ignore[reportArgumentType]
    return None


def _weight(node: fx.Node, user: fx.Node, num_rows: int) -> fx.Node | None:
    """The factor of ``node``, one number for each row, that keeps its shape and rounds it to no narrower dtype."""
    if user.target is not aten.mul.Tensor or len(user.all_input_nodes) != 2:
        return None
    (weight,) = (n for n in user.all_input_nodes if n is not node)
    shape, own = shape_of(node), shape_of(weight)
    leads = [d for d in range(1, len(shape) + 1) if prod(shape[:d]) == num_rows]
    dtype = user.meta["val"].dtype
    same = shape_of(user) == shape and torch.promote_types(dtype, node.meta["val"].dtype) == dtype
    return weight if same and any(own == shape[:d] + (1,) * (len(shape) - d) for d in leads) else None


def only_index(user: fx.Node) -> fx.Node | None:
    """The index of a lookup along the first dim alone."""
    indices: Any = user.args[1]
    return indices[0] if len(indices) == 1 and len(shape_of(indices[0])) == 1 else None


def _added(found: RowSum, node: fx.Node, user: fx.Node, routing: Routing) -> RowSum | None:
    given, num_tokens = named(user), routing.num_rows // routing.top_k
    if given["source"] is not node or given["dim"] != 0 or given["alpha"] != 1 or shape_of(user)[0] != num_tokens:
        return None
    return replace(found, end=user, token=given["index"], base=given["self"])


def _is_over_choices(node: fx.Node, user: fx.Node, routing: Routing) -> bool:
    shape, dims = shape_of(node), reduced_dims(user)
    if len(dims) != 1 or user.meta["val"].dtype != node.meta["val"].dtype:
        return False
    (dim,) = dims
    return shape[dim] == routing.top_k and prod(shape[: dim + 1]) == routing.num_rows


def _is_of_choices(user: fx.Node, routing: Routing) -> bool:
    weights, values = (shape_of(n) for n in user.all_input_nodes)
    return weights[1:] == (1, routing.top_k) and values[1] == routing.top_k and prod(weights) == routing.num_rows
