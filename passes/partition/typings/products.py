"""Products that sum over shared dims (linear, mm, bmm, matmul, einsum, those of a user's own rule, convolutions), and
the other ops on channels of images and signals [b, channels, ..].

    a dim of the result    every operand that has it is sharded there, the others are R       column parallel, heads
    a summed dim           both operands are sharded there, the result is P                   row parallel
    groups of channels     x, weight and result by channels, groups/tp of them on a rank      depthwise; group_norm
    channels               batch_norm: each has statistics of its own, held or taken from the batch

The weight of a column-parallel linear is sharded exactly as its output, segment by segment.

scaled_dot_product_attention(q[b,h,s,d], k[b,g,t,d], v[b,g,t,d], mask), by heads; over cp, of a rank's tokens, likewise
(if keys are gathered, each rank of tp has at least one key head):

    heads              q, k, v cut by heads, in one run or several; a mask with heads is sharded alike, else replicated
    shared key heads   q sharded by heads, k and v replicated (R): fewer than ranks, each picks those it reads
"""

import operator
from collections.abc import Iterator

from torch import fx

from passes.partition.typings.base import (
    Covers,
    Dims,
    Form,
    Option,
    Site,
    aligned,
    by_factors,
    dims_of_factors,
    given_of,
)
from passes.program.ops.aten import aten, named, packet_of
from passes.program.ops.sequence import causal_attention, gathered_attention
from passes.program.weights import is_weight
from passes.rules.rule import Role
from passes.types.types import P, Placement, R, V

ROW_BYTES = 16  # PyTorch refuses other strides of operands of _grouped_mm


def contraction(site: Site) -> Iterator[Option]:
    """Yield options of a two- or many-operand product."""
    attends = not any(is_weight(n) for n in site.inputs)
    for dims in dims_of_factors(site, Role.EACH):
        for cut in _cuts(site, dims):
            yield site.option(dims.of_result(cut), given_of(dims, cut), Form.COLUMN, attends=attends)
    for dims in dims_of_factors(site, Role.SUM):
        for cut in _cuts(site, dims):
            if cut.is_disjoint:
                yield site.option(P, given_of(dims, cut), Form.ROW, attends=attends)


def _cuts(site: Site, dims: Dims) -> list[Placement]:
    """Return the cuts under discussion; a dim of a weight is offered plainly too."""
    found = set(dims.candidates(site))
    for node, dim in dims.inputs.items():
        size = site.shape(node)[dim]
        if size and is_weight(node) and site.divides(size):
            found.add(V(0, size))
    if packet_of(site.node.target) is not aten._grouped_mm:
        return sorted(found)
    size = site.node.meta["val"].element_size()
    return sorted(cut for cut in found if cut.local_size(site.tp) * size % ROW_BYTES == 0)


def convolution(site: Site) -> Iterator[Option]:
    """conv1d, conv2d, conv3d, convolution(x, weight, bias=None, ..), not transposed."""
    given = named(site.node)
    x, weight = site.args[:2]
    if x is weight or len(site.inputs) > 2 or given.get("transposed"):
        return
    channel = len(site.shape()) - len(site.shape(weight)) + 1  # 0 without a batch dim
    if given["groups"] == 1:
        yield from contraction(site)
    else:
        yield from _groups(site, x, weight, channel, given["groups"])


def _groups(site: Site, x: fx.Node, weight: fx.Node, channel: int, groups: int) -> Iterator[Option]:
    """Cut as many channels in and out: any segments if each channel is a group, else complete groups in one."""
    size = site.shape(weight)[0]
    if site.shape(x)[channel] != size:
        return
    cuts = {c.moved(0) for n in (x, site.node) for c in site.candidates(n) if c.dim == channel}
    cuts |= {c for c in site.candidates(weight) if c.dim == 0}
    cuts |= {V(0, size)} if site.divides(size) else set()
    for cut in sorted(cuts):
        plain = len(cut.segments) == 1 and not cut.has_whole_segment and site.divides(groups)
        if not cut.padding and (groups == size or plain):
            yield site.option(cut.moved(channel), {x: cut.moved(channel), weight: cut}, Form.GROUPS)


def group_norm(site: Site) -> Iterator[Option]:
    """group_norm(x [b, channels, ..], groups, weight, bias): sharded by complete groups; weight and bias alike."""
    x, groups = site.args[:2]
    size = site.shape(x)[1]
    others = [n for n in site.inputs if n is not x]
    for cut in sorted({c for n in (x, site.node) for c in site.candidates(n)}):
        if cut.dim == 0:
            yield site.option(cut, {x: cut}, Form.PARTS)
        elif cut.dim == 1 and len(cut.segments) == 1 and site.divides(groups) and not cut.padding:
            yield site.option(cut, {x: cut} | dict.fromkeys(others, V(0, size)), Form.GROUPS)


def batch_norm(site: Site) -> Iterator[Option]:
    """batch_norm(x [b, channels, ..], weight, bias, mean, variance, ..), instance_norm: all sharded by channels. The
    statistics of a tuple would be sharded on another dim than the result: if they are read, all is replicated.
    """
    if any(user.target is operator.getitem and user.args[1] for user in site.node.users):
        return
    for option in by_factors(site):
        if option.out.is_disjoint:
            yield option


def attention(site: Site) -> Iterator[Option]:
    q, k, v = site.args[:3]
    if len(site.shape(q)) != 4:
        return
    heads, groups = site.shape(q)[1], site.shape(k)[1]
    # the plain cut of the heads, and those in several runs that are under discussion (heads paired across halves)
    asked = {c for n in (None, q) for c in site.candidates(n) if c.dim == 1 and c.is_disjoint}
    plain = {V(1, heads)} if site.divides(heads) else set()
    for cut in sorted(plain | {c for c in asked if all(site.divides(n) for n in c.sizes)}):
        ratio = heads // groups
        is_even = not any(size % (ratio * site.tp) for size in cut.sizes)
        # of the key heads that these query heads read
        shared = V(1, *(size // ratio for size in cut.sizes)) if is_even else None
        given = {n: aligned(cut, site.shape(), site.shape(n)) for n in site.inputs[3:]} | {q: cut}
        if shared is not None:
            yield site.option(cut, given | {k: shared, v: shared}, Form.PARTS, attends=True)
        elif groups < heads and len(cut.segments) == 1 and len({q, k, v}) == 3:
            yield site.option(cut, given | {k: R, v: R}, Form.SHARED_KEYS, attends=True)


# ---- the covered ops, and the forms that rules may give beside whole and partial

COVERS = (
    Covers(contraction, "linear mm bmm matmul einsum _grouped_mm", gives={Form.COLUMN, Form.ROW}),
    Covers(
        convolution,
        "conv1d conv2d conv3d convolution conv1d.padding conv2d.padding conv3d.padding",
        gives={Form.COLUMN, Form.ROW, Form.GROUPS},
    ),
    Covers(group_norm, "group_norm", gives={Form.PARTS, Form.GROUPS}),
    Covers(
        batch_norm,
        "batch_norm instance_norm native_batch_norm _native_batch_norm_legit_functional "
        "_native_batch_norm_legit_no_training _native_batch_norm_legit.no_stats",
    ),
    Covers(attention, "scaled_dot_product_attention", (causal_attention,), {Form.PARTS, Form.SHARED_KEYS}),
    Covers(lambda site: (o for o in attention(site) if o.form is Form.PARTS), targets=(gathered_attention,)),
)
