"""Plans for several sequence lengths, with one set of weights: all plans shard it alike.

The plan of the longest length decides the shardings and the stages, and all others take them over. Values, messages,
recomputation, schedules and graphs are decided for each length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from passes.errors import PlanError
from passes.partition.sequence.facts import Undivided
from passes.types.types import Placement
from planner.decisions import Decisions
from planner.frozen_plan import Plan
from planner.sharding.parameters import ParameterPlan
from planner.spec.spec import Spec
from planner.tables.tables import LengthPlan


@dataclass(frozen=True)
class KeptDecisions:
    """Decisions that other lengths take over. ``placements``: of parameters, by name; ``sizes``: blocks per stage."""

    placements: Mapping[str, Placement]
    sizes: tuple[int, ...]

    @staticmethod
    def of(decisions: Decisions) -> KeptDecisions:
        program, placements = decisions.program, decisions.placements
        by_name = {fqn: placements.of(program.node(name)) for name, fqn in program.parameters.items()}
        return KeptDecisions(by_name, tuple(map(len, decisions.stages.blocks_of_stage)))


def plan_lengths(spec: Spec, longest: Plan, decide: Callable[[Spec, KeptDecisions], Plan]) -> Plan:
    """Return ``longest`` with the plans of the other lengths of ``spec``.

    ``decide``: plans a spec of one length with decisions to take over. Raises PlanError, with the length, if it fails.
    """
    held, shorter = KeptDecisions.of(longest.to_run()[0]), list[Plan]()
    chosen = Spec.load({**longest.spec, "cluster": None}).model_copy(update={"cluster": spec.cluster})
    for place, length in enumerate(spec.lengths[:-1]):
        try:
            decided = decide(spec.chosen(chosen).at(place), held)
            _check_alike(longest, decided)
        except PlanError as error:
            if error.__cause__ is not None and (fixed := _of_one_length(spec)):
                raise fixed from error
            raise of_length(error, spec, length) from error.__cause__
        shorter.append(decided)
    plans = [*shorter, longest]
    rows = tuple(_row(length, plan) for length, plan in zip(spec.lengths, plans, strict=True))
    of_ranks = zip(*(plan.memory for plan in plans), strict=True)
    most = tuple(max(of_rank, key=lambda row: row.total) for of_rank in of_ranks)
    return replace(longest, shorter=tuple(shorter), lengths=rows, memory=most)


def of_length(error: PlanError, spec: Spec, length: int) -> PlanError:
    """Return ``error`` with the length in its message; if it proposes a size of cp, one that fits all lengths."""
    fix = error.fix_for(spec.lengths) if isinstance(error, Undivided) else error.fix
    return PlanError(f"at length {length}: {error.what}", where=error.where, fix=fix)


def _of_one_length(spec: Spec) -> PlanError | None:
    """Return the error for an input that has the longest length at all lengths, if there is one."""
    for name, given in spec.inputs.items():
        if spec.lengths[-1] in given.shape:
            shape = [list(spec.lengths) if n == spec.lengths[-1] else n for n in given.shape]
            path = f"inputs.{name}.shape"
            what = f"{path} has the one length {spec.lengths[-1]}, but other inputs have {list(spec.lengths)}"
            return spec.error(path, what, f"write shape: {shape}")
    return None


def _check_alike(longest: Plan, other: Plan) -> None:
    """Raise PlanError unless every rank holds the same tensors in the same buffers under both plans."""
    for ours, theirs in zip(longest.parameters, other.parameters, strict=True):
        if _layout(ours) != _layout(theirs):
            what = f"this length would shard {ours.name} differently than the longest one does"
            fix = f"pin it with tensor_parallel: {{overrides: {{{ours.name}: {ours.style}}}}}, or use one length"
            raise PlanError(what, where="inputs", fix=fix)
    if longest.to_run()[1].buffers != other.to_run()[1].buffers:
        what = "this length would sum gradients in a different order than the longest one does"
        raise PlanError(what, where="inputs", fix="use one length")


def _layout(row: ParameterPlan) -> ParameterPlan:
    return replace(row, reason="", where="", origin="")


def _row(length: int, plan: Plan) -> LengthPlan:
    batch, times = plan.spec["batch"], plan.schedule.num_microbatches
    exchanged = sum(c.bytes * c.count * (times if c.per == "microbatch" else 1) for c in plan.collectives)
    return LengthPlan(
        length=length,
        sequences=int(batch["global"]),
        microbatches=times,
        memory=max((row.total for row in plan.memory), default=0),
        exchanged=exchanged,
        seconds=None if plan.cost is None else plan.cost.step_seconds,
        decisions=plan.hash(),
    )
