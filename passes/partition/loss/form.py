"""The kinds of values by the graph's form alone, and whether that is enough.

It is enough if no op between the last weights and the loss has a number or a constant that could count the batch, and
none runs over the batch except one sum, mean or cross-entropy over all tokens: the plain loss of a language model.
"""

import math
from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from passes.partition.batch import mixing
from passes.partition.batch.sequences import Sequences
from passes.partition.loss.counts import input_only, places_rows
from passes.partition.loss.kinds import (
    ROWS,
    SHARE,
    WHOLE,
    Kind,
    counts_inputs,
    is_mean,
    linear_in,
    reduces_rows,
    reduction_of,
    share,
    unknown,
    whole,
)
from passes.partition.loss.scaling import numeric_places
from passes.program.ops.aten import aten, packet_of, tensors_of
from passes.program.ops.groups import CROSS_ENTROPIES, PLACING, Ops
from passes.program.program import Program
from passes.program.walks import operands, walk
from passes.rules.rule import RESULT, Role, operands_of
from passes.rules.table import rule_of

LABELLING = Ops("pow ne eq constant_pad_nd pad masked_fill")  # their numbers are class ids, fillings and exponents


def loss_region(program: Program, on_batch: Collection[fx.Node]) -> set[fx.Node]:
    """Return the loss and its inputs, up to the last calls that read a weight."""

    def is_inside(node: fx.Node) -> bool:
        reads_weight = any(n.name in program.parameters for n in node.all_input_nodes)
        return node.op == "call_function" and not (reads_weight and node in on_batch)

    return set(walk([program.node(program.loss)], operands, into=is_inside))


def kinds_by_form(
    program: Program, on_batch: Collection[fx.Node], region: Collection[fx.Node]
) -> tuple[dict[fx.Node, Kind], list[fx.Node]]:
    """Return the kinds, and the counts."""
    from_inputs = input_only(program)
    kinds: dict[fx.Node, Kind] = {}
    counts: list[fx.Node] = []
    for node in program.graph.graph.nodes:
        kinds[node] = (
            _kind(node, kinds) if node in region and node in on_batch else (Kind(ROWS) if node in on_batch else whole)
        )
        if node.target in CROSS_ENTROPIES and not counts_inputs(node, from_inputs):
            kinds[node] = unknown
        is_scalar = isinstance(node.meta.get("val"), torch.Tensor) and node.meta["val"].dim() == 0
        if kinds[node].name == SHARE and from_inputs.get(node.name) and is_scalar and not places_rows(node):
            kinds[node] = whole
            counts.append(node)
    return kinds, counts


def _kind(node: fx.Node, kinds: dict[fx.Node, Kind]) -> Kind:
    given = [kinds[n] for n in node.all_input_nodes]
    names = {k.name for k in given}
    is_scalar = isinstance(node.meta["val"], torch.Tensor) and node.meta["val"].dim() == 0
    if names == {WHOLE}:
        return whole
    if SHARE in names:
        is_linear = names <= {SHARE, WHOLE} and linear_in(node, [n for n in node.all_input_nodes if kinds[n] != whole])
        return share if is_linear and is_scalar else unknown
    if names <= {ROWS, WHOLE} and is_scalar and _is_total(node):
        return share
    return unknown if names - {ROWS, WHOLE} or not _keeps_rows(node) else Kind(ROWS)


def _is_total(node: fx.Node) -> bool:
    """Return whether it is a loss, or the sum or mean of all elements of one operand."""
    if reduction_of(node):
        return node.target in CROSS_ENTROPIES or reduces_rows(node)
    rule = rule_of(node) if len(operands_of(node)) == 1 else None
    return rule is not None and (is_mean(node) or {f.role for f in rule.factors} == {Role.SUM})


def _keeps_rows(node: fx.Node) -> bool:
    """Return whether an op reduces the last of several dims at most; may_mix checks whether it runs along the batch."""
    rule = rule_of(node)
    if rule is None or node.target in PLACING or packet_of(node.target) is aten.index:
        return False
    ndim = next(tensors_of(operands_of(node)[0])).dim()
    gone = [f.at(0) for f in rule.factors if f.role is not Role.EACH and f.at(RESULT) is None]
    return all(place is None or (ndim > 1 and place.dim == ndim - 1) for place in gone)


def is_certain(
    sequences: Sequences, kinds: dict[fx.Node, Kind], constants: Collection[fx.Node], region: Collection[fx.Node]
) -> bool:
    """Whether the kinds by form hold however many sequences there are, in the ``region`` of the loss and before it."""
    program, on_batch = sequences.program, sequences.on_batch
    if kinds[program.node(program.loss)].name != SHARE:
        return False
    if any(_is_doubtful(n, kinds, on_batch, constants, sequences.size) for n in region):
        return False
    return not sequences.may_be_mixed(sequences.computed_along(region))


def _is_doubtful(
    node: fx.Node, kinds: dict[fx.Node, Kind], on_batch: Collection[fx.Node], constants: Collection[fx.Node], size: int
) -> bool:
    if node not in on_batch or kinds[node] is unknown or any(n in constants for n in node.all_input_nodes):
        return True
    if kinds[node].name == ROWS and mixing.may_mix(node, on_batch):
        return True
    if any("selected" in n.meta for n in (node, *node.all_input_nodes)):
        return True  # the first sequences, or each in turn
    numbers: list[Any] = [node.args[p] if isinstance(p, int) else node.kwargs[p] for p in numeric_places(node)]
    return node.target not in LABELLING and any(
        math.isfinite(n) and (size == 1 or abs(n) not in (0, 1)) for n in numbers
    )
