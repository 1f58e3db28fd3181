"""The values gathered for linears that are not saved for the backward, but gathered again there.

Under sequence parallelism each rank has its part of the sequence. The input of a column-parallel linear is gathered,
and its weight's gradient needs the full input again: saved, it is t times the part that a rank holds anyway; gathered
again while the gradient of the value is computed, only the part is saved (Korthikanti et al. 2022, section 4.2).

    gathered value [s, h]      kept             gathered again
    bytes a rank keeps         s·h              s·h / t, or 0 if no op saves it
    moved in the backward      reduce-scatter   all-gather + reduce-scatter
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx

from passes.partition.type_changes import TypeChange
from passes.program.ops.groups import WITH_WEIGHT
from passes.regions import Region
from planner.decisions import Decisions
from planner.sharding.shards import Shards

aten = torch.ops.aten


def gather_again(shards: Shards, decisions: Decisions, regions: Sequence[Region]) -> Shards:
    """``shards``, with changes that say whether the full value is gathered ``again`` in the backward.

    One op gathers and multiplies: if its linears are in more than one region, the full value is saved.
    """
    home = {name: region.index for region in regions if not region.refused for name in sorted(region.nodes)}
    changes = tuple(
        tuple(replace(c, again=True) if _is_for_products(c, decisions, home) else c for c in of_stage)
        for of_stage in shards.changes
    )
    return replace(shards, changes=changes)


def _is_for_products(change: TypeChange, decisions: Decisions, home: Mapping[str, int]) -> bool:
    """Whether only products with weights read the gathered value, and one of the weights trains."""
    program = decisions.program
    if change.how.name != "gather" or not change.how.backward or change.axis != "tp":
        return False
    if set(change.readers) & {"send", "loss"}:
        return False
    value, readers = program.node(change.value), [program.node(name) for name in change.readers]
    factors = [(reader, _weight_of(reader, value)) for reader in readers]
    reads_unchanged = decisions.placements.reads_unchanged
    held = [w for reader, w in factors if w is not None and w.name in program.parameters and reads_unchanged(reader, w)]
    is_one_op = len({reader.target for reader in readers}) == 1 and len({home.get(n) for n in change.readers}) == 1
    return is_one_op and len(held) == len(readers) and any(w.meta["grad"] for w in held)


def _weight_of(reader: fx.Node, value: fx.Node) -> fx.Node | None:
    """The factor of ``value`` in a product without a bias."""
    is_product = reader.target in WITH_WEIGHT and len(reader.args) == 2 and not reader.kwargs
    weight = reader.args[1] if is_product and reader.args[0] is value else None
    return weight if isinstance(weight, fx.Node) and weight is not value else None
