"""Ops that become others over cp, as a rank has to know the places of its tokens.

causal attention       causal_attention: no matrix of a mask; which keys stand before a query, its chunk says
attention with a bias  that is trained: softmax(q kᵀ · scale + bias) v, which saves no gathered operands
tril, triu             a comparison of the places of rows and columns
one token              where(it is that token, x, 0), summed: other ranks have zeros
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from torch import fx

from passes.moe.domain import Builder
from passes.partition.options.forms import Form
from passes.partition.writer import Rewrite, Scene
from passes.program.ops.aten import aten, is_random, named, packet_of, shape_of
from passes.program.ops.sequence import causal_attention, local_rows


def form_over_cp(scene: Scene) -> Rewrite | None:
    """The rewrite of an op, if the typing changes more than sizes."""
    node, option = scene.node, scene.option
    if option.form is Form.PICKED:
        return _picked
    if not option.out.is_sharded:  # of all tokens, on every rank
        return None
    if _has_trained_bias(node):
        return _by_hand
    if packet_of(node.target) in (aten.tril, aten.triu):
        return _triangle if option.out.dim >= len(shape_of(node)) - 2 else None
    if node.target is aten.scaled_dot_product_attention.default and named(node)["is_causal"]:
        return _causal if option.out.dim == len(shape_of(node)) - 2 else None
    return None


def _build(scene: Scene) -> Builder:
    return Builder(scene.node.graph, scene.node, scene.node)


def _picked(scene: Scene) -> None:
    """The token on the rank that has it, zeros on all others."""
    x, dim, place, *_ = scene.node.args
    build, cut = _build(scene), scene.input_type(0)
    rows: Any = x
    is_it = build.call(aten.eq.Scalar, _places(build, sum(cut.sizes), scene.size), place)
    wide = [n if d == dim else 1 for d, n in enumerate(shape_of(rows))]
    is_it = build.call(aten.reshape.default, is_it, wide)
    token = build.call(aten.where.ScalarOther, is_it, rows, 0)
    scene.be(build.call(aten.sum.dim_IntList, token, [dim], True))


def _places(build: Builder, size: int, cp: int | None) -> fx.Node:
    """0, 1, … of a full sequence, or those of a rank's tokens."""
    places = build.call(aten.arange.default, size, device="cpu")
    return places if cp is None else build.call(local_rows, places, 0, cp)


def _has_trained_bias(node: fx.Node) -> bool:
    """Attention with equally many key heads, no dropout, and a bias with a gradient: its scores are saved anyway."""
    if node.target is not aten.scaled_dot_product_attention.default or is_random(node) or len(node.args) < 4:
        return False
    bias, shapes = node.args[3], [shape_of(n) for n in node.args[:3] if isinstance(n, fx.Node)]
    is_plain = len(shapes[0]) == 4 and len({shape[:2] for shape in shapes}) == 1
    return is_plain and isinstance(bias, fx.Node) and bool(bias.meta["grad"])


def _by_hand(scene: Scene) -> None:
    given, build = named(scene.node), _build(scene)
    q, k, v, bias = (given[name] for name in ("query", "key", "value", "attn_mask"))
    scale = shape_of(q)[-1] ** -0.5 if given["scale"] is None else given["scale"]
    scores = build.call(aten.matmul.default, q, build.call(aten.permute.default, k, [0, 1, 3, 2]))
    scores = build.call(aten.mul.Tensor, scores, scale)
    scores = build.call(aten.add.Tensor, scores, bias)
    scene.be(build.call(aten.matmul.default, build.call(aten.softmax.int, scores, -1), v))


def _triangle(scene: Scene) -> None:
    """The places of rows and columns decide which elements stay; one of the two is this rank's."""
    node, build = scene.node, _build(scene)
    part = node.all_input_nodes[0]
    rows, columns = _places_of_both(scene, build)
    apart = build.call(aten.sub.Tensor, columns, rows)
    compare = aten.le.Scalar if packet_of(node.target) is aten.tril else aten.ge.Scalar
    stays = build.call(compare, apart, named(node)["diagonal"])
    nothing = False if part.meta["val"].dtype == torch.bool else 0
    scene.be(build.call(aten.where.ScalarOther, stays, part, nothing))


def _places_of_both(scene: Scene, build: Builder) -> Iterator[fx.Node]:
    """[s, 1] of rows, then [1, s] of columns: places in the full sequence of a rank's part."""
    cut, shape = scene.option.out, shape_of(scene.node)
    for dim, wide in ((len(shape) - 2, (-1, 1)), (len(shape) - 1, (1, -1))):
        places = _places(build, shape[dim], scene.size if dim == cut.dim else None)
        yield build.call(aten.reshape.default, places, [shape_of(places)[0] if n < 0 else n for n in wide])


def _causal(scene: Scene) -> None:
    """On heads of [b, h, s, d]."""
    given, build, shape = named(scene.node), _build(scene), scene.local_shape()
    operands = [_with_heads(build, given[name]) for name in ("query", "key", "value")]
    options = {k: given[k] for k in ("dropout_p", "scale", "enable_gqa") if given.get(k)}
    made = build.call(causal_attention, *operands, scene.size, **options)
    made.meta = {**scene.node.meta, "val": made.meta["val"]}
    scene.be(made if len(shape) == 4 else build.call(aten.reshape.default, made, shape))


def _with_heads(build: Builder, x: fx.Node) -> fx.Node:
    """[.., s, d] as [b, h, s, d]."""
    *outer, size, width = shape_of(x)
    if len(outer) == 2:
        return x
    shape = (prod(outer[:-1]), *outer[-1:], size, width) if outer else (1, 1, size, width)
    return build.call(aten.reshape.default, x, list(shape))
