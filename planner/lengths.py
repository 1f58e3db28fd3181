"""Plans of several lengths of a sequence: one set of weights, and the same shard of each, whatever the length.

The greatest length decides; the plan of every other length holds its parameters as that one does, on the same stages.
All else follows the length: values and messages, what is freed, schedules, graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from passes.errors import PlanError
from passes.types.types import Placement
from planner.cost.memory import MemoryRow
from planner.decisions import Decisions
from planner.frozen_plan import Plan
from planner.sharding.parameters import ParameterPlan
from planner.spec.spec import Spec
from planner.tables.rows import LengthPlan


@dataclass(frozen=True)
class Held:
    """What other lengths take over: the type of each parameter, by name, and the blocks of each stage."""

    placements: Mapping[str, Placement]
    sizes: tuple[int, ...]

    @staticmethod
    def of(decisions: Decisions) -> Held:
        program, placements = decisions.program, decisions.placements
        found = {fqn: placements.of(program.node(name)) for name, fqn in program.parameters.items()}
        return Held(found, tuple(map(len, decisions.stages.blocks_of_stage)))


def plan_lengths(spec: Spec, longest: Plan, decide: Callable[[Spec, Held], Plan]) -> Plan:
    """``longest`` with the plans of the other lengths of ``spec``. Raises PlanError, with the length, if one has none.

    ``decide``: the plan of a spec of one length that takes something over.
    """
    held, shorter = Held.of(longest.to_run()[0]), list[Plan]()
    chosen = Spec.load({**longest.spec, "cluster": None}).model_copy(update={"cluster": spec.cluster})
    for place, length in enumerate(spec.lengths[:-1]):
        try:
            found = decide(spec.chosen(chosen).at(place), held)
            _check_alike(longest, found)
        except PlanError as error:
            what = f"at length {length}: {error.what}"
            raise PlanError(what, where=error.where, fix=error.fix) from error.__cause__
        shorter.append(found)
    plans = [*shorter, longest]
    rows = tuple(_row(length, found) for length, found in zip(spec.lengths, plans, strict=True))
    return replace(longest, shorter=tuple(shorter), lengths=rows, memory=_greatest([p.memory for p in plans]))


def _check_alike(longest: Plan, other: Plan) -> None:
    """Raise PlanError unless every rank holds the same tensors, in the same buffers, for both."""
    for ours, theirs in zip(longest.parameters, other.parameters, strict=True):
        if _layout(ours) != _layout(theirs):
            what = f"the shard of {ours.name} would be another than at the greatest length"
            fix = f"pin it with tensor_parallel: {{overrides: {{{ours.name}: {ours.style}}}}}, or use one length"
            raise PlanError(what, where="inputs", fix=fix)
    if longest.to_run()[1].buffers != other.to_run()[1].buffers:
        what = "its gradients would be summed in another order than at the greatest length"
        raise PlanError(what, where="inputs", fix="use one length")


def _layout(row: ParameterPlan) -> ParameterPlan:
    return replace(row, reason="", where="", origin="")


def _row(length: int, found: Plan) -> LengthPlan:
    batch, times = found.spec["batch"], found.schedule.num_microbatches
    exchanged = sum(c.bytes * c.count * (times if c.per == "microbatch" else 1) for c in found.collectives)
    return LengthPlan(
        length=length,
        sequences=int(batch["global"]),
        microbatches=times,
        memory=max((row.total for row in found.memory), default=0),
        exchanged=exchanged,
        seconds=None if found.cost is None else found.cost.step_seconds,
        decisions=found.hash(),
    )


def _greatest(of_plans: Sequence[tuple[MemoryRow, ...]]) -> tuple[MemoryRow, ...]:
    """Of each pp rank the row with the most bytes."""
    return tuple(max(rows, key=lambda row: row.total) for rows in zip(*of_plans, strict=True))
