"""Heads computed one by one in a loop become one attention over a dim of heads, which is cut like any other.

    cat([softmax(x @ Q[h] @ (x @ K[h])ᵀ) @ x @ V[h] for h in heads], -1)    →    einsum("..", x, stack(Q)), …
    o[0](head[0](x)) + o[1](head[1](x)) + …                                 →    a sum over that dim

One by one, a head could only be cut inside itself, with an exchange of scores for each. The weights of the heads are
stacked, those of one shape together: a rank holds a part of each, and one exchange of the stack gives it complete
heads. Branches without a product of two activations are left as they are: their weights are cut one by one.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from string import ascii_letters
from typing import Any

import torch
from torch import fx

from passes.canonical.branches import Branches, equal_branches
from passes.canonical.emit import applied
from passes.program.ops.aten import aten, dim_of_cat, draws, is_pointwise, reduced_dims, shape_of
from passes.program.ops.groups import PRODUCTS
from passes.rules.rule import Role
from passes.rules.table import equation, rule_of

SDPA = aten.scaled_dot_product_attention.default


class _Unknown(Exception):
    """An op that is not written over a dim of heads: the loop stays unchanged."""


def join_heads(graph: fx.Graph, emit: Callable[..., fx.Node]) -> bool:
    """Rewrite every such loop of ``graph`` with parts that are concatenated or added up. ``emit``: adds a call, as of
    the origin that stands first."""
    joined = False
    for node in list(graph.nodes):
        leaves: Any = list(node.args[0]) if node.target is aten.cat.default else _added_up(node)  # pyright: ignore
        loop = _loop_of(leaves)
        if loop is None:
            continue
        with graph.inserting_before(node):
            try:
                whole = _Writer(emit, loop).result(node, leaves)
            except _Unknown:
                continue
        node.replace_all_uses_with(whole)
        joined = True
    return joined


def _added_up(node: fx.Node) -> list[fx.Node]:
    """Return the products that a chain of sums ends in, if ``node`` is its end; in order."""
    is_inner = len(node.users) == 1 and next(iter(node.users)).target is aten.add.Tensor
    if node.target is not aten.add.Tensor or is_inner:
        return []
    terms = _terms(node)
    kinds = Counter(t.target for t in terms if t.target in PRODUCTS)
    return [t for t in terms if kinds and t.target is kinds.most_common(1)[0][0]]


def _terms(node: fx.Node, *, is_end: bool = True) -> list[fx.Node]:
    is_sum = node.target is aten.add.Tensor and not node.kwargs and all(isinstance(a, fx.Node) for a in node.args)
    if not is_sum or not (is_end or len(node.users) == 1):
        return [node]
    return [t for a in node.args for t in _terms(a, is_end=False)]  # pyright: ignore[reportArgumentType]


def _loop_of(leaves: list[fx.Node]) -> Branches | None:
    """Return the equal branches that end in ``leaves``; None if they differ, or hold no product of two activations."""
    loop = equal_branches(leaves) if len(set(leaves)) == len(leaves) else None
    if loop is None or any(len({n.meta["grad"] for n in nodes}) > 1 for nodes in loop.own.values()):
        return None
    mixing = [n for n in loop.body if _mixes(n, loop)]
    if not mixing or any(len(shape_of(n)) > 3 for n in mixing):
        return None  # attention with heads of its own is cut by those
    inside = {*loop.body}
    read_outside = any(user not in inside for n in loop.body if n is not leaves[0] for user in n.users)
    return None if read_outside else loop


def _mixes(node: fx.Node, loop: Branches) -> bool:
    """Return whether a call is a product of values that the branch itself made."""
    made = [n for n in node.all_input_nodes if n.meta["grad"] and (n in loop.body or n in loop.pieces)]
    return node.target is SDPA or (node.target in PRODUCTS and len(made) == len(node.all_input_nodes) == 2)


def _is_along_named_dims(node: fx.Node) -> bool:
    """Return whether the second argument names the dims that a call mixes; each index of any other is by itself."""
    rule, named_dims = rule_of(node), [a.name for a in node.target._schema.arguments][1:2]  # pyright: ignore
    if rule is None or named_dims != ["dim"] or not isinstance(node.meta["val"], torch.Tensor):
        return False
    others = {*range(len(shape_of(node.all_input_nodes[0])))} - reduced_dims(node)
    return all((f := rule.sole(0, d)) is not None and f.role is Role.EACH for d in others)


class _Writer:
    """Owns the calls over all heads: values of the branches get a first dim of heads, shared values do not."""

    def __init__(self, emit: Callable[..., fx.Node], loop: Branches) -> None:
        self.emit, self.loop, self.num = emit, loop, loop.num
        self.new: dict[fx.Node, fx.Node] = {}
        self.origin = next(iter(loop.body))

    def result(self, end: fx.Node, leaves: list[fx.Node]) -> fx.Node:
        """Return the replacement of ``end``: a concatenation, or a sum with other terms."""
        self._stack_weights()
        for piece, (source, dim) in self.loop.pieces.items():
            shape = list(shape_of(source))  # [.., heads · n, ..], seen as [heads, .., n, ..]
            parted = self._view(source, [*shape[:dim], self.num, shape[dim] // self.num, *shape[dim + 1 :]])
            order = [dim, *(d for d in range(len(shape) + 1) if d != dim)]
            self.new[piece] = self._emit(aten.permute.default, parted, order) if dim else parted
        for node in self.loop.body:
            self.origin = node
            self._write(node)
        self.origin, whole = end, self.new.get(leaves[0])
        if whole is None:
            raise _Unknown
        if end.target is aten.cat.default:
            return self._view(self._moved(whole, dim_of_cat(end)), list(shape_of(end)))
        total = self._emit(aten.sum.dim_IntList, whole, [0])
        for term in (t for t in _terms(end) if t not in leaves):
            total = self._emit(aten.add.Tensor, total, term)
        return total

    def _emit(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return applied(partial(self.emit, self.origin), target, *args, **kwargs)

    def _view(self, x: fx.Node, shape: list[int]) -> fx.Node:
        return x if list(shape_of(x)) == shape else self._emit(aten.reshape.default, x, shape)

    def _moved(self, x: fx.Node, dim: int) -> fx.Node:
        """Return ``x`` with its first dim at place ``dim``."""
        rest = list(range(1, len(shape_of(x))))
        return self._emit(aten.permute.default, x, [*rest[:dim], 0, *rest[dim:]]) if dim else x

    def _stack_weights(self) -> None:
        """Stack weights of one shape together, so that one exchange moves them."""
        kinds: dict[Any, list[fx.Node]] = {}
        for first in self.loop.own:
            kinds.setdefault((shape_of(first), first.meta["val"].dtype, first.meta["grad"]), []).append(first)
        for (shape, _, _), firsts in kinds.items():
            parts = [self._view(n, [1, *shape]) for first in firsts for n in self.loop.own[first]]
            stack = self._emit(aten.cat.default, parts, 0)
            if len(firsts) == 1:
                self.new[firsts[0]] = stack
                continue
            stack = self._view(stack, [len(firsts), self.num, *shape])
            for i, first in enumerate(firsts):
                self.new[first] = self._view(self._emit(aten.slice.Tensor, stack, 0, i, i + 1), [self.num, *shape])

    def _write(self, node: fx.Node) -> None:
        """Write the call over all heads; nothing if all inputs are shared: its result is then equal for every head."""
        if not any(n in self.new for n in node.all_input_nodes):
            if draws(node.target) and node.target is not SDPA:
                raise _Unknown
            return
        if node.target in PRODUCTS:
            self.new[node] = self._product(node)
        elif node.target is SDPA:
            self.new[node] = self._attention(node)
        elif node.target in (aten.reshape.default, aten.expand.default):
            self.new[node] = self._sized(node)
        elif is_pointwise(node.target):
            ndim = len(shape_of(node))
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self._aligned(n, ndim))
            self.new[node] = self._emit(node.target, *args, **kwargs)
        else:
            self.new[node] = self._along(node)

    def _aligned(self, x: fx.Node, ndim: int) -> fx.Node:
        """Return a value of the heads with as many dims after the first as the result, to be broadcast."""
        if x not in self.new:
            return x
        shape = list(shape_of(x))
        return self._view(self.new[x], [self.num, *[1] * (ndim - len(shape)), *shape])

    def _product(self, node: fx.Node) -> fx.Node:
        labelled = equation(node)
        if labelled is None:
            raise _Unknown
        operands, words, out = labelled
        head = next(c for c in ascii_letters if c not in "".join(words))
        words = [head + w if x in self.new else w for x, w in zip(operands, words, strict=True)]
        given = [self.new.get(x, x) for x in operands]
        return self._emit(aten.einsum.default, ",".join(words) + "->" + head + out, given)

    def _sized(self, node: fx.Node) -> fx.Node:
        (x,) = node.all_input_nodes
        shape = [self.num, *shape_of(node)]
        if node.target is aten.reshape.default:
            return self._view(self.new[x], shape)
        return self._emit(aten.expand.default, self._aligned(x, len(shape) - 1), shape)

    def _along(self, node: fx.Node) -> fx.Node:
        """Write an op along named dims, which move by one."""
        x, dims, *rest = *node.args, *[None] * (2 - len(node.args))
        if not isinstance(x, fx.Node) or len(node.all_input_nodes) > 1 or node.kwargs:
            raise _Unknown
        ndim = len(shape_of(x))
        given: Any = dims if isinstance(dims, (list, tuple)) else [] if dims is None else [dims]
        moved = [d % ndim + 1 for d in given]
        if node.target is aten.permute.default:
            return self._emit(node.target, self.new[x], [0, *moved])
        if not moved or not _is_along_named_dims(node):
            raise _Unknown
        return self._emit(node.target, self.new[x], moved if given is dims else moved[0], *rest)

    def _attention(self, node: fx.Node) -> fx.Node:
        """Write attention over [heads, b, s, d] as one over [b, heads, s, d]; the heads share a mask."""
        q, k, v, *rest = node.args
        if len(shape_of(q)) != 3 or any(isinstance(a, fx.Node) and a in self.new for a in rest):  # pyright: ignore
            raise _Unknown
        if rest and isinstance(rest[0], fx.Node) and len(shape_of(rest[0])) > 2:
            rest[0] = self._view(rest[0], [shape_of(rest[0])[0], 1, *shape_of(rest[0])[1:]])
        if any(isinstance(a, fx.Node) for a in node.kwargs.values()):
            raise _Unknown
        given = [self._of_each(x) for x in (q, k, v)]  # pyright: ignore[reportArgumentType]
        return self._moved(self._emit(SDPA, *given, *rest, **node.kwargs), 1)

    def _of_each(self, x: fx.Node) -> fx.Node:
        if x in self.new:
            return self._moved(self.new[x], 1)
        batch, *shape = shape_of(x)
        return self._emit(aten.expand.default, self._view(x, [batch, 1, *shape]), [batch, self.num, *shape])
