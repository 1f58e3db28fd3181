"""Group the blocks that are equal in all rows of a plan, and assign the rows of the plan to blocks.

Two blocks are of one kind if their parameters, collectives, graph regions and recomputation are equal except for the
name of the block. Messages between stages belong to no block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from passes.types.collectives import CollectivePlan
from planner.recompute.rows import RecomputeRow
from planner.regions.regions import GraphRegion
from planner.report.fold import fold
from planner.report.sections import collective_key
from planner.sharding.parameters import ParameterPlan
from planner.tables.tables import Tables

BETWEEN_STAGES = "pp"


@dataclass
class Block:
    """The rows of one block, with names from the block on."""

    path: str
    stage: int = 0
    parameters: list[ParameterPlan] = field(default_factory=list)
    collectives: list[CollectivePlan] = field(default_factory=list)
    regions: list[GraphRegion] = field(default_factory=list)
    recompute: list[RecomputeRow] = field(default_factory=list)

    @property
    def kind(self) -> Hashable:
        """Equal for blocks that are alike."""
        return (
            tuple((p.name, parameter_key(p), p.reason) for p in self.parameters),
            tuple((c.where, collective_key(c)) for c in self.collectives),
            tuple((r.scope, r.captured, r.reason, len(r.inputs), len(r.outputs), r.bytes) for r in self.regions),
            tuple((r.where, r.kind, r.ops, r.bytes, r.flops, r.moved) for r in self.recompute),
        )


@dataclass(frozen=True, slots=True)
class Kind:
    """Blocks that are alike: ``first`` has the rows of each. ``stages``: how many of them each stage has."""

    name: str
    first: Block
    blocks: tuple[Block, ...]
    stages: tuple[tuple[int, int], ...]


def parameter_key(p: ParameterPlan) -> Hashable:
    """The drawn facts of a parameter, except its name and its expert."""
    cut = p.dim, p.segments, p.whole_segments, p.padding, p.expert_dim, p.num_experts
    return p.shape, p.local_shape, p.dtype, p.style, cut, p.origin


def kinds_of(blocks: Iterable[Block]) -> tuple[Kind, ...]:
    """In the model's order of the first of each."""
    of_kind: dict[Hashable, list[Block]] = {}
    for block in blocks:
        of_kind.setdefault(block.kind, []).append(block)
    return tuple(map(_kind, of_kind.values()))


def _kind(blocks: list[Block]) -> Kind:
    names = [item.name for item in fold([b.path for b in blocks], str, lambda _: None)]
    counts = Counter(block.stage for block in blocks)
    return Kind(", ".join(names), blocks[0], tuple(blocks), tuple(sorted(counts.items())))


def blocks_of(plan: Tables) -> dict[str, Block]:
    """Path → its rows, in the order of the stages."""
    found = {path: Block(path, stage.index) for stage in plan.stages for path in stage.blocks}
    for p in plan.parameters:
        path = block_of(p.name, found)
        if path:
            where = inside(p.where, path)
            found[path].parameters.append(replace(p, name=inside(p.name, path), where=where))
    for c in plan.collectives:
        if c.block in found and c.axis != BETWEEN_STAGES:
            found[c.block].collectives.append(replace(c, where=inside(c.where, c.block)))
    for row in plan.graph_regions:
        if row.block in found:
            found[row.block].regions.append(row)
    for again in plan.recompute:
        if again.block in found:
            found[again.block].recompute.append(replace(again, where=inside(again.where, again.block)))
    return found


def outside(plan: Tables, paths: Iterable[str]) -> tuple[Block, Block]:
    """The parts before and after the blocks: the rows of no block, in the model's order."""
    known, front, back = set(paths), Block(""), Block("")
    in_blocks = [bool(block_of(p.name, known)) for p in plan.parameters]
    first = in_blocks.index(True) if True in in_blocks else 0
    for i, p in enumerate(plan.parameters):
        if not in_blocks[i]:
            (front if i < first else back).parameters.append(p)
    seen = False
    for c in plan.collectives:
        seen = seen or c.block in known
        if c.phase != "step" and c.axis != BETWEEN_STAGES and c.block not in known:
            (back if seen or not front.parameters or (c.stage or 0) > 0 else front).collectives.append(c)
    back.recompute += [row for row in plan.recompute if row.block not in known]
    back.regions += [row for row in plan.graph_regions if row.block not in known]
    return front, back


def block_of(name: str, paths: Any) -> str:
    """The longest of ``paths`` in which the dotted ``name`` lies; "" if there is none."""
    while name and name not in paths:
        name = name.rpartition(".")[0]
    return name


def inside(name: str, path: str) -> str:
    """``name`` from ``path`` on: ``h.0.attn.out`` in ``h.0`` is ``attn.out``; of the block itself only its line."""
    rest = name[len(path) :] if name.startswith(path) else name
    return rest.lstrip(". ") if rest[:1] in ("", ".", " ") else name
