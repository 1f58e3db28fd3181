"""Values that are gathered twice under sequence parallelism, in bytes: those not saved, and those moved again."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from passes.blocks.places import Places
from passes.partition.type_changes import TypeChange
from planner.decisions import Decisions
from planner.sharding.shards import Shards
from planner.tables.rows import Diagnostic
from planner.tables.sizes import format_bytes


def regather_notes(decisions: Decisions, shards: Shards, places: Places) -> Iterator[Diagnostic]:
    """One note for each stage that gathers again; and one for gathered values that are saved, with the reason."""
    again = any(change.again for of_stage in shards.changes for change in of_stage)
    for stage, of_stage in enumerate(shards.changes if again else ()):
        sizes = [_bytes(decisions, change) for change in of_stage if change.again]
        whole, tp = sum(sizes), decisions.mesh.tp
        if sizes:
            yield Diagnostic(
                "info",
                f"stage {stage} gathers the inputs of {len(sizes)} groups of linears again in the backward: per "
                f"microbatch, {format_bytes(whole * (tp - 1) // tp)} are not saved and {format_bytes(whole)} "
                "gathered again",
                "tensor_parallel.regather",
            )
        for change in of_stage:
            if change.how.name == "gather" and change.how.backward and change.axis == "tp" and not change.again:
                value = decisions.program.node(change.value)
                yield Diagnostic(
                    "info",
                    f"a gathered value of {format_bytes(_bytes(decisions, change))} is saved for the backward: "
                    "ops other than products with trained weights read it, or CUDA graphs separate them",
                    places.text(value),
                )


def _bytes(decisions: Decisions, change: TypeChange) -> int:
    """Bytes of the gathered value."""
    value = decisions.program.node(change.value).meta["val"]
    return prod(change.before.padded_shape(value.shape)) * value.element_size()
