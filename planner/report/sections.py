"""The sections of an explained Plan as titles, columns and cells, before anything draws them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from operator import attrgetter
from typing import Any

from passes.program.stages import BoundaryPlan
from passes.types.collectives import CollectivePlan
from planner.cost.step_time import PARTS
from planner.fold import V
from planner.regions.regions import GraphRegion
from planner.report.compiled import compiled_section
from planner.report.diagnostics import remarks_section, warnings_section
from planner.report.experts import experts_section
from planner.report.fold import Fold, fold, ranges, unfolded
from planner.report.lengths import lengths_section
from planner.report.recompute import recompute_section
from planner.report.section import TIMES, Section
from planner.sharding.buffers import BufferPlan
from planner.sharding.parameters import ParameterPlan
from planner.tables.sizes import format_bytes, format_seconds
from planner.tables.tables import Tables

_LONG_ORDER = 24  # actions that still read well one by one


def sections(plan: Tables, *, full: bool = False, each_remark: bool = False) -> list[Section]:
    """All sections in reading order; a table without rows is left out, but not parameters and collectives.

    ``full``: a row for every block. ``each_remark``: remarks of one kind are not joined, even if blocks are.
    """
    warned = [section for section in (warnings_section(plan, full),) if section.rows]
    decided = [_parameters(plan, full), _collectives(plan, full), _stages(plan), _schedule(plan)]
    head = [_header(plan), *warned, *decided]
    graphs = [
        experts_section(plan, full=full),
        _regions(plan, full),
        _graphs(plan, full),
        recompute_section(plan, full=full),
        compiled_section(plan, full=full),
    ]
    rest = [_optimizer(plan), _memory(plan), lengths_section(plan), _cost(plan)]
    rest.append(remarks_section(plan, full, each_remark))
    return [*head, *(section for section in (*graphs, *rest) if section.rows), Section("Summary", note=_summary(plan))]


def _header(plan: Tables) -> Section:
    mesh, batch, schedule = plan.mesh, plan.spec.get("batch", {}), plan.schedule
    axes = ", ".join(f"{axis} {getattr(mesh, axis)}" for axis in ("tp", "pp", "dp", "vpp", "cp", "ep", "etp", "edp"))
    bubble = f", bubble {schedule.bubble_fraction:.1%}" if schedule.bubble_fraction else ""
    folded = "; stages run down the pp ranks and back" if mesh.fold == V else ""
    lines = [
        f"mesh      {axes}; world size {mesh.world_size}, order {mesh.order}{folded}",
        f"batch     {batch.get('global', '?')} sequences per step, {batch.get('micro', '?')} per microbatch",
        f"schedule  {schedule.kind}, {schedule.num_microbatches} microbatches{bubble}",
    ]
    return Section("Plan", note="\n".join(lines))


def _parameters(plan: Tables, full: bool) -> Section:
    def name(p: ParameterPlan) -> str:
        return p.name

    def same(p: ParameterPlan) -> Any:
        cut = p.dim, p.segments, p.whole_segments, p.padding, p.expert, p.group
        return p.shape, p.dtype, p.style, *cut, p.reason, p.origin, p.aliases

    folds = unfolded(plan.parameters, name) if full else fold(plan.parameters, name, same)
    columns = ("name", TIMES, "shape", "local shape", "dtype", "style", "cut", "stages", "reason")
    title, rows = f"Parameters ({len(plan.parameters)})", map(_parameter_cells, folds)
    if any(p.group for p in plan.parameters):
        columns = (*columns[:-1], "group", columns[-1])
        rows = ((*row[:-1], item.rows[0].group or "-", row[-1]) for row, item in zip(rows, folds, strict=True))
    return Section(title, columns, tuple(rows), right=frozenset({TIMES}))


def _parameter_cells(item: Fold) -> tuple[str, ...]:
    p: ParameterPlan = item.rows[0]
    stages = ranges(stage for row in item.rows for stage in row.stages)
    origin = "" if p.origin == "default" else f" [{p.origin}]"
    name = " = ".join((item.name, *p.aliases))
    return (
        name,
        str(len(item.rows)),
        format_shape(p.shape),
        format_shape(p.local_shape),
        p.dtype,
        p.style,
        cut_of(p),
        stages,
        p.reason + origin,
    )


def cut_of(p: ParameterPlan) -> str:
    """dim 1: 768+64(whole), padded by 47; of experts also the dim that ep cuts: dim 0 over ep, dim 2"""
    experts = f"dim {p.expert_dim} over ep" if p.expert_dim >= 0 else ""
    if p.dim is None:
        return experts or "-"
    sizes = (f"{size}{'(whole)' if i in p.whole_segments else ''}" for i, size in enumerate(p.segments))
    segments = f": {'+'.join(sizes)}" if len(p.segments) > 1 else ""
    own = f"dim {p.dim}{segments}{f', padded by {p.padding}' if p.padding else ''}"
    return f"{experts}, {own}" if experts else own


def collective_key(c: CollectivePlan) -> Hashable:
    """Equal for collectives that share a line."""
    return c.kind, c.axis, c.phase, c.again, c.bytes, c.count, c.per


def _collectives(plan: Tables, full: bool) -> Section:
    name = attrgetter("where")
    folds = unfolded(plan.collectives, name) if full else fold(plan.collectives, name, collective_key)
    rows = tuple(_collective_cells(item) for item in folds)
    columns = ("where", TIMES, "kind", "axis", "phase", "bytes", "count", "per", "stages")
    note = "" if rows else "none: ranks do not communicate"
    return Section(f"Collectives ({len(plan.collectives)})", columns, rows, note, frozenset({TIMES, "bytes", "count"}))


def _collective_cells(item: Fold) -> tuple[str, ...]:
    c: CollectivePlan = item.rows[0]
    stages = ranges(row.stage for row in item.rows if row.stage is not None) or "-"
    phase = f"{c.phase}, again" if c.again else c.phase
    return item.name, str(len(item.rows)), c.kind, c.axis, phase, f"{c.bytes:,}", str(c.count), c.per, stages


def _stages(plan: Tables) -> Section:
    def boundaries(values: Sequence[BoundaryPlan]) -> str:
        return "; ".join(f"{v.name} {format_shape(v.shape)} {v.dtype}, {v.bytes:,} bytes" for v in values) or "-"

    rows = []
    for s in plan.stages:
        blocks = ", ".join(item.name for item in fold(s.blocks, str, lambda _: None)) or "-"
        cells = (str(s.index), str(s.pp_rank), str(s.chunk), str(len(s.blocks)), f"{s.num_parameters:,}")
        rows.append((*cells, blocks, boundaries(s.receives), boundaries(s.sends)))
    columns = ("stage", "pp rank", "chunk", "blocks", "parameters", "names", "receives", "sends")
    return Section(f"Stages ({len(rows)})", columns, tuple(rows), right=frozenset(columns[:5]))


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
    """A rank's actions in one line; in a long one, runs that count the microbatch up by one are shown by their ends."""

    def show(actions: Sequence[tuple[str, int, int]]) -> str:
        words = [f"{kind}{microbatch}" + (f".{chunk}" if vpp > 1 else "") for kind, microbatch, chunk in actions]
        return words[0] if len(words) == 1 else f"[{' '.join(words)}]"

    words, start = [], 0
    while start < len(order):
        period, repeats = (1, 1) if len(order) <= _LONG_ORDER else _longest_run(order, start)
        last = start + period * (repeats - 1)
        words.append(show(order[start : start + period]))
        if repeats > 1:
            words[-1] += f"..{show(order[last : last + period])}"
        start = last + period
    return " ".join(words)


