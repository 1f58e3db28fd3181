"""The sections of a printed plan as titles, columns and cells.

Warnings come first and in full; remarks (``info``) of one kind are joined:

    linear [384, 128] is sharded (column): its features …   }   linear is sharded (column), 12 times: the first of them
    linear [512, 128] is sharded (column): its features …   }
"""

import re
from collections.abc import Iterable, Sequence
from operator import attrgetter

from passes.program.program import BoundaryPlan
from planner.fold import V
from planner.report.of_ranks import LONG_ORDER, sections_of_ranks
from planner.report.section import (
    TIMES,
    Column,
    Fold,
    Named,
    Section,
    fold,
    folded,
    names_text,
    numbers,
    ranges,
    table,
    texts,
)
from planner.sharding.parameters import ParameterPlan
from planner.tables.tables import Diagnostic, Tables

_SIZES = re.compile(r" ?\[[^]]*\]|\d+")


def sections(plan: Tables, *, full: bool = False, each_remark: bool = False) -> list[Section]:
    """Return all sections in reading order, without empty tables, except those of parameters and collectives.

    ``full``: a row for every block. ``each_remark``: do not join remarks of one kind, even if blocks are folded.
    """
    warned = [section for section in (warnings_section(plan, full),) if section.rows]
    decided = [_parameters(plan, full), _collectives(plan, full), _stages(plan), _schedule(plan)]
    head = [_header(plan), *warned, *decided]
    rest = *sections_of_ranks(plan, full), remarks_section(plan, full, each_remark)
    return [*head, *(section for section in rest if section.rows), Section("Summary", note=_summary(plan))]


def _header(plan: Tables) -> Section:
    mesh, batch, schedule = plan.mesh, plan.spec.get("batch", {}), plan.schedule
    axes = ", ".join(f"{axis} {getattr(mesh, axis)}" for axis in ("tp", "pp", "dp", "vpp", "cp", "ep", "etp", "edp"))
    bubble = f", bubble {schedule.bubble_fraction:.1%}" if schedule.bubble_fraction else ""
    both_ways = "; stages run down the pp ranks and back" if mesh.fold == V else ""
    lines = [
        f"mesh      {axes}; world size {mesh.world_size}, order {mesh.order}{both_ways}",
        f"batch     {batch.get('global', '?')} sequences per step, {batch.get('micro', '?')} per microbatch",
        f"schedule  {schedule.kind}, {schedule.num_microbatches} microbatches{bubble}",
    ]
    return Section("Plan", note="\n".join(lines))


def _parameters(plan: Tables, full: bool) -> Section:
    columns = [
        Column("shape", lambda p: format_shape(p.shape)),
        Column("local shape", lambda p: format_shape(p.local_shape)),
        *texts("dtype", "style"),
        Column("cut", cut_of),
        Column("stages", lambda rows: ranges(stage for p in rows for stage in p.stages), joins=True),
        Column("group", lambda p: p.group or "-", is_shown=any(p.group for p in plan.parameters)),
        Column("reason", lambda p: p.reason + ("" if p.origin == "default" else f" [{p.origin}]")),
    ]
    name = Named("name", attrgetter("name"), lambda folded_name, p: " = ".join((folded_name, *p.aliases)))
    return folded(f"Parameters ({len(plan.parameters)})", plan.parameters, name, columns, full=full)


def cut_of(p: ParameterPlan) -> str:
    """Return the sharded dim, as "dim 1: 768+64(whole), padded by 47"; for experts as "dim 0 over ep, dim 2"."""
    experts = f"dim {p.expert_dim} over ep" if p.expert_dim >= 0 else ""
    if p.dim is None:
        return experts or "-"
    sizes = (f"{size}{'(whole)' if i in p.whole_segments else ''}" for i, size in enumerate(p.segments))
    segments = f": {'+'.join(sizes)}" if len(p.segments) > 1 else ""
    own = f"dim {p.dim}{segments}{f', padded by {p.padding}' if p.padding else ''}"
    return f"{experts}, {own}" if experts else own


def _collectives(plan: Tables, full: bool) -> Section:
    columns = [
        *texts("kind", "axis"),
        Column("phase", lambda c: f"{c.phase}, again" if c.again else c.phase),
        *numbers({"bytes": "bytes"}, ","),
        *numbers({"count": "count"}),
        *texts("per"),
        Column("stages", lambda rows: ranges(c.stage for c in rows if c.stage is not None) or "-", joins=True),
    ]
    title, note = f"Collectives ({len(plan.collectives)})", "" if plan.collectives else "none: ranks do not communicate"
    return folded(title, plan.collectives, Named("where", attrgetter("where")), columns, note, full=full)


def _stages(plan: Tables) -> Section:
    def boundaries(values: Sequence[BoundaryPlan]) -> str:
        return "; ".join(f"{v.name} {format_shape(v.shape)} {v.dtype}, {v.bytes:,} bytes" for v in values) or "-"

    columns = [
        *numbers({"stage": "index", "pp rank": "pp_rank", "chunk": "chunk"}),
        Column("blocks", lambda s: str(len(s.blocks)), is_number=True),
        *numbers({"parameters": "num_parameters"}, ","),
        Column("names", lambda s: names_text(s.blocks) or "-"),
        Column("receives", lambda s: boundaries(s.receives)),
        Column("sends", lambda s: boundaries(s.sends)),
    ]
    return table(f"Stages ({len(plan.stages)})", plan.stages, columns)


