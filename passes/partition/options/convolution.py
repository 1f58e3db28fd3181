"""Ops over the spatial dims of images and signals [b, channels, ..]: cut by channels.

convolution   out channels cut: weight [o/tp, i, ..], x whole (R)          as a column-parallel linear
              in channels cut: x and weight cut, the result is P           as a row-parallel linear
              groups cut: x, weight and result by channels, groups/tp of them on a rank (depthwise)
group_norm    channels sharded by complete groups
batch_norm    channels cut: each has statistics of its own, held or taken from the batch
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch import fx

from passes.partition.options.base import Covers, Option, Site
from passes.partition.options.by_factors import by_factors
from passes.partition.options.contraction import contraction
from passes.partition.options.forms import Form
from passes.program.ops.aten import named
from passes.types.types import Placement, Segment

aten = torch.ops.aten


def convolution(site: Site) -> Iterator[Option]:
    """conv1d, conv2d, conv3d, convolution(x, weight, bias=None, ..), not transposed."""
    given = named(site.node)
    x, weight = site.node.args[:2]
    assert isinstance(x, fx.Node)
    assert isinstance(weight, fx.Node)
    if x is weight or len(site.inputs) > 2 or given.get("transposed"):
        return
    channel = len(site.shape()) - len(site.shape(weight)) + 1  # 0 without a batch dim
    if given["groups"] == 1:
        yield from contraction(site)
    else:
        yield from _groups(site, x, weight, channel, given["groups"])


def _groups(site: Site, x: fx.Node, weight: fx.Node, channel: int, groups: int) -> Iterator[Option]:
    """As many channels in and out: any segments if each channel is a group, else complete groups in one segment."""
    size = site.shape(weight)[0]
    if site.shape(x)[channel] != size:
        return
    cuts = {c.moved(0) for n in (x, site.node) for c in site.candidates(n) if c.dim == channel}
    cuts |= {c for c in site.candidates(weight) if c.dim == 0}
    cuts |= {Placement("V", 0, (Segment(size),))} if site.divides(size) else set()
    for cut in sorted(cuts):
        plain = len(cut.segments) == 1 and not cut.has_whole_segment and site.divides(groups)
        if not cut.padding and (groups == size or plain):
            yield site.option(cut.moved(channel), {x: cut.moved(channel), weight: cut}, Form.GROUPS)


def group_norm(site: Site) -> Iterator[Option]:
    """group_norm(x [b, channels, ..], groups, weight, bias): sharded by complete groups; weight and bias alike."""
    x, groups = site.node.args[:2]
    assert isinstance(x, fx.Node)
    assert isinstance(groups, int)
    size = site.shape(x)[1]
    others = [n for n in site.inputs if n is not x]
    for cut in sorted({c for n in (x, site.node) for c in site.candidates(n)}):
        if cut.dim == 0:
            yield site.option(cut, {x: cut}, Form.PARTS)
        elif cut.dim == 1 and len(cut.segments) == 1 and site.divides(groups) and not cut.padding:
            yield site.option(cut, {x: cut} | dict.fromkeys(others, Placement("V", 0, (Segment(size),))), Form.GROUPS)


def batch_norm(site: Site) -> Iterator[Option]:
    """batch_norm(x [b, channels, ..], weight, bias, mean, variance, ..), instance_norm: all sharded by channels. The
    statistics of a tuple would be sharded on another dim than the result: if they are read, all is replicated.
    """
    if any(user.target is operator.getitem and user.args[1] for user in site.node.users):
        return
    for option in by_factors(site):
        if option.out.is_disjoint:
            yield option


# ---- the covered ops, and the forms that rules may give beside whole and partial

COVERS = (
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
)