def _longest_run(order: Sequence[tuple[str, int, int]], start: int) -> tuple[int, int]:
    """(period, repeats) of the run from ``start`` that covers most actions; (1, 1) unless it repeats three times."""
    best = (1, 1)
    for period in (1, 2, 3):
        end = start + period
        while end < len(order) and _counts_up(order[end - period], order[end]):
            end += 1
        repeats = (end - start) // period
        if repeats >= 3 and repeats * period > best[0] * best[1]:
            best = (period, repeats)
    return best


def _counts_up(before: tuple[str, int, int], after: tuple[str, int, int]) -> bool:
    return (before[0], before[1] + 1, before[2]) == tuple(after)


def _regions(plan: Tables, full: bool) -> Section:
    def name(r: GraphRegion) -> str:
        return r.block

    def same(r: GraphRegion) -> Any:
        return r.scope, r.captured, r.reason, len(r.inputs), len(r.outputs), r.bytes

    folds = unfolded(plan.graph_regions, name) if full else fold(plan.graph_regions, name, same)
    rows = tuple(_region_cells(item) for item in folds)
    columns = ("block", TIMES, "scope", "captured", "inputs", "outputs", "slot bytes", "reason")
    return Section("Graph regions", columns, rows, right=frozenset({TIMES, "slot bytes"}))


def _region_cells(item: Fold) -> tuple[str, ...]:
    r: GraphRegion = item.rows[0]
    more = ", …" if len(item.rows) > 1 else ""  # each block has names of its own for the same values
    captured, crossing = "yes" if r.captured else "no", (", ".join(names) + more for names in (r.inputs, r.outputs))
    return item.name, str(len(item.rows)), r.scope, captured, *crossing, f"{r.bytes:,}", r.reason


def _graphs(plan: Tables, full: bool) -> Section:
    rows = []
    for s in plan.graph_slots:
        counts = (s.num_regions, s.num_slots, s.num_graphs, s.num_replays)
        sizes = (s.input_bytes, s.output_bytes, s.gradient_bytes, s.message_bytes)
        chunk = "all" if s.chunk is None else str(s.chunk)
        cells = (str(s.pp_rank), chunk, *(f"{n:,}" for n in (*counts, *sizes)))
        rows.append((*cells, " ".join(map(str, s.slots)) if full else format_slots(s.slots)))
    columns = (
        "pp rank",
        "chunk",
        "regions",
        "slots",
        "graphs",
        "replays",
        "inputs",
        "outputs",
        "gradients",
        "messages",
    )
    note = "replays per step; bytes of all slots; slots of microbatches 0, 1, …: (0 1).. repeats in turn"
    return Section("Graphs", (*columns, "slots of microbatches"), tuple(rows), note, frozenset(columns))


