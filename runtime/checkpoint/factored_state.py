"""Means of rows and columns in a save (adafactor): each kind of a parameter is an entry of its own, with its own shape.

    blocks.0.mlp.up.weight            [a, b]     parameter, main, …
    blocks.0.mlp.up.weight.row_var    [a, 1]     row_var
    blocks.0.mlp.up.weight.col_var    [1, b]     col_var

There are none before the first update that is not skipped.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from planner.frozen_plan import Plan
from planner.sharding.boxes import Box
from planner.spec.update_rules import UPDATE_RULES
from runtime.checkpoint.manifest import Manifest, statistic_of
from runtime.checkpoint.pieces import WrittenPiece
from runtime.distributed.groups import Groups
from runtime.optimizer.factored import FactoredParameter
from runtime.optimizer.zero1 import DistributedOptimizer


def statistics_of(optimizer: DistributedOptimizer) -> Iterator[tuple[FactoredParameter, str, Tensor, Box]]:
    """(parameter, kind, values of this rank, their box) of all that this rank keeps."""
    rule = None if optimizer.optimizer is None else optimizer.optimizer.factored
    for p in () if rule is None else rule.parameters:
        for (kind, values), box in zip(p.state.items(), p.factored.boxes, strict=False):
            yield p, kind, values, box


def written(optimizer: DistributedOptimizer, groups: Groups) -> Iterator[WrittenPiece]:
    """The pieces that this rank writes: the first one of those with equal values."""
    for p, kind, values, box in statistics_of(optimizer):
        if _is_first(p, groups):
            yield WrittenPiece(statistic_of(p.factored.local.fqn, kind), kind, box, values)


def _is_first(p: FactoredParameter, groups: Groups) -> bool:
    local, mesh, place = p.factored.local, groups.mesh, groups.place
    if local.tied_stages and place["pp"] != mesh.pp_rank_of(min(local.tied_stages)):
        return False
    over = [local.axis, mesh.data_axis if local.expert is None else "edp"]
    if local.expert is not None and local.expert.dim >= 0 and p.factored.whole.shape == local.global_shape:
        over.append("ep")
    return not any(place[axis] for axis in over)


def misfits(plan: Plan, manifest: Manifest) -> list[str]:
    """Statistics that are absent from a save, left over, or of another shape or dtype."""
    wanted = dict(_wanted(plan)) if manifest.optimizer.updates > 0 else {}
    given = {name: entry for name, entry in manifest.tensors.items() if entry.is_statistic}
    found = [f"{name} is absent" for name in wanted if name not in given]
    found += [f"{name[:200]} is unexpected" for name in given if name not in wanted]
    for name, (kind, shape, dtype) in wanted.items():
        entry = given.get(name)
        if entry is not None and (entry.shape, entry.values) != (shape, {kind: dtype}):
            found.append(f"{name} is {entry.values} {list(entry.shape)}, the model has {dtype} {list(shape)}")
    return found


def _wanted(plan: Plan) -> Iterator[tuple[str, tuple[str, tuple[int, ...], str]]]:
    """Name → kind, full shape and dtype."""
    for name, buffer in plan.to_run()[1].buffer_of(plan.mesh.ep).items():
        if buffer.is_factored:
            shape, dtype = buffer.by_name[name].global_shape, str(buffer.main_dtype).removeprefix("torch.")
            shapes = (*shape[:-1], 1), (*shape[:-2], 1, shape[-1])
            for kind, of_kind in zip(UPDATE_RULES[buffer.rule].statistics, shapes, strict=True):
                yield statistic_of(name, kind), (kind, of_kind, dtype)
