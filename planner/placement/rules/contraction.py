"""Products that sum over shared labels: linear, mm, bmm, matmul and einsum are one rule.

Write the product as an einsum. Over tp one label may be cut:

    a label of the output    every operand that has it is cut there, the others are R       column parallel, heads
    a summed label           both operands are cut there, the result is P                   row parallel

The weight of a column-parallel linear is cut exactly as its output, segment by segment.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from planner.graph.ops.products import equation
from planner.placement.rules.base import Covers, Option, Site
from planner.placement.rules.forms import Form
from planner.placement.types import P, Placement, Segment

aten = torch.ops.aten


def contraction(site: Site) -> Iterator[Option]:
    """Options of a two- or many-operand product."""
    labelled = equation(site.node)
    if labelled is None:
        return
    operands, labels, out = labelled
    if len(set(operands)) != len(operands):
        return
    for label in dict.fromkeys("".join(labels)):
        yield from _cut_label(site, operands, labels, out, label)


def grouped(site: Site) -> Iterator[Option]:
    """grouped_mm(x[t, i], W[e, i, o], offsets): the rows of each expert times its matrix; i or o may be cut."""
    x, weight = site.node.args[:2]
    if (
        isinstance(x, fx.Node)
        and isinstance(weight, fx.Node)
        and x is not weight
        and len(site.inputs) < 4
        and len(site.shape(x)) == 2
        and len(site.shape(weight)) == 3
    ):
        for label in "YZ":
            yield from _cut_label(site, [x, weight], ["TZ", "EZY"], "TY", label)


def _cut_label(site: Site, operands: list[fx.Node], labels: list[str], out: str, label: str) -> Iterator[Option]:
    attends = not any(site.is_weight(n) for n in operands)
    for segments, padding in _segmentations(site, operands, labels, out, label):
        given = {
            n: Placement("V", w.index(label), segments, padding)
            for n, w in zip(operands, labels, strict=True)
            if label in w
        }
        if label in out:
            yield site.option(Placement("V", out.index(label), segments, padding), given, Form.COLUMN, attends=attends)
        elif not padding and all(s.sharded for s in segments):
            yield site.option(P, given, Form.ROW, attends=attends)


def _segmentations(
    site: Site, operands: list[fx.Node], labels: list[str], out: str, label: str
) -> list[tuple[tuple[Segment, ...], int]]:
    """Ways to cut a label that someone asks for; a feature label of a weight is offered plainly too."""
    found = {
        (c.segments, c.padding)
        for n, w in zip(operands, labels, strict=True)
        if label in w
        for c in site.candidates(n)
        if c.dim == w.index(label)
    }
    if label in out:
        found |= {(c.segments, c.padding) for c in site.candidates() if c.dim == out.index(label)}
    for node, word in zip(operands, labels, strict=True):
        size = site.shape(node)[word.index(label)] if label in word else 0
        if size and site.is_weight(node) and site.divides(size):
            found.add(((Segment(size),), 0))
    return sorted(found)


# ---- the covered ops, and the forms that rules may give beside whole and partial

COVERS = (
    Covers(contraction, "linear mm bmm matmul einsum", gives={Form.COLUMN, Form.ROW}),
    Covers(grouped, "_grouped_mm", gives={Form.COLUMN, Form.ROW}),
)
