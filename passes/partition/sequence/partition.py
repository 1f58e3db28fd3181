"""partition(graph, types, loss): the program over all tokens becomes that of one rank of cp.

Each needed version of a value becomes a node (versions.py). Then the writer of every axis (passes.partition.writer)
adds conversions between the versions and their readers, and gives each op the form of its typing.

    cut → whole      gather_sequence         whole → cut        local_rows
    P → whole        sum_over_ranks          whole → P          its share, x / cp

A dim may be several sequences behind each other; each of them is cut. Some ops become others over cp, as a rank has to
know the places of its tokens:

causal attention       causal_attention: no matrix of a mask; which keys stand before a query, its chunk says
attention with a bias  that is trained: softmax(q kᵀ · scale + bias) v, which saves no gathered operands
tril, triu             a comparison of the places of rows and columns
one token              where(it is that token, x, 0), summed: other ranks have zeros
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import fx

from passes.partition.sequence.facts import Types
from passes.partition.sequence.versions import Made, as_version, versions_of
from passes.partition.typings.base import Form, Option
from passes.partition.writer import Rewrite, Scene, convert, rewrite
from passes.program.builder import Builder
from passes.program.ops.aten import aten, is_random, named, packet_of, shape_of
from passes.program.ops.sequence import causal_attention, gather_sequence, local_rows, sum_over_ranks
from passes.program.source_lines import origin_of
from passes.types.types import P, Placement, R


@dataclass(frozen=True)
class _Typed:
    """A graph of whole values with a node for each version. ``options``: of ops; ``placements``: of every value."""

    graph: fx.Graph = field(default_factory=fx.Graph)
    options: dict[fx.Node, Option] = field(default_factory=dict)
    placements: dict[fx.Node, Placement] = field(default_factory=dict)


def partition(graph: fx.Graph, types: Types, loss: fx.Node) -> fx.Graph:
    """Return the graph of one rank; its result is the rank's partial sum of the loss."""
    typed = _typed(graph, types, versions_of(graph, types, loss), loss)
    _convert(typed, types.cp)
    for node in list(typed.graph.nodes):
        made, option = node, typed.options.get(node)
        if option is not None:
            scene = Scene(node, option, types.cp, lambda: types.cp)
            if node.op == "call_function" and (form := form_over_cp(scene)) is not None:
                form(scene)
            elif node.op == "call_function":
                rewrite(scene, {})
            made = scene.node
        if (placement := typed.placements.get(node)) is not None and placement.is_sharded:
            _become_local(made, placement, types.cp)
    return typed.graph


def _typed(source: fx.Graph, types: Types, versions: Mapping[fx.Node, Made], loss: fx.Node) -> _Typed:
    """Return every computed version, in the order of ``source``; readers have the version from which theirs is
    converted. That of its own type keeps a value's name."""
    typed, read = _Typed(), dict[tuple[fx.Node, Placement], fx.Node]()
    for node in source.nodes:
        for version, option in sorted(versions[node].items(), key=lambda made: made[0] != types.of(node)):
            if node.op == "placeholder" and version == R:
                read[node, R] = typed.graph.node_copy(node)
            elif isinstance(option, Option):
                wanted = {n: as_version(t) for n, t in zip(node.all_input_nodes, option.args, strict=True)}
                read[node, version] = typed.graph.node_copy(node, lambda n, wanted=wanted: read[n, wanted[n]])
                typed.options[read[node, version]] = option
            else:
                continue
            typed.placements[read[node, version]] = version
        for version, have in versions[node].items():
            if not isinstance(have, Option) and (node, version) not in read:
                read[node, version] = read[node, have]
    result = typed.graph.output((read[loss, P],))
    typed.options[result] = Option((P,), P, Form.WHOLE)
    return typed


def _convert(typed: _Typed, cp: int) -> None:
    """Insert conversions between the type of a value and the one in which an op, or the result, reads it."""
    readers: dict[tuple[fx.Node, Placement], list[fx.Node]] = {}
    for node, option in typed.options.items():
        for value, placement in zip(node.all_input_nodes, option.args, strict=True):
            if typed.placements[value] != as_version(placement):
                readers.setdefault((value, as_version(placement)), []).append(node)
    for (value, after), of_value in readers.items():
        before = typed.placements[value]
        made = convert(value, of_value, lambda v=value, b=before, a=after: converted(v, b, a, cp))
        made.meta["grad"] &= any(reader.op == "output" or reader.meta["grad"] for reader in of_value)
        typed.placements[made] = after


