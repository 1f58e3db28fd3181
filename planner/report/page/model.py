"""The model as a picture: a card for each kind of block, with its weights, and each collective at its place.

A collective is drawn before the first weight of its module if it makes the module's input (a gather, and the sum of its
gradients), else after the last one. Blocks of one kind share a card, and inside of it rows that differ in a number
alone share a line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from passes.types.collectives import CollectivePlan
from planner.mesh import Mesh
from planner.recompute.rows import RecomputeRow
from planner.regions.regions import GraphRegion
from planner.report.fold import fold, ranges
from planner.report.page.blocks import (
    BETWEEN_STAGES,
    Block,
    blocks_of,
    kinds_of,
    outside,
    parameter_key,
)
from planner.report.page.cuts import Drawing, draw
from planner.report.sections import collective_key, cut_of, format_shape
from planner.sharding.parameters import ParameterPlan
from planner.tables.sizes import format_bytes
from planner.tables.tables import Tables

_OF_EXPERTS = ("ep", "etp")  # axes
Facts = tuple[tuple[str, str], ...]  # (name, value) of an item, shown on request


@dataclass(frozen=True, slots=True)
class Item:
    """A line of a card. ``what``: weight, tied, collective or again; ``rows``: the number of the plan's rows."""

    what: str
    name: str
    facts: Facts
    rows: int = 1
    tag: str = ""
    text: str = ""
    module: str = ""
    drawing: Drawing | None = None
    before: bool = False
    marks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Card:
    """``stages``: the number of its blocks on each stage. ``regions``: the parts that graphs capture, or why not."""

    title: str
    times: int
    items: tuple[Item, ...]
    stages: str = ""
    regions: tuple[GraphRegion, ...] = ()


def model_cards(plan: Tables, scopes: Mapping[str, str] | None = None) -> tuple[Card, ...]:
    """Cards: before the blocks, one for each kind of block, after the blocks, end of the step.

    ``scopes``: dotted name of a parameter → the graph region that reads it, if that is known.
    """
    scopes = scopes or {}
    blocks = blocks_of(plan)
    front, back = outside(plan, blocks)
    aliases = [(alias, p) for p in plan.parameters for alias in p.aliases]
    cards = [Card("before the blocks", 1, _items(front, plan.mesh, scopes))]
    for kind in kinds_of(blocks.values()):
        items = _items(kind.first, plan.mesh, scopes)
        cards.append(Card(kind.name, len(kind.blocks), items, _on_stages(kind.stages), tuple(kind.first.regions)))
    behind = "after the blocks" if len(cards) > 1 else "the model"
    cards.append(Card(behind, 1, _items(back, plan.mesh, scopes, aliases), regions=tuple(back.regions)))
    cards.append(Card("end of the step", 1, _end_of_step(plan)))
    return tuple(card for card in cards if card.items)


def _on_stages(counts: Sequence[tuple[int, int]]) -> str:
    """``7 on stages 0,15; 8 on stages 1..14``."""
    of_count: dict[int, list[int]] = {}
    for stage, count in counts:
        of_count.setdefault(count, []).append(stage)
    return "; ".join(f"{n} on stage{'s' * (len(on) > 1)} {ranges(on)}" for n, on in of_count.items())


def scopes_of(plan: Any) -> dict[str, str]:
    """Dotted name of a parameter → scope of the region that reads it; of a loaded plan nothing is known."""
    if plan.decisions is None or not plan.regions:
        return {}
    program = plan.decisions.program
    scope_of = {node: region.scope for region in plan.regions if not region.refused for node in region.nodes}
    found: dict[str, str] = {}
    for name, fqn in program.parameters.items():
        scope = next((scope_of[u.name] for u in program.node(name).users if u.name in scope_of), "")
        found |= {fqn: scope} if scope else {}
    return found


def _items(
    block: Block, mesh: Mesh, scopes: Mapping[str, str], aliases: Sequence[tuple[str, ParameterPlan]] = ()
) -> tuple[Item, ...]:
    prefix = f"{block.path}." if block.path else ""
    items = [_weight(name, rows, mesh, scopes.get(prefix + rows[0].name, "")) for name, rows in _folded(block)]
    items += [_tied(alias, p) for alias, p in aliases]
    found = [_collective(c.name, c.rows) for c in _folded_collectives(block.collectives)]
    for item in (*found, *map(_again, block.recompute)):
        items.insert(_place(item, items), item)
    return tuple(items)


def _folded(block: Block) -> Iterator[tuple[str, tuple[ParameterPlan, ...]]]:
    for item in fold(block.parameters, lambda p: p.name, parameter_key):
        yield item.name, item.rows


def _folded_collectives(rows: Sequence[CollectivePlan]) -> list[Any]:
    return fold(rows, lambda c: c.where, collective_key)


