"""Which calls lowering makes into one (passes.peephole, passes.column_linear): nothing is made between them.

linear(x, W) + b            → linear(x, W, b)
g(linear(x, W))             → summed in place
f(x), linear(f, W), …       → one op, which accumulates its gradient of x in place
cross_entropy(linear(x, W)) → one buffer for logits, their saved values and their gradient
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from passes.partition.options.forms import Form
from passes.partition.type_changes import TypeChange
from passes.program.ops.groups import WITH_WEIGHT
from passes.program.ops.overwritten import OVERWRITTEN
from planner.decisions import Decisions

aten = torch.ops.aten


def is_fused_bias(decisions: Decisions, node: fx.Node) -> bool:
    """Whether ``node`` adds a bias to a product that nothing else reads, and no collective stands between them."""
    if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2:
        return False
    product, bias = node.args
    if not (isinstance(product, fx.Node) and isinstance(bias, fx.Node)) or product.target not in WITH_WEIGHT:
        return False
    if len(product.users) != 1 or len(product.args) != 2 or not bias.meta.get("parameter"):
        return False
    value, whole, placements = bias.meta["val"], product.meta["val"], decisions.placements
    is_vector = value.dim() == 1 and value.shape[0] == whole.shape[-1] and value.dtype == whole.dtype
    return is_vector and placements.wanted(node, 0) == placements.of(product)


def is_summed_in_place(decisions: Decisions, node: fx.Node, change: TypeChange, stage: int) -> bool:
    """Whether only the sum ``change`` reads the result of the product ``node``."""
    placements, stages = decisions.placements, decisions.stages
    is_product = node.target in OVERWRITTEN or placements.options[node.name].form is Form.VOCABULARY
    if not is_product or not stages.runs_on(node.name, stage):
        return False
    users = [user for user in node.users if user.op == "call_function" and stages.runs_on(user.name, stage)]
    return all(placements.wanted(user, user.all_input_nodes.index(node)) == change.after for user in users)


def is_overlapped(decisions: Decisions, change: TypeChange) -> bool:
    """Whether all readers of ``change`` are products of one kind with parameters as they are stored."""
    program, targets = decisions.program, set[Any]()
    for name in change.readers:
        if name in ("send", "loss"):
            return False
        reader = program.node(name)
        args = reader.args
        if reader.target not in WITH_WEIGHT or reader.kwargs or len(args) < 2 or not isinstance(args[0], fx.Node):
            return False
        if args[0].name != change.value or not all(_is_parameter(decisions, reader, a) for a in args[1:]):
            return False
        targets.add(reader.target)
    return len(targets) == 1


def _is_parameter(decisions: Decisions, reader: fx.Node, factor: Any) -> bool:
    """In its stored form: a part sliced from a replicated parameter is another value."""
    is_parameter = isinstance(factor, fx.Node) and bool(factor.meta.get("parameter"))
    return is_parameter and decisions.placements.reads_unchanged(reader, factor)
