"""Values that are gathered twice under sequence parallelism, in bytes: those not saved, and those moved again.

The input of a column-parallel linear is gathered, and its weight's gradient needs all of it again: saved, it is t times
the part that a rank holds anyway; gathered again while the gradient of the value is computed, only the part is saved
(Korthikanti et al. 2022, section 4.2). One op gathers and multiplies, so linears in two graph regions save the value.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from passes.blocks.places import Places
from passes.ops.collectives import gather
from passes.ops.column_linear import gathered_linears
from passes.partition.type_changes import TypeChange
from planner.decisions import Decisions
from planner.saved.lowered import Lowered
from planner.tables.rows import Diagnostic
from planner.tables.sizes import format_bytes


def regather_notes(lowered: Lowered, places: Places) -> Iterator[Diagnostic]:
    """One note for each stage that gathers again; and one for gathered values that are saved, with the reason."""
    decisions = lowered.decisions
    if not decisions.regather:
        return
    stages = [list(gathered_values(lowered, stage)) for stage in range(lowered.num_stages)]
    is_any = any(again for values in stages for _, again in values)
    for stage, found in enumerate(stages if is_any else ()):
        sizes = [_bytes(decisions, change) for change, again in found if again]
        whole, tp = sum(sizes), decisions.mesh.tp
        if sizes:
            yield Diagnostic(
                "info",
                f"stage {stage} gathers the inputs of {len(sizes)} groups of linears again in the backward: per "
                f"microbatch, {format_bytes(whole * (tp - 1) // tp)} are not saved and {format_bytes(whole)} "
                "gathered again",
                "tensor_parallel.regather",
            )
        for change in (change for change, again in found if not again):
            yield Diagnostic(
                "info",
                f"a gathered value of {format_bytes(_bytes(decisions, change))} is saved for the backward: "
                "ops other than products with trained weights read it, or CUDA graphs separate them",
                places.text(decisions.program.node(change.value)),
            )


def gathered_values(lowered: Lowered, stage: int) -> Iterator[tuple[TypeChange, bool]]:
    """The values over tp that are gathered forward and summed backward; and whether the backward gathers them again."""
    for node in lowered.stage(stage).graph.nodes:
        if node.target in (gather, gathered_linears):
            change: TypeChange = node.meta["change"]
            if change.axis == "tp" and change.how.backward:
                yield change, node.target is gathered_linears and bool(node.args[3])


def _bytes(decisions: Decisions, change: TypeChange) -> int:
    """Bytes of the gathered value."""
    value = decisions.program.node(change.value).meta["val"]
    return prod(change.before.padded_shape(value.shape)) * value.element_size()
