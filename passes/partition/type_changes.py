"""The changes of type of values over tp (etp among experts): the list that lowering inserts and the plan prints.

A change happens on the stage that reads, once for all its readers there; partial sums are added up on the stage that
made them, before they are sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import fx

from passes.moe.domain import axis_of
from passes.partition.typings.table import Option
from passes.program.program import Program, StageAssignment
from passes.types.conversions import Conversion, conversion
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
    """Return the type in which a value crosses to the next stage: never as partial sums."""
    return I if placement.kind == "P" else placement


def runs_here(stages: StageAssignment, node: fx.Node, stage: int) -> bool:
    """Return whether ``stage`` computes the node (placeholders stand wherever they are read)."""
    return node.op == "placeholder" or stages.runs_on(node.name, stage)


def type_at(placements: Placements, stages: StageAssignment, node: fx.Node, stage: int) -> Placement:
    """The type in which ``node``'s value arrives on ``stage``: its own type, or the type in which it was sent."""
    made = placements.of(node)
    return made if runs_here(stages, node, stage) else sent_type(made)


def wanted_types(
    placements: Placements, stages: StageAssignment, program: Program, stage: int
) -> Iterator[tuple[fx.Node, Placement, str]]:
    """Yield (value, type, reader) for all that ``stage`` reads, the values it sends and the loss included."""
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
    """Return every change of type on ``stage``, each once, in the order of the values."""
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


@dataclass(frozen=True)
class Placements:
    """The chosen option of every node (parameters included), by node name.

    ``origins``: "solver", or the override that decided. ``styles``: the overrides' styles, of the parameters that they
    decided.
    ``etp``: the size of the axis over which values in the experts' domain are typed.
    """

    tp: int
    options: dict[str, Option]
    origins: dict[str, str]
    styles: dict[str, str] = field(default_factory=dict)
    etp: int = 0

    def size(self, node: fx.Node) -> int:
        """Return the ranks over which the value of ``node`` is typed."""
        return self.tp if axis_of(node) == "tp" else self.etp or self.tp

    def of(self, node: fx.Node) -> Placement:
        """Return the type of the value that ``node`` makes."""
        return self.options[node.name].out

    def wanted(self, node: fx.Node, position: int) -> Placement:
        """Return the type in which ``node`` reads its ``position``-th input (order of ``all_input_nodes``)."""
        return self.options[node.name].args[position]
