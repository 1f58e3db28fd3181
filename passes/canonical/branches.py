"""Parallel branches become one batched op: a module for each head (or group), applied to slices and concatenated.

    cat([norm_i(x[:, i:i+1]) for i in range(n)], dim=1)    →    vmap(norm)(x, stack(weights))

As separate branches each slice is unsharded, and the branches could not be split between ranks. One op over a new dim
of n is sharded like any other. Only branches with small weights of their own are joined: a stack of matrices would be
held in full on every rank, while the matrices can be sharded one by one.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from passes.program.ops.aten import aten, cut_of, dim_of_cat, nodes_in, shape_of
from passes.program.source_lines import origin_of

CopyBody = Callable[[fx.GraphModule, dict[fx.Node, Any]], Any]


@dataclass
class Branches:
    """Inputs of ``num`` equal branches, by the node of the first: pieces of a tensor, a value each, or one for all."""

    num: int
    pieces: dict[fx.Node, tuple[fx.Node, int]] = field(default_factory=dict)  # piece 0 → tensor, and its dim of pieces
    own: dict[fx.Node, tuple[fx.Node, ...]] = field(default_factory=dict)  # a parameter or buffer of each branch
    shared: dict[fx.Node, fx.Node] = field(default_factory=dict)
    body: dict[fx.Node, None] = field(default_factory=dict)  # the calls of branch 0, inputs first


def join_branches(graph: fx.Graph, copy_body: CopyBody) -> bool:
    """Replace every concatenation of equal branches in ``graph``; ``copy_body`` writes canonical calls at its end."""
    joined = False
    for node in graph.find_nodes(op="call_function", target=aten.cat.default):
        found = equal_branches(node.args[0])
        if found is None or not found.own or any(len(shape_of(first)) > 1 for first in found.own):
            continue  # they differ, or are too little or too much to join
        is_along = {dim for _, dim in found.pieces.values()} == {dim_of_cat(node)}
        whole = _batched(node, found, copy_body) if is_along else None
        if whole:
            node.replace_all_uses_with(whole)
            joined = True
    return joined


def equal_branches(leaves: Any) -> Branches | None:
    """Return the branches that end in ``leaves``, one each; None if there are too few, or they differ."""
    if len(leaves) < 2 or len({shape_of(leaf) for leaf in leaves}) > 1:
        return None
    found = Branches(len(leaves))
    return found if _are_equal(tuple(leaves), found, set()) else None


def _are_equal(nodes: tuple[fx.Node, ...], found: Branches, seen: set[fx.Node]) -> bool:
    """Return whether ``nodes``, one of each branch, apply equal ops to the branches' inputs; notes these inputs."""
    first = nodes[0]
    if first in seen:
        return True
    if all(n is first for n in nodes):
        found.shared[first] = first
        return True
    if all(n.op == "placeholder" for n in nodes):
        found.own[first] = nodes
        return len({(shape_of(n), n.meta["val"].dtype) for n in nodes}) == 1
    if (cut := cut_of(first)) is not None:
        whole, dim = cut[:2]
        step, rest = divmod(shape_of(whole)[dim], len(nodes))
        if not rest and all(cut_of(n) == (whole, dim, i * step, (i + 1) * step) for i, n in enumerate(nodes)):
            found.pieces[first] = whole, dim
            return True
    seen.add(first)
    operands = zip(*(nodes_in((n.args, n.kwargs)) for n in nodes), strict=False)
    if not _same_call(nodes) or not all(_are_equal(inner, found, seen) for inner in operands):
        return False
    found.body[first] = None
    return True


def _same_call(nodes: tuple[fx.Node, ...]) -> bool:
    """Return whether nodes call one op with equal plain arguments, and each branch has a call of its own."""
    first = nodes[0]
    keys = {
        (n.op, n.target, str(fx.map_arg((n.args, n.kwargs), lambda _: None)), str(shape_of(n)))
        for n in nodes
        if isinstance(n.meta.get("val"), torch.Tensor)
    }
    return first.op == "call_function" and len(keys) == 1 and len(set(nodes)) == len(nodes)


def _batched(cat: fx.Node, branches: Branches, copy_body: CopyBody) -> fx.Node | None:
    """Return all branches at once, written before ``cat``; None if an op of theirs cannot be batched."""
    num, dim, reads = branches.num, dim_of_cat(cat), [*branches.pieces, *branches.own, *branches.shared]

    def branch(*values: torch.Tensor) -> Any:
        env: dict[fx.Node, Any] = dict(zip(reads, values, strict=True))
        for node in branches.body:
            target: Any = node.target
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: env[n])
            env[node] = target(*args, **kwargs)
        return env[cat.args[0][0]]  # pyright: ignore

    def whole(*values: torch.Tensor) -> torch.Tensor:
        given = iter(values)
        cut = [next(given).unflatten(dim, (num, -1)) for _ in branches.pieces]
        own = [torch.stack([next(given) for _ in range(num)]) for _ in branches.own]
        dims = (dim,) * len(cut) + (0,) * len(own) + (None,) * len(branches.shared)
        return torch.func.vmap(branch, dims, dim)(*cut, *own, *given).flatten(dim, dim + 1)

    sources = [source for source, _ in branches.pieces.values()]
    operands = [*sources, *(n for group in branches.own.values() for n in group), *branches.shared]
    try:
        traced = make_fx(whole)(*(n.meta["val"].detach() for n in operands))
    except Exception:
        return None  # random, or an op that vmap does not know: the branches stay as they are
    if traced.graph.find_nodes(op="get_attr") or traced.graph.output_node().args[0].meta["val"].shape != shape_of(cat):  # pyright: ignore
        return None
    for node in traced.graph.nodes:  # the line of the user's, and the module, of the first branch's first call
        node.meta.update(origin_of(next(iter(branches.body))))
    with cat.graph.inserting_before(cat):
        return copy_body(traced, dict(zip(traced.graph.find_nodes(op="placeholder"), operands, strict=True)))
