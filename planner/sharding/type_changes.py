"""Where values change their type over tp: the list that lowering inserts and that the plan prints.

A change happens on the stage that reads, once for all its readers there; partial sums are added up on the stage that
made them, before they are sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from planner.graph.program import Program
from planner.pipeline.stages import StageAssignment
from planner.placement.conversions import Conversion, conversion
from planner.placement.decide import Placements
from planner.placement.types import I, Placement


@dataclass(frozen=True, slots=True)
class TypeChange:
    """Value ``value`` goes from type ``before`` to ``after`` on ``stage``, for the readers named."""

    stage: int
    value: str
    before: Placement
    after: Placement
    how: Conversion
    readers: tuple[str, ...]


def sent_type(placement: Placement) -> Placement:
    """The type in which a value crosses to the next stage: never as partial sums."""
    return I if placement.kind == "P" else placement


def runs_here(stages: StageAssignment, node: fx.Node, stage: int) -> bool:
    """Whether ``stage`` computes the node (placeholders stand wherever they are read)."""
    return node.op == "placeholder" or stages.runs_on(node.name, stage)


def type_at(placements: Placements, stages: StageAssignment, node: fx.Node, stage: int) -> Placement:
    """The type in which ``node``'s value arrives on ``stage``: as it is made, or as it was sent."""
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
        changes.append(TypeChange(stage, name, before, after, how, tuple(readers)))
    return tuple(changes)