def _become_local(node: fx.Node, cut: Placement, cp: int) -> None:
    """Give a node the meta value of a rank's part; of a tuple, of each value along the sharded dim."""
    value = node.meta["val"]
    if isinstance(value, torch.Tensor):
        node.meta["val"] = resized(value, cut.local_shape(tuple(value.shape), cp))
    else:
        node.meta["val"] = type(value)(resized(v, s) for v, s in zip(value, _shapes(node, cut, cp), strict=True))
    if "draw" in node.meta:
        node.meta["draw"] = replace(node.meta["draw"], cut=cut)


def _shapes(node: fx.Node, cut: Placement, cp: int) -> Iterator[tuple[int, ...]]:
    """Yield the shapes of a split along the cut dim (its sizes are local now), or of values with one size there."""
    arguments: Any = node.args
    is_along = node.target is aten.split_with_sizes.default and arguments[2] == cut.dim
    for place, value in enumerate(node.meta["val"]):
        size = arguments[1][place] if is_along else cut.local_size(cp)
        yield tuple(size if d == cut.dim else n for d, n in enumerate(value.shape))


def converted(value: fx.Node, before: Placement, after: Placement, cp: int) -> fx.Node:
    """Calls at the place where the graph inserts; the last of them has the value in whole size, and its new type."""
    if before.is_sharded:
        made = _along(value, before, gather_sequence, cp, before.local_shape(shape_of(value), cp), shape_of(value))
    elif after.is_sharded:
        made = _along(value, after, local_rows, cp, shape_of(value), after.local_shape(shape_of(value), cp))
    elif before == P:
        made = value.graph.call_function(sum_over_ranks, (value, cp))
    else:
        made = value.graph.call_function(aten.mul.Tensor, (value, 1 / cp))
    made.meta = origin_of(value) | {"val": value.meta["val"], "grad": value.meta["grad"], "placement": after}
    return made


