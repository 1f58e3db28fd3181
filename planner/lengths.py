"""Plans of several lengths of a sequence: one set of weights, and the same shard of each, whatever the length.

The longest length decides; the plan of every other length holds its parameters as that one does, on the same stages.
All else follows the length: values and messages, what is freed, schedules, graphs.
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
    """What other lengths take over: the type of each parameter, by name, and the blocks of each stage."""

    placements: Mapping[str, Placement]
    sizes: tuple[int, ...]

    @staticmethod
    def of(decisions: Decisions) -> KeptDecisions:
        program, placements = decisions.program, decisions.placements
        found = {fqn: placements.of(program.node(name)) for name, fqn in program.parameters.items()}
        return KeptDecisions(found, tuple(map(len, decisions.stages.blocks_of_stage)))


def plan_lengths(spec: Spec, longest: Plan, decide: Callable[[Spec, KeptDecisions], Plan]) -> Plan:
    """``longest`` with the plans of the other lengths of ``spec``. Raises PlanError, with the length, if one has none.

    ``decide``: the plan of a spec of one length that takes something over.
    """
    held, shorter = KeptDecisions.of(longest.to_run()[0]), list[Plan]()
    chosen = Spec.load({**longest.spec, "cluster": None}).model_copy(update={"cluster": spec.cluster})
    for place, length in enumerate(spec.lengths[:-1]):
        try:
            found = decide(spec.chosen(chosen).at(place), held)
            _check_alike(longest, found)
        except PlanError as error:
            if error.__cause__ is not None and (fixed := _of_one_length(spec)):
                raise fixed from error
            raise of_length(error, spec, length) from error.__cause__
        shorter.append(found)
    plans = [*shorter, longest]
    rows = tuple(_row(length, found) for length, found in zip(spec.lengths, plans, strict=True))
    of_ranks = zip(*(plan.memory for plan in plans), strict=True)
    most = tuple(max(of_rank, key=lambda row: row.total) for of_rank in of_ranks)
    return replace(longest, shorter=tuple(shorter), lengths=rows, memory=most)


def of_length(error: PlanError, spec: Spec, length: int) -> PlanError:
    """The same error, of one of the lengths; a size of cp that it proposes is one for all of them."""
    fix = error.fix_for(spec.lengths) if isinstance(error, Undivided) else error.fix
    return PlanError(f"at length {length}: {error.what}", where=error.where, fix=fix)


def _of_one_length(spec: Spec) -> PlanError | None:
    """The error if the model fails at another length, and an input has the longest one at each of them."""
    for name, given in spec.inputs.items():
        if spec.lengths[-1] in given.shape:
            shape = [list(spec.lengths) if n == spec.lengths[-1] else n for n in given.shape]
            path = f"inputs.{name}.shape"
            what = f"{path} has one length, {spec.lengths[-1]}, and other inputs have {list(spec.lengths)}"
            return spec.error(path, what, f"write shape: {shape}")
    return None


def _check_alike(longest: Plan, other: Plan) -> None:
    """Raise PlanError unless every rank holds the same tensors, in the same buffers, for both."""
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
