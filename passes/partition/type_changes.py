"""The changes of type of values over tp (etp among experts): the list that lowering inserts and the plan prints.

A change happens on the stage that reads, once for all its readers there; partial sums are added up on the stage that
made them, before they are sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import fx

from passes.errors import PlanError
from passes.moe.domain import axis_of, is_here, is_of_one
from passes.partition.placements import Placements
from passes.program.program import Program
from passes.program.source_lines import where_of
from passes.program.stages import StageAssignment
from passes.types.conversions import Conversion, conversion
from passes.types.sizes import Sizes
from passes.types.types import I, Placement


@dataclass(frozen=True, slots=True)
class TypeChange:
    """Value ``value`` goes from type ``before`` to ``after`` over ``axis`` on ``stage``, for the readers named."""

    stage: int
    value: str
    before: Placement
    after: Placement
    how: Conversion
    readers: tuple[str, ...]
    axis: str = "tp"


def sent_type(placement: Placement) -> Placement:
    """The type in which a value crosses to the next stage: never as partial sums."""
    return I if placement.kind == "P" else placement


def runs_here(stages: StageAssignment, node: fx.Node, stage: int) -> bool:
    """Whether ``stage`` computes the node (placeholders stand wherever they are read)."""
    return node.op == "placeholder" or stages.runs_on(node.name, stage)


def type_at(placements: Placements, stages: StageAssignment, node: fx.Node, stage: int) -> Placement:
    """The type in which ``node``'s value arrives on ``stage``: its own type, or the type in which it was sent."""
    made = placements.of(node)
    return made if runs_here(stages, node, stage) else sent_type(made)


def wanted_types(
    placements: Placements, stages: StageAssignment, program: Program, stage: int
) -> Iterator[tuple[fx.Node, Placement, str]]:
    """(value, type, reader) for all that ``stage`` reads, the values it sends and the loss included."""
    for node in program.graph.graph.nodes:
        if node.op == "call_function" and stages.runs_on(node.name, stage):
            for position, value in enumerate(node.all_input_nodes):
                yield value, placements.wanted(node, position), node.name
    if stage < stages.num_stages - 1:
        for name in stages.live[stage]:
            node = program.node(name)
            yield node, sent_type(placements.of(node)), "send"
    loss = program.node(program.loss)
    if stages.runs_on(loss.name, stage):
        yield loss, I, "loss"


def type_changes(
    placements: Placements, stages: StageAssignment, program: Program, stage: int
) -> tuple[TypeChange, ...]:
    """Every change of type on ``stage``, each once, in the order of the values."""
    found: dict[tuple[str, Placement], list[str]] = {}
    for value, after, reader in wanted_types(placements, stages, program, stage):
        if type_at(placements, stages, value, stage) != after:
            found.setdefault((value.name, after), []).append(reader)
    changes = []
    for (name, after), readers in found.items():
        node = program.node(name)
        before = type_at(placements, stages, node, stage)
        held = bool(node.meta.get("parameter"))
        how = conversion(before, after, grad=bool(node.meta.get("grad")), parameter=held, exchange=True)
        assert how is not None, f"{name}: no way from {before} to {after} for {readers}"
        changes.append(TypeChange(stage, name, before, after, how, tuple(readers), axis_of(node)))
    return tuple(changes)


def check_experts_alike(changes: Iterable[Iterable[TypeChange]], program: Program, mesh: Sizes) -> None:
    """Raise PlanError if the experts of one ep rank communicate over etp otherwise than those of another: a plan's row
    is of all ranks of a stage. Experts that are branches are typed each for itself, as its frozen parameters ask.
    """
    for of_stage in changes:
        alone = [(change, program.node(change.value)) for change in of_stage]
        alone = [(c, n) for c, n in alone if is_of_one(n)]
        found = [
            Counter((c.how.forward, c.how.backward) for c, n in alone if is_here(n, mesh, ep_rank))
            for ep_rank in range(mesh.ep)
        ]
        for counts in found:
            del counts["", ""]  # no message
        if any(counts != found[0] for counts in found):
            raise PlanError(
                f"over etp = {mesh.etp}, experts on different ep ranks would run different collectives",
                where=where_of(alone[0][1]),
                fix="set mesh.etp: 1, or train all weights of every expert",
            )