def _weight(name: str, rows: Sequence[ParameterPlan], mesh: Mesh, scope: str) -> Item:
    p = rows[0]
    numbers = [row.expert_number for row in rows if row.expert_number >= 0]
    _, line = split_where(p.where)
    held = _bytes(p.local_shape, p.dtype)
    drawing = draw(p, mesh, numbers)
    facts = (
        ("why", "; ".join(dict.fromkeys(row.reason for row in rows[:3])) + (" …" if len(rows) > 3 else "")),
        ("decided by", p.origin),
        ("read at", line),
        ("shape", f"{format_shape(p.shape)}, per rank {format_shape(p.local_shape)}"),
        ("cut", cut_of(p)),
        ("drawn", drawing.words),
        ("dtype", p.dtype),
        ("bytes", f"{format_bytes(_bytes(p.shape, p.dtype))}, per rank {format_bytes(held)}"),
        ("also called", ", ".join(p.aliases)),
    )
    text = " → ".join(dict.fromkeys((format_shape(p.shape), format_shape(p.local_shape))))
    marks = (f"graph: {scope}",) if scope else ()
    return Item("weight", name, _given(facts), len(rows), p.style, text, name.rpartition(".")[0], drawing, marks=marks)


def _tied(alias: str, p: ParameterPlan) -> Item:
    facts = (("tied to", p.name), ("why", p.reason), ("on stages", ", ".join(map(str, p.stages))))
    return Item("tied", alias, facts, 1, "tied", f"= {p.name}", alias.rpartition(".")[0])


def _collective(where: str, rows: Sequence[CollectivePlan]) -> Item:
    c = rows[0]
    module, _ = split_where(where)
    facts = (
        ("exchange", f"{c.kind} over {c.axis}, {c.phase}{', repeated for the recomputation' if c.again else ''}"),
        ("at", where),
        ("bytes", f"{c.bytes:,} ({format_bytes(c.bytes)})"),
        ("messages", f"{c.count * len(rows)} per {c.per}"),
    )
    text = f"{c.phase} · {format_bytes(c.bytes)}"
    marks = ("again",) if c.again else ()
    return Item("collective", c.kind, facts, len(rows), c.axis, text, module, before=_makes_input(c), marks=marks)


def _makes_input(c: CollectivePlan) -> bool:
    """Whether it is drawn before its module: a gather, or the sum that goes with it on the way back."""
    if c.phase == "backward":
        return c.kind in ("all_reduce", "reduce_scatter") and not c.again
    return c.kind == "all_gather"


def _again(row: RecomputeRow) -> Item:
    module, _ = split_where(row.where)
    facts = (
        ("recomputed", f"{row.ops} ({row.kind})"),
        ("at", row.where),
        ("freed", f"{row.bytes:,} bytes of one microbatch on one rank"),
        ("costs", f"{row.flops:,} FLOPs, {row.moved:,} bytes moved"),
    )
    return Item("again", row.ops, facts, 1, "again", f"frees {format_bytes(row.bytes)}", module)


def _place(item: Item, items: Sequence[Item]) -> int:
    """The place of a collective among weights: at the edge of its module, or of the nearest module around it."""
    module = item.module
    while module:
        at = [i for i, other in enumerate(items) if _is_in(other.module, module)]
        if item.tag in _OF_EXPERTS:  # their module holds a router and shared experts too
            at = [i for i in at if items[i].tag in ("expert", *_OF_EXPERTS)] or at
        if at:
            return at[0] if item.before else at[-1] + 1
        module = module.rpartition(".")[0]
    return len(items)


def _is_in(module: str, outer: str) -> bool:
    return module == outer or module.startswith(f"{outer}.")


def _end_of_step(plan: Tables) -> tuple[Item, ...]:
    """A line for each kind of exchange over each axis: which buckets they are of is in the tables."""
    rows = [c for c in plan.collectives if c.phase == "step" and c.axis != BETWEEN_STAGES]
    alike: dict[tuple[str, str], list[CollectivePlan]] = {}
    for c in rows:
        alike.setdefault((c.axis, c.kind), []).append(c)
    return tuple(_at_end(axis, kind, found) for (axis, kind), found in alike.items())


def _at_end(axis: str, kind: str, rows: Sequence[CollectivePlan]) -> Item:
    places = [item.name for item in fold(rows, lambda c: c.where, lambda _: None)]
    on_stage = Counter[int | None]()
    for c in rows:
        on_stage[c.stage] += c.bytes * c.count
    most = max(on_stage.values())
    facts = (
        ("exchange", f"{kind} over {axis}, at the end of the step"),
        ("of", "\n".join(places[:8]) + (f"\n… and {len(places) - 8} more" if len(places) > 8 else "")),
        ("bytes", f"{most:,} on the stage with the most bytes"),
        ("messages", f"{sum(c.count for c in rows)} on all stages"),
    )
    return Item("collective", kind, facts, len(rows), axis, f"step · {format_bytes(most)}")


def split_where(where: str) -> tuple[str, str]:
    """(module, line of code) of a place as errors.Where prints it."""
    module, _, line = where.partition("   (")
    return (module, line.removesuffix(")")) if line else ("", module)


def _given(facts: Facts) -> Facts:
    return tuple((what, value) for what, value in facts if value)


def _bytes(shape: Sequence[int], dtype: str) -> int:
    return prod(shape) * getattr(torch, dtype).itemsize