def format_slots(slots: Sequence[int]) -> str:
    """``(0 1 2)..`` for slots that come in turn; else the first of them."""
    first = next((n for n in range(1, len(slots)) if all(s == slots[i % n] for i, s in enumerate(slots))), len(slots))
    if first * 2 < len(slots) and first <= _LONG_ORDER:
        return f"({' '.join(map(str, slots[:first]))}).."
    return " ".join(map(str, slots[:_LONG_ORDER])) + (" …" if len(slots) > _LONG_ORDER else "")


def _optimizer(plan: Tables) -> Section:
    rows = []
    for b in plan.optimizer.buffers:
        dtypes = f"{b.dtype} / {b.gradient_dtype}"
        shared = f"{b.shard_elements:,}{'' if b.reduced_over == 'dp' else f' ({b.reduced_over})'}"
        rows.append((str(b.pp_rank), dtypes, f"{b.num_elements:,}", shared, str(len(b.buckets))))
    columns = ["pp rank", "parameters / gradients", "elements", "per dp rank", "buckets"]
    if any(b.rule != plan.optimizer.name for b in plan.optimizer.buffers):
        columns.append("update rule")
        rows = [(*row, _rule(b)) for row, b in zip(rows, plan.optimizer.buffers, strict=True)]
    note = f"{plan.optimizer.name}, zero {plan.optimizer.zero}, alignment {plan.optimizer.alignment}"
    right = frozenset({"pp rank", "elements", "per dp rank", "buckets"})
    return Section("Optimizer buffers", tuple(columns), tuple(rows), note, right)


def _rule(buffer: BufferPlan) -> str:
    """With the number of matrices that it updates whole, and the ranks that are their homes."""
    homes = [home for bucket in buffer.buckets for home in bucket.homes]
    over = f" on {len(set(homes))} home ranks of {buffer.matrix_axis}" if buffer.matrix_axis else ""
    return f"{buffer.rule}, {len(homes)} matrices{over}" if homes else buffer.rule


def _memory(plan: Tables) -> Section:
    parts = ("parameters", "gradients", "optimizer", "activations", "logits", "working", "communication")
    parts += ("whole", "graph_buffers", "slack", "device", "total")
    shown = [part for part in parts if part in _ALWAYS or any(getattr(row, part) for row in plan.memory)]
    cells = [[str(row.pp_rank), *(format_bytes(getattr(row, part)) for part in shown)] for row in plan.memory]
    columns = ["pp rank", *(part.replace("_", " ") for part in shown)]
    if any(row.of_microbatch for row in plan.memory):
        columns.append("per microbatch")
        for row, line in zip(plan.memory, cells, strict=True):
            line.append(" + ".join(map(format_bytes, row.of_microbatch)))
    right = frozenset(columns)
    if any(row.peak for row in plan.memory):
        columns.append("peak")
        for row, line in zip(plan.memory, cells, strict=True):
            line.append(f"at {row.peak}" if row.peak else "")
    return Section("Memory of one rank", tuple(columns), tuple(map(tuple, cells)), right=right)


_ALWAYS = {"parameters", "gradients", "optimizer", "activations", "total"}


def _cost(plan: Tables) -> Section:
    if plan.cost is None:
        return Section("Estimated time of one step")
    step = plan.cost.step_seconds
    shown = [part for part in PARTS if getattr(plan.cost, part)]
    rows = [
        (part.replace("_", " "), format_seconds(getattr(plan.cost, part)), getattr(plan.cost, part)) for part in shown
    ]
    cells = tuple((name, text, f"{part / step:.1%}" if step else "-") for name, text, part in rows)
    note = f"{format_seconds(step)} per step on {plan.spec.get('cluster') or 'its cluster'}"
    if plan.cost.uncertain:
        note += " ({} to {})".format(*map(format_seconds, plan.cost.range))
    if plan.cost.flops and step:
        reached = plan.cost.flops / step
        peak = f", {reached / plan.cost.peak:.1%} of peak" if plan.cost.peak else ""
        note += f"; {reached / 1e12:.3g} TFLOP/s per device{peak}, recomputation not counted"
    columns = ("part", "seconds", "share")
    return Section("Estimated time of one step", columns, cells, note, frozenset(columns[1:]))


def _summary(plan: Tables) -> str:
    s = plan.summary
    shares = (
        f"{s.flops_sharded_fraction:.1%} of the matrix FLOPs and {s.parameters_sharded_fraction:.1%} of the parameters"
    )
    sharded = f"over tp {plan.mesh.tp}, {shares} are sharded"
    return f"{s.num_parameters:,} parameters; {sharded}"


def format_shape(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"