def _along(
    value: fx.Node, cut: Placement, function: Any, cp: int, before: tuple[int, ...], after: tuple[int, ...]
) -> fx.Node:
    """Return a collective along the sequence, from local shape ``before`` to ``after``."""
    graph, dim, count = value.graph, cut.dim, len(cut.segments)
    if count == 1:
        return graph.call_function(function, (value, dim, cp))
    if cut.has_whole_segment:
        return _along_segments(value, cut, function, cp, before)
    apart, moved = ((*s[:dim], count, s[dim] // count, *s[dim + 1 :]) for s in (before, after))
    rows = _with_value(graph.call_function(aten.reshape.default, (value, list(apart))), value, apart)
    made = _with_value(graph.call_function(function, (rows, dim + 1, cp)), value, moved)
    return graph.call_function(aten.reshape.default, (made, list(after)))


def _along_segments(value: fx.Node, cut: Placement, function: Any, cp: int, before: tuple[int, ...]) -> fx.Node:
    """Run the collective on each sharded segment alone; the others are unchanged."""
    graph, dim, rows, start = value.graph, cut.dim, list[fx.Node](), 0
    for segment in cut.segments:
        have, wanted = segment.size, segment.local(cp)
        have, wanted = (wanted, have) if function is gather_sequence else (have, wanted)
        for call, size in ((aten.slice.Tensor, have), (function, wanted))[: 1 + segment.sharded]:
            args = (value, dim, start, start + have) if call is not function else (rows.pop(), dim, cp)
            rows.append(_with_value(graph.call_function(call, args), value, (*before[:dim], size, *before[dim + 1 :])))
        start += have
    return graph.call_function(aten.cat.default, (rows, dim))


def resized(value: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a meta value of that dtype in another shape."""
    return torch.empty(shape, dtype=value.dtype, device="meta")


def _with_value(node: fx.Node, like: fx.Node, shape: tuple[int, ...]) -> fx.Node:
    node.meta = origin_of(like) | {"val": resized(like.meta["val"], shape), "grad": like.meta["grad"]}
    return node


def form_over_cp(scene: Scene) -> Rewrite | None:
    """Return the rewrite of an op, if the typing changes more than sizes."""
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
    """Keep the token on the rank that has it, zeros on all others."""
    x, dim, place, *_ = scene.node.args
    build, cut = _build(scene), scene.input_type(0)
    rows: Any = x
    is_it = build.call(aten.eq.Scalar, _places(build, sum(cut.sizes), scene.size), place)
    wide = [n if d == dim else 1 for d, n in enumerate(shape_of(rows))]
    is_it = build.call(aten.reshape.default, is_it, wide)
    token = build.call(aten.where.ScalarOther, is_it, rows, 0)
    scene.be(build.call(aten.sum.dim_IntList, token, [dim], True))


def _places(build: Builder, size: int, cp: int | None) -> fx.Node:
    """Return 0, 1, … of a full sequence, or those of a rank's tokens."""
    places = build.call(aten.arange.default, size, device="cpu")
    return places if cp is None else build.call(local_rows, places, 0, cp)


def _has_trained_bias(node: fx.Node) -> bool:
    """Return whether attention has as many key heads, no dropout, and a trained bias: its scores are saved anyway."""
    if node.target is not aten.scaled_dot_product_attention.default or is_random(node) or len(node.args) < 4:
        return False
    bias, shapes = node.args[3], [shape_of(n) for n in node.args[:3] if isinstance(n, fx.Node)]
    is_plain = len(shapes[0]) == 4 and len({shape[:2] for shape in shapes}) == 1
    return is_plain and isinstance(bias, fx.Node) and bool(bias.meta["grad"])


def _by_hand(scene: Scene) -> None:
    given, build = named(scene.node), _build(scene)
    q, k, v, bias = (given[name] for name in ("query", "key", "value", "attn_mask"))
    scores = build.call(aten.add.Tensor, scores_of(build, q, k, given["scale"]), bias)
    scene.be(build.call(aten.matmul.default, build.call(aten.softmax.int, scores, -1), v))


def scores_of(build: Builder, q: fx.Node, k: fx.Node, scale: float | None) -> fx.Node:
    """Return q [.., s, d] kᵀ [.., d, t] · scale, of attention that is written out."""
    *outer, size, width = range(len(shape_of(k)))
    scores = build.call(aten.matmul.default, q, build.call(aten.permute.default, k, [*outer, width, size]))
    return build.call(aten.mul.Tensor, scores, shape_of(q)[-1] ** -0.5 if scale is None else scale)


def _triangle(scene: Scene) -> None:
    """Mask by the places of rows and columns; one of the two is this rank's."""
    node, build = scene.node, _build(scene)
    part = node.all_input_nodes[0]
    rows, columns = _places_of_both(scene, build)
    apart = build.call(aten.sub.Tensor, columns, rows)
    compare = aten.le.Scalar if packet_of(node.target) is aten.tril else aten.ge.Scalar
    stays = build.call(compare, apart, named(node)["diagonal"])
    nothing = False if part.meta["val"].dtype == torch.bool else 0
    scene.be(build.call(aten.where.ScalarOther, stays, part, nothing))


def _places_of_both(scene: Scene, build: Builder) -> Iterator[fx.Node]:
    """Yield [s, 1] of rows, then [1, s] of columns: places in the full sequence of a rank's part."""
    cut, shape = scene.option.out, shape_of(scene.node)
    for dim, wide in ((len(shape) - 2, (-1, 1)), (len(shape) - 1, (1, -1))):
        places = _places(build, shape[dim], scene.size if dim == cut.dim else None)
        yield build.call(aten.reshape.default, places, [shape_of(places)[0] if n < 0 else n for n in wide])


def _causal(scene: Scene) -> None:
    """Make causal attention one over the axis, on heads of [b, h, s, d]."""
    given, build, shape = named(scene.node), _build(scene), scene.local_shape()
    operands = [_with_heads(build, given[name]) for name in ("query", "key", "value")]
    options = {k: given[k] for k in ("dropout_p", "scale", "enable_gqa") if given.get(k)}
    made = build.call(causal_attention, *operands, scene.size, **options)
    made.meta = {**scene.node.meta, "val": made.meta["val"]}
    scene.be(made if len(shape) == 4 else build.call(aten.reshape.default, made, shape))


def _with_heads(build: Builder, x: fx.Node) -> fx.Node:
    """View [.., s, d] as [b, h, s, d]."""
    *outer, size, width = shape_of(x)
    if len(outer) == 2:
        return x
    shape = (prod(outer[:-1]), *outer[-1:], size, width) if outer else (1, 1, size, width)
    return build.call(aten.reshape.default, x, list(shape))
