"""Parallel branches become one batched op: a module for each head (or group), applied to slices and concatenated.

    cat([norm_i(x[:, i:i+1]) for i in range(n)], dim=1)    →    vmap(norm)(x, stack(weights))

As separate branches each slice is unsharded, and the branches could not be split between ranks. One op over a new dim
of n is sharded like any other. Only branches with small weights of their own are joined: a stack of matrices would be
held in full on every rank, while the matrices can be sharded one by one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from passes.program.ops.aten import aten, shape_of

CopyBody = Callable[[fx.GraphModule, dict[fx.Node, Any]], Any]

FEWEST = 2


@dataclass
class _Branches:
    """The inputs of ``num`` equal branches, by the node of the first: pieces of a tensor, one value each, or one for
    all.
    """

    num: int
    dim: int
    pieces: dict[fx.Node, fx.Node] = field(default_factory=dict)  # piece 0 → the tensor that is cut in pieces
    own: dict[fx.Node, tuple[fx.Node, ...]] = field(default_factory=dict)
    shared: dict[fx.Node, fx.Node] = field(default_factory=dict)
    body: dict[fx.Node, None] = field(default_factory=dict)  # the calls of branch 0, inputs first

    @property
    def reads(self) -> list[fx.Node]:
        return [*self.pieces, *self.own, *self.shared]


def join_branches(graph: fx.Graph, copy_body: CopyBody) -> bool:
    """Replace every concatenation of equal branches in ``graph``; ``copy_body`` writes canonical calls at its end."""
    joined = False
    for node in graph.find_nodes(op="call_function", target=aten.cat.default):
        branches = _branches_of(node)
        whole = branches and _batched(node, branches, copy_body)
        if whole:
            node.replace_all_uses_with(whole)
            joined = True
    return joined


def _branches_of(cat: fx.Node) -> _Branches | None:
    """The equal branches that ``cat`` puts together; None if they differ, or are too little or too much to join."""
    outs: Any = cat.args[0]
    dim = int(cat.args[1]) if len(cat.args) > 1 else 0  # pyright: ignore[reportArgumentType]
    if len(outs) < FEWEST or len({shape_of(out) for out in outs}) > 1:
        return None
    found = _Branches(len(outs), dim % len(shape_of(cat)))
    if not _equal(tuple(outs), found, set()) or not found.pieces or not found.own:
        return None
    return found


def _equal(nodes: tuple[Any, ...], found: _Branches, seen: set[fx.Node]) -> bool:
    """Whether ``nodes``, one of each branch, apply equal ops to the branches' inputs; notes these inputs."""
    first = nodes[0]
    if not isinstance(first, fx.Node) or first in seen:
        return isinstance(first, fx.Node) or all(n == first for n in nodes)
    if all(n is first for n in nodes):
        found.shared[first] = first
        return True
    cut = _pieces_of(nodes, found.dim)
    if cut is not None:
        found.pieces[first] = cut
        return True
    if all(n.op == "placeholder" for n in nodes):
        found.own[first] = nodes
        return len({(shape_of(n), n.meta["val"].dtype) for n in nodes}) == 1 and len(shape_of(first)) < 2
    seen.add(first)
    if not same_call(nodes) or not all(_equal(inner, found, seen) for inner in operands_of(nodes)):
        return False
    found.body[first] = None
    return True


def same_call(nodes: tuple[fx.Node, ...]) -> bool:
    """Calls of one op with equal plain arguments, each read by its own branch alone."""
    first = nodes[0]
    keys = {
        (n.op, n.target, str(fx.map_arg((n.args, n.kwargs), lambda _: None)), str(shape_of(n)))
        for n in nodes
        if isinstance(n.meta.get("val"), torch.Tensor)
    }
    return first.op == "call_function" and len(keys) == 1 and len(set(nodes)) == len(nodes)


def operands_of(nodes: tuple[fx.Node, ...]) -> list[tuple[fx.Node, ...]]:
    return list(zip(*(_inputs(n) for n in nodes), strict=True))


def _inputs(node: fx.Node) -> list[fx.Node]:
    """Every node among the arguments, one that is read twice also twice."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found


def _pieces_of(nodes: tuple[fx.Node, ...], dim: int) -> fx.Node | None:
    """The tensor with ``nodes`` as its equal parts along ``dim``, all of them and in order."""
    sources = {piece_of(node, dim, i, len(nodes)) for i, node in enumerate(nodes)}
    return sources.pop() if len(sources) == 1 else None


def piece_of(node: fx.Node, dim: int, index: int, num: int) -> fx.Node | None:
    """The tensor with ``node`` as its part ``index`` of ``num`` along ``dim``."""
    source = node.args[0] if node.op == "call_function" and node.args else None
    if not isinstance(source, fx.Node):
        return None
    if node.target is operator.getitem and source.target is aten.split_with_sizes.default:
        sizes, whole = source.args[1], source.args[0]
        along = int(source.args[2]) if len(source.args) > 2 else 0  # pyright: ignore[reportArgumentType]
        is_part = along == dim and sizes == [sizes[0]] * num and node.args[1] == index  # pyright: ignore
        return whole if is_part and isinstance(whole, fx.Node) else None
    if node.target is not aten.slice.Tensor or node.args[1] != dim or len(node.args) > 4:
        return None
    size = shape_of(source)[dim]
    step = size // num
    return source if size == num * step and node.args[2:4] == (index * step, (index + 1) * step) else None


def _batched(cat: fx.Node, branches: _Branches, copy_body: CopyBody) -> fx.Node | None:
    """All branches at once, written before ``cat``; None if an op of theirs cannot be batched."""
    num, dim, reads = branches.num, branches.dim, branches.reads

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

    operands = [*branches.pieces.values(), *(n for group in branches.own.values() for n in group), *branches.shared]
    try:
        traced = make_fx(whole)(*(n.meta["val"].detach() for n in operands))
    except Exception:
        return None  # random, or an op that vmap does not know: the branches stay as they are
    if traced.graph.find_nodes(op="get_attr") or traced.graph.output_node().args[0].meta["val"].shape != shape_of(cat):  # pyright: ignore
        return None
    _keep_origin(traced, next(iter(branches.body)))
    with cat.graph.inserting_before(cat):
        return copy_body(traced, dict(zip(traced.graph.find_nodes(op="placeholder"), operands, strict=True)))


def _keep_origin(traced: fx.GraphModule, origin: fx.Node) -> None:
    """The new calls stand at the user's line and in the module of the first branch's first call."""
    for node in traced.graph.nodes:
        node.meta.update({k: origin.meta[k] for k in ("nn_module_stack", "stack_trace") if k in origin.meta})
