"""Attention that keeps this rank's keys and values alone, and gathers those of all ranks again in its backward.

    attention(q, gather_sequence(k), gather_sequence(v), mask)   →   gathered_attention(q, k, v, mask)

Gathered and kept, keys and values of the full sequence would be as large on each rank whatever cp is. Key heads that
were repeated for the heads that read them (reshape, expand, reshape) are not: each is read by its group of heads.
"""

from dataclasses import dataclass
from typing import Any

from torch import fx

from passes.partition.sequence.facts import Context
from passes.program.builder import Builder
from passes.program.ops.aten import aten, is_random, named, shape_of
from passes.program.ops.groups import ATTENTION
from passes.program.ops.sequence import causal_attention, gather_sequence, gathered_attention
from passes.program.program import Program

SEQUENCE = 2  # the dim of tokens in q, k, v [b, h, s, d]


def keep_own_keys(program: Program, context: Context, tp: int) -> None:
    """Rewrites in place: each attention without dropout that is the only reader of its gathered keys and values, and
    has a mask without gradient.

    If ``tp`` ranks share key heads, all of them are gathered before each takes its own, so that case is unchanged.
    """
    if context.cp == 1:
        return
    graph = program.graph.graph
    for node in list(graph.nodes):
        if _is_open(node) and not is_random(node) and len(shape_of(node)) == 4:
            operands = [_gathered(n) for n in node.args[1:3]]
            options = _options(node)
            mask = options.pop("mask")
            is_alone = all(g is not None and _is_for(node, g, tp) for g in operands)
            if is_alone and (mask is None or not mask.meta.get("grad")):
                _exchange(node, [g for g in operands if g is not None], mask, options)


def _is_open(node: fx.Node) -> bool:
    """Return whether a call is attention over cp: one that is causal and still PyTorch's own is of all tokens."""
    if node.target is aten.scaled_dot_product_attention.default:
        return not named(node)["is_causal"]
    return node.target in ATTENTION and node.target is not gathered_attention


@dataclass(frozen=True)
class _Gathered:
    """``way``: from the gather to attention's operand, each read by the next. ``heads``: key heads of their own."""

    way: tuple[fx.Node, ...]
    heads: int


def _gathered(value: Any) -> _Gathered | None:
    """Return how an operand [b, h, s, d] comes of a gather along its tokens."""
    if not isinstance(value, fx.Node):
        return None
    if value.target is gather_sequence:
        return _Gathered((value,), shape_of(value)[1]) if value.args[1] == SEQUENCE else None
    if value.target is not aten.reshape.default:
        return None
    (expand,) = value.all_input_nodes
    if expand.target is not aten.expand.default or expand.all_input_nodes[0].target is not gather_sequence:
        return None
    (gather,) = expand.all_input_nodes
    shape, repeated, (batch, heads, *rest) = shape_of(gather), shape_of(expand), shape_of(value)
    groups = shape[1] if len(shape) == 5 else 0
    if not groups or shape != (batch, groups, 1, *rest) or repeated != (batch, groups, heads // groups, *rest):
        return None
    return _Gathered((gather, expand, value), groups) if gather.args[1] == SEQUENCE + 1 else None


def _is_for(attention: fx.Node, found: _Gathered, tp: int) -> bool:
    """Return whether only ``attention`` reads it, as one operand, and no two ranks of tp need the same key head."""
    places = [n is found.way[-1] for n in attention.args]
    return sum(places) == 1 and all(len(n.users) == 1 for n in found.way) and found.heads % tp == 0


def _options(node: fx.Node) -> dict[str, Any]:
    if node.target is causal_attention:
        scale = {"scale": node.kwargs["scale"]} if "scale" in node.kwargs else {}
        return {"mask": None, "is_causal": True} | scale
    given = named(node)
    return {"mask": given["attn_mask"]} | ({"scale": given["scale"]} if given["scale"] is not None else {})


def _exchange(node: fx.Node, operands: list[_Gathered], mask: Any, options: dict[str, Any]) -> None:
    own, cp = map(_of_rank, operands), operands[0].way[0].args[2]
    is_shared = operands[0].heads != shape_of(node)[1]
    node.kwargs = options | ({"enable_gqa": True} if is_shared else {})
    node.args, node.target = (node.args[0], *own, mask, cp), gathered_attention
    for found in operands:
        for done in reversed(found.way):
            node.graph.erase_node(done)


def _of_rank(found: _Gathered) -> fx.Node:
    """Return the key heads of this rank's tokens, as they were before their groups of heads had a dim."""
    gather = found.way[0]
    value: Any = gather.args[0]
    if len(found.way) == 1:
        return value
    batch, heads, _, *rest = shape_of(value)
    return Builder(gather.graph, gather, value).call(aten.reshape.default, value, [batch, heads, *rest])