def _schedule(plan: Tables) -> Section:
    schedule, pp = plan.schedule, plan.mesh.pp
    columns = {"pp rank": list(range(pp)), "in flight": schedule.peak_in_flight or ("-",) * pp}
    if schedule.peak_waiting:
        columns["wait for W"] = schedule.peak_waiting
    numbers = zip(*columns.values(), strict=True)
    rows = tuple(
        (*map(str, row), format_order(order, plan.mesh.vpp))
        for row, order in zip(numbers, schedule.orders, strict=True)
    )
    chunk = ", F3.1 on chunk 1" if plan.mesh.vpp > 1 else ""
    weights = ", W its weight gradients" if schedule.peak_waiting else ""
    note = (
        f"F3: forward of microbatch 3{chunk}, B its backward{weights}; [F3 B0]..[F7 B4]: a run in which both "
        "numbers count up"
    )
    return Section("Schedule", (*columns, "order"), rows, note, frozenset(columns))


def format_order(order: Sequence[tuple[str, int, int]], vpp: int = 1) -> str:
    """Return a rank's actions in one line; a long line shows only the ends of runs of counting microbatches."""

    def show(actions: Sequence[tuple[str, int, int]]) -> str:
        words = [f"{kind}{microbatch}" + (f".{chunk}" if vpp > 1 else "") for kind, microbatch, chunk in actions]
        return words[0] if len(words) == 1 else f"[{' '.join(words)}]"

    words, start = [], 0
    while start < len(order):
        period, repeats = (1, 1) if len(order) <= LONG_ORDER else _longest_run(order, start)
        last = start + period * (repeats - 1)
        words.append(show(order[start : start + period]))
        if repeats > 1:
            words[-1] += f"..{show(order[last : last + period])}"
        start = last + period
    return " ".join(words)


def _longest_run(order: Sequence[tuple[str, int, int]], start: int) -> tuple[int, int]:
    """Return (period, repeats) of the longest run from ``start``; (1, 1) unless it repeats three times."""
    best = (1, 1)
    for period in (1, 2, 3):
        end = start + period
        while end < len(order):
            (kind, microbatch, chunk), after = order[end - period], order[end]
            if tuple(after) != (kind, microbatch + 1, chunk):
                break
            end += 1
        repeats = (end - start) // period
        if repeats >= 3 and repeats * period > best[0] * best[1]:
            best = (period, repeats)
    return best


def _summary(plan: Tables) -> str:
    s = plan.summary
    shares = (
        f"{s.flops_sharded_fraction:.1%} of the matrix FLOPs and {s.parameters_sharded_fraction:.1%} of the parameters"
    )
    sharded = f"over tp {plan.mesh.tp}, {shares} are sharded"
    return f"{s.num_parameters:,} parameters; {sharded}"


def format_shape(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def warnings_section(plan: Tables, full: bool) -> Section:
    found = [d for d in plan.diagnostics if d.level != "info"]
    columns = [
        Column("level", lambda f: f.rows[0].level),
        Column("where", attrgetter("name")),
        Column(TIMES, lambda f: str(len(f.rows)), is_number=True),
        Column("what", lambda f: f.rows[0].what),
        Column("fix", lambda f: f.rows[0].fix),
    ]
    return table(f"Warnings ({len(found)})", _folds(found, full), columns)


def remarks_section(plan: Tables, full: bool, each: bool = False) -> Section:
    """Return the table of remarks. ``each``: do not join remarks of one kind."""
    found = [d for d in plan.diagnostics if d.level == "info"]
    folds = _folds(found, full)
    rows = [_row(kind) for kind in ([[f] for f in folds] if full or each else _kinds(folds))]
    note = "" if full or each or len(rows) == len(folds) else "remarks of one kind are merged; --full prints each one"
    columns = ("where", TIMES, "what")
    title = f"Remarks ({len(found)})"
    return Section(title, columns, tuple(rows), note, right=frozenset({TIMES}), opened=False)


def _folds(found: Iterable[Diagnostic], full: bool) -> list[Fold]:
    name = attrgetter("where")
    return fold(found, name, attrgetter("level", "what", "fix"), full=full)


def _kinds(folds: Iterable[Fold]) -> list[list[Fold]]:
    """Group remarks that differ only in sizes, in the order of the first of each group."""
    kinds: dict[str, list[Fold]] = {}
    for item in folds:
        kinds.setdefault(_kind(item), []).append(item)
    return list(kinds.values())


def _kind(item: Fold) -> str:
    return _SIZES.sub("", item.rows[0].what.partition(": ")[0])


def _row(kind: list[Fold]) -> tuple[str, ...]:
    first, count = kind[0], sum(len(item.rows) for item in kind)
    if len(kind) == 1:
        return first.name, str(count), first.rows[0].what
    said = {item.rows[0].what for item in kind}
    return f"{first.name}, and more", str(count), said.pop() if len(said) == 1 else _kind(first)
