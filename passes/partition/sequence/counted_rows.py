"""The mean of a loss over rows that are cut: a rank's sum, over the number of all rows that count.

    cross_entropy(x, labels)   →   cross_entropy(x, labels, reduction="sum") / sum(labels ≠ ignored)

As many rows count as in the whole target, which each rank has. Of targets that are probabilities every row counts:
that mean is 1/cp of a rank's (``Form.MEAN``).
"""

from __future__ import annotations

from typing import Any

from torch import fx

from passes.moe.building import Builder
from passes.partition.loss.loss_ops import MEAN, SUM
from passes.partition.options.base import Option
from passes.partition.options.forms import Form
from passes.partition.sequence.facts import Types
from passes.program.ops.aten import aten, named
from passes.program.ops.groups import CROSS_ENTROPIES
from passes.types.types import I, P


def count_rows(graph: fx.Graph, types: Types) -> None:
    """Rewrite ``graph``, and type what is new."""
    for node in list(graph.nodes):
        if node.target in CROSS_ENTROPIES and named(node)["reduction"] == MEAN:
            option = types.options.get(node)
            if option is not None and option.form is Form.SUM:
                _count(graph, node, types)


def _count(graph: fx.Graph, node: fx.Node, types: Types) -> None:
    given: dict[str, Any] = named(node)
    build = Builder(graph, node, node)
    names = [argument.name for argument in node.target._schema.arguments]  # pyright: ignore
    total = build.call(node.target, *({**given, "reduction": SUM}[name] for name in names))
    count = build.call(aten.sum.default, _weights_of_rows(build, given), grad=False)
    mean = build.call(aten.div.Tensor, total, count)
    types.options |= {total: types.options[node], mean: Option((P, I), P, Form.PARTIAL)}
    types.natives |= {total: P, mean: P}
    node.replace_all_uses_with(mean)


def _weights_of_rows(build: Builder, given: dict[str, Any]) -> fx.Node:
    target, weight = given["target"], given["weight"]
    valid = build.call(aten.ne.Scalar, target, given["ignore_index"])
    if weight is None:
        return valid
    safe = build.call(aten.mul.Tensor, target, valid)
    return build.call(aten.mul.Tensor, build.call(aten.index.Tensor, weight, [safe]), valid)
