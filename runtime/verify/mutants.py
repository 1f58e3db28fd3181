"""Plans that are wrong on purpose: a comparison with one process that stays green then would prove nothing.

One exchange of the lowered graphs missing, or one parameter frozen.

Exchanges are numbered over all stages, in the order of each stage's graph. A missing one leaves every shape as it was:
sums are left partial, and parts of other ranks are filled with this rank's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from passes.lower import lower
from passes.ops import collectives
from passes.ops.axis import AxisHandle
from passes.ops.column_linear import column_linears
from passes.ops.vocabulary import vocabulary_cross_entropy
from passes.stage_module import RankProgram, StageModule
from planner.errors import PlanError
from planner.frozen_plan import Plan
from planner.placement.types import Placement
from planner.sharding.shards import decide_shards
from planner.spec.spec import Spec


def without_collective(plan: Plan, rank: int, number: int) -> RankProgram:
    """This rank's program without exchange ``number``. Raises PlanError when there are not so many."""
    mine, total = None, 0
    for stage, program in _all_stages(plan, rank):
        nodes = exchanges(stage)
        if total <= number < total + len(nodes):
            _take_out(stage, nodes[number - total])
        total += len(nodes)
        mine = program if program.stages[0].index % plan.mesh.pp == plan.mesh.coordinate(rank)["pp"] else mine
    if number >= total:
        raise PlanError(
            f"there is no collective {number} to take out",
            where="remove_collective",
            fix=f"the lowered graphs hold {total} of them, numbered from 0" if total else "use tp > 1",
        )
    assert mine is not None
    return mine


def freeze_parameter(plan: Plan, fqn: str) -> Plan:
    """The plan with a trainable parameter as a constant, as of a capture that loses it; ``plan`` itself is used up.

    Raises PlanError where the program reads no such parameter.
    """
    source, _ = plan.to_run()
    program, values = source.program, dict(source.model.named_parameters()) if source.model is not None else {}
    name = next((node for node, parameter in program.parameters.items() if parameter == fqn), None)
    if name is None or fqn not in values:
        raise PlanError(
            f"there is no parameter {fqn} to freeze",
            where="freeze_parameter",
            fix=f"name one of {', '.join(list(program.parameters.values())[:8])}",
        )
    del program.parameters[name]
    program.constants[name] = values[fqn].detach().clone().to(program.node(name).meta["val"].dtype)
    return replace(plan, shards=decide_shards(Spec.load({**plan.spec, "cluster": None}), source))


def num_collectives(plan: Plan) -> int:
    """How many exchanges the lowered graphs of all stages hold."""
    return sum(len(exchanges(stage)) for stage, _ in _all_stages(plan, 0))


def exchanges(stage: StageModule) -> list[fx.Node]:
    """The nodes of a stage that talk to other tp ranks in its forward or backward."""
    return [node for node in stage.module.graph.nodes if node.target in STAND_INS]


def _all_stages(plan: Plan, rank: int) -> Iterator[tuple[StageModule, RankProgram]]:
    """Every stage in order, lowered for the tp and dp coordinate of ``rank``."""
    mesh = plan.mesh
    place = mesh.coordinate(rank)
    programs = [lower(plan, mesh.rank_of(**{**place, "pp": pp})) for pp in range(mesh.pp)]
    for index in range(mesh.pp * mesh.vpp):
        program = programs[index % mesh.pp]
        yield program.stages[index // mesh.pp], program


def _take_out(stage: StageModule, node: fx.Node) -> None:
    node.target = STAND_INS[node.target]
    stage.module.recompile()


def _through(x: Tensor, axis: AxisHandle, owned: bool = False) -> Tensor:
    return x.view_as(x)


def _repeated(x: Tensor, axis: AxisHandle, cut: Placement) -> Tensor:
    pieces = x.split([segment.local(axis.size) for segment in cut.segments], cut.dim)
    times = [axis.size if segment.sharded else 1 for segment in cut.segments]
    return torch.cat([piece for piece, n in zip(pieces, times, strict=True) for _ in range(n)], cut.dim)


def _own_part(x: Tensor, axis: AxisHandle, cut: Placement) -> Tensor:
    return collectives.part(x, cut, axis.size, axis.rank)


def _unshared_loss(logits: Tensor, target: Tensor, axis: AxisHandle, *args: Any, **kwargs: Any) -> Tensor:
    alone = AxisHandle(axis.name, 1, 0)
    return vocabulary_cross_entropy(
        logits, target.remainder(logits.shape[1]), alone, logits.shape[1], *args[1:], **kwargs
    )


def _unsummed_gradient(x: Tensor, axis: AxisHandle, *args: Any) -> Any:
    return column_linears(x, AxisHandle(axis.name, 1, 0), *args)


STAND_INS: dict[Any, Callable[..., Any]] = {
    collectives.f: _through,
    collectives.g: _through,
    collectives.g_f: _through,
    collectives.slice_part: _own_part,
    collectives.gather: _repeated,
    collectives.collect: _repeated,
    collectives.scatter: _own_part,
    vocabulary_cross_entropy: _unshared_loss,
    column_linears: _unsummed_gradient,
}
