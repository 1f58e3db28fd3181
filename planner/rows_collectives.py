"""The collectives' rows: every exchange of a step, in the order of the stages."""

from __future__ import annotations

from math import prod

from torch import fx

from planner.collectives import TypeChange, type_changes
from planner.plan_rows import CollectivePlan
from planner.source import PlanSource
from planner.source_lines import where_of
from planner.spec import Spec


def collective_rows(spec: Spec, source: PlanSource) -> tuple[CollectivePlan, ...]:
    """One row for each exchange."""
    rows: list[CollectivePlan] = []
    block_of = {n: b.path for b in source.blocks.instances for n in b.nodes}
    for stage in range(source.stages.num_stages):
        for change in type_changes(source.placements, source.stages, source.program, stage):
            rows += _change_rows(source, change, block_of)
        rows += _loss_rows(source, stage)
    return tuple(rows)


def _change_rows(source: PlanSource, change: TypeChange, block_of: dict[str, str]) -> list[CollectivePlan]:
    node = source.program.node(change.value)
    reader = change.readers[0]
    at = source.program.node(reader) if reader not in ("send", "loss") else node
    size = _bytes(node)
    rows = []
    for phase, kind in (("forward", change.how.forward), ("backward", change.how.backward)):
        if kind:
            place = at if change.how.name in ("f", "gather") else node
            rows.append(CollectivePlan(kind, "tp", phase, str(where_of(place)), size, 1, "microbatch", change.stage,
                                       block_of.get(place.name, "")))
    return rows


def _loss_rows(source: PlanSource, stage: int) -> list[CollectivePlan]:
    """The vocabulary-parallel loss: per token the maximum, then the sum of exponentials and the target's logit."""
    rows = []
    for node in source.program.graph.graph.nodes:
        option = source.placements.options.get(node.name)
        if option is None or option.rule != "vocabulary" or "cross_entropy" not in str(node.target):
            continue
        if source.stages.stage_of.get(node.name) != stage:
            continue
        logits = node.args[0].meta["val"]
        width = max(4, logits.element_size())
        tokens = int(logits.shape[0])
        smoothing = float(node.args[5]) if len(node.args) > 5 else 0.0
        for scalars in (1, 3 if smoothing else 2):
            rows.append(CollectivePlan("all_reduce", "tp", "forward", str(where_of(node)), scalars * tokens * width, 1,
                                       "microbatch", stage))
    return rows


def _bytes(node: fx.Node) -> int:
    value = node.meta["val"]
    return prod(value.shape) * value.element_size()
