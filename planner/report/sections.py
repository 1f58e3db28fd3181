"""The sections of an explained Plan as titles, columns and cells, before anything draws them."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from passes.program.stages import BoundaryPlan
from planner.cost.memory import MemoryRow
from planner.cost.step_time import PARTS
from planner.fold import V
from planner.recompute.rows import RecomputeRow
from planner.regions.regions import GraphRegion
from planner.report.diagnostics import remarks_section, warnings_section
from planner.report.experts import experts_section
from planner.report.fold import fold, ranges
from planner.report.section import Column, Section, folded, table
from planner.sharding.buffers import BufferPlan
from planner.sharding.parameters import ParameterPlan
from planner.spec.fields import AUTO
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
        _recompute(plan, full),
        _compiled(plan, full),
    ]
    rest = [_optimizer(plan), _memory(plan), _lengths(plan), _cost(plan)]
    rest.append(remarks_section(plan, full, each_remark))
    return [*head, *(section for section in (*graphs, *rest) if section.rows), Section("Summary", note=_summary(plan))]


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
        Column("dtype", attrgetter("dtype")),
        Column("style", attrgetter("style")),
        Column("cut", cut_of),
        Column("stages", lambda rows: ranges(stage for p in rows for stage in p.stages), joins=True),
        Column("group", lambda p: p.group or "-", is_shown=any(p.group for p in plan.parameters)),
        Column("reason", lambda p: p.reason + ("" if p.origin == "default" else f" [{p.origin}]")),
    ]
    title, name = f"Parameters ({len(plan.parameters)})", ("name", attrgetter("name"))
    return folded(title, plan.parameters, name, columns, full=full, label=lambda n, p: " = ".join((n, *p.aliases)))


def cut_of(p: ParameterPlan) -> str:
    """dim 1: 768+64(whole), padded by 47; of experts also the dim that ep cuts: dim 0 over ep, dim 2"""
    experts = f"dim {p.expert_dim} over ep" if p.expert_dim >= 0 else ""
    if p.dim is None:
        return experts or "-"
    sizes = (f"{size}{'(whole)' if i in p.whole_segments else ''}" for i, size in enumerate(p.segments))
    segments = f": {'+'.join(sizes)}" if len(p.segments) > 1 else ""
    own = f"dim {p.dim}{segments}{f', padded by {p.padding}' if p.padding else ''}"
    return f"{experts}, {own}" if experts else own


def _collectives(plan: Tables, full: bool) -> Section:
    columns = [
        Column("kind", attrgetter("kind")),
        Column("axis", attrgetter("axis")),
        Column("phase", lambda c: f"{c.phase}, again" if c.again else c.phase),
        Column("bytes", lambda c: f"{c.bytes:,}", is_number=True),
        Column("count", lambda c: str(c.count), is_number=True),
        Column("per", attrgetter("per")),
        Column("stages", lambda rows: ranges(c.stage for c in rows if c.stage is not None) or "-", joins=True),
    ]
    title, note = f"Collectives ({len(plan.collectives)})", "" if plan.collectives else "none: ranks do not communicate"
    return folded(title, plan.collectives, ("where", attrgetter("where")), columns, note, full=full)


def _stages(plan: Tables) -> Section:
    def boundaries(values: Sequence[BoundaryPlan]) -> str:
        return "; ".join(f"{v.name} {format_shape(v.shape)} {v.dtype}, {v.bytes:,} bytes" for v in values) or "-"

    columns = [
        Column("stage", lambda s: str(s.index), is_number=True),
        Column("pp rank", lambda s: str(s.pp_rank), is_number=True),
        Column("chunk", lambda s: str(s.chunk), is_number=True),
        Column("blocks", lambda s: str(len(s.blocks)), is_number=True),
        Column("parameters", lambda s: f"{s.num_parameters:,}", is_number=True),
        Column("names", lambda s: ", ".join(item.name for item in fold(s.blocks, str, lambda _: None)) or "-"),
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
    def crossing(key: str) -> tuple[Column, Column]:
        """Each block has names of its own for the same values, as many in all blocks of a line."""

        def names(rows: Sequence[GraphRegion]) -> str:
            return ", ".join(getattr(rows[0], key)) + (", …" if len(rows) > 1 else "")

        count = Column("", lambda r: str(len(getattr(r, key))), is_shown=False)
        return count, Column(key, names, joins=True)

    columns = [
        Column("scope", attrgetter("scope")),
        Column("captured", lambda r: "yes" if r.captured else "no"),
        *crossing("inputs"),
        *crossing("outputs"),
        Column("slot bytes", lambda r: f"{r.bytes:,}", is_number=True),
        Column("reason", attrgetter("reason")),
    ]
    return folded("Graph regions", plan.graph_regions, ("block", attrgetter("block")), columns, full=full)


def _graphs(plan: Tables, full: bool) -> Section:
    counts = ("num_regions", "num_slots", "num_graphs", "num_replays")
    sizes = ("input_bytes", "output_bytes", "gradient_bytes", "message_bytes")
    titles = ("regions", "slots", "graphs", "replays", "inputs", "outputs", "gradients", "messages")
    columns = [
        Column("pp rank", lambda s: str(s.pp_rank), is_number=True),
        Column("chunk", lambda s: "all" if s.chunk is None else str(s.chunk), is_number=True),
        *(_number(title, key) for title, key in zip(titles, (*counts, *sizes), strict=True)),
        Column("slots of microbatches", lambda s: " ".join(map(str, s.slots)) if full else format_slots(s.slots)),
    ]
    note = "replays per step; bytes of all slots; slots of microbatches 0, 1, …: (0 1).. repeats in turn"
    return table("Graphs", plan.graph_slots, columns, note)


def _number(title: str, key: str) -> Column:
    return Column(title, lambda row: f"{getattr(row, key):,}", is_number=True)


def format_slots(slots: Sequence[int]) -> str:
    """``(0 1 2)..`` for slots that come in turn; else the first of them."""
    first = next((n for n in range(1, len(slots)) if all(s == slots[i % n] for i, s in enumerate(slots))), len(slots))
    if first * 2 < len(slots) and first <= _LONG_ORDER:
        return f"({' '.join(map(str, slots[:first]))}).."
    return " ".join(map(str, slots[:_LONG_ORDER])) + (" …" if len(slots) > _LONG_ORDER else "")


def _recompute(plan: Tables, full: bool) -> Section:
    """The recomputed ops, line by line; equal blocks share a row."""

    def name(row: RecomputeRow) -> str:
        return row.where if row.where.startswith(row.block) else f"{row.block} {row.where}"

    columns = [
        Column("kind", attrgetter("kind")),
        Column("ops", attrgetter("ops")),
        _number("freed", "bytes"),
        _number("FLOPs", "flops"),
        _number("bytes moved", "moved"),
    ]
    lines = ["per microbatch on one rank"]
    for stage in sorted({row.stage for row in plan.recompute}):
        mine = [row for row in plan.recompute if row.stage == stage]
        freed, flops, moved = (sum(getattr(row, key) for row in mine) for key in ("bytes", "flops", "moved"))
        done = f"{flops:,} FLOPs and {moved:,} bytes moved to recompute them"
        lines.append(f"stage {stage}: {freed:,} bytes freed, {done}")
    return folded("Recompute", plan.recompute, ("where", name), columns, "\n".join(lines), full=full)


def _compiled(plan: Tables, full: bool) -> Section:
    """Pieces by their shared functions, and ops that run eagerly, with the reason."""
    columns = [
        Column("ops", attrgetter("ops")),
        Column("function", lambda row: "-" if row.reason else str(row.function), is_number=True),
        Column("why not compiled", attrgetter("reason")),
    ]
    pieces = [row for row in plan.compiled if not row.reason]
    is_auto = plan.spec.get("compile") == AUTO
    where = " on GPUs with triton, and run op by op elsewhere (compile: auto)" if is_auto else ""
    note = (
        f"{len(pieces)} pieces share {len({row.function for row in pieces})} compiled functions{where}; products with "
        "weights, attention and collectives between them are not compiled. Activation memory is that of compiled "
        "pieces, which save less than their ops"
    )
    return folded("Compiled", plan.compiled, ("where", attrgetter("where")), columns, note, full=full)


def _lengths(plan: Tables) -> Section:
    columns = [
        Column("length", lambda row: str(row.length), is_number=True),
        Column("sequences", lambda row: str(row.sequences), is_number=True),
        Column("microbatches", lambda row: str(row.microbatches), is_number=True),
        Column("fullest rank", lambda row: format_bytes(row.memory), is_number=True),
        Column("exchanged", lambda row: format_bytes(row.exchanged), is_number=True),
        Column("a step", lambda row: "-" if row.seconds is None else format_seconds(row.seconds), is_number=True),
    ]
    note = "parameters, stages and optimizer are the same at all lengths; the other tables are of the longest"
    return table("Lengths", plan.lengths, columns, note)


def _optimizer(plan: Tables) -> Section:
    name, buffers = plan.optimizer.name, plan.optimizer.buffers
    columns = [
        Column("pp rank", lambda b: str(b.pp_rank), is_number=True),
        Column("parameters / gradients", lambda b: f"{b.dtype} / {b.gradient_dtype}"),
        _number("elements", "num_elements"),
        Column("per dp rank", _shard, is_number=True),
        Column("buckets", lambda b: str(len(b.buckets)), is_number=True),
        Column("update rule", _rule, is_shown=any(b.rule != name for b in buffers)),
    ]
    note = f"{name}, zero {plan.optimizer.zero}, alignment {plan.optimizer.alignment}"
    return table("Optimizer buffers", buffers, columns, note)


def _shard(buffer: BufferPlan) -> str:
    over = "" if buffer.reduced_over == "dp" else f" ({buffer.reduced_over})"
    return f"{buffer.shard_elements:,}{over}"


def _rule(buffer: BufferPlan) -> str:
    """With the number of matrices that it updates whole, and the ranks that are their homes."""
    homes = [home for bucket in buffer.buckets for home in bucket.homes]
    over = f" on {len(set(homes))} home ranks of {buffer.matrix_axis}" if buffer.matrix_axis else ""
    return f"{buffer.rule}, {len(homes)} matrices{over}" if homes else buffer.rule


_ALWAYS = ("parameters", "gradients", "optimizer", "activations", "total")
_MEMORY = (*_ALWAYS[:4], "logits", "working", "communication", "whole", "graph_buffers", "slack", "device", "total")


def _memory(plan: Tables) -> Section:
    def size(part: str) -> Column:
        is_shown = part in _ALWAYS or any(getattr(row, part) for row in plan.memory)
        return Column(_words(part), lambda row: format_bytes(getattr(row, part)), is_number=True, is_shown=is_shown)

    def each(row: MemoryRow) -> str:
        return " + ".join(map(format_bytes, row.of_microbatch))

    columns = [
        Column("pp rank", lambda row: str(row.pp_rank), is_number=True),
        *map(size, _MEMORY),
        Column("per microbatch", each, is_number=True, is_shown=any(row.of_microbatch for row in plan.memory)),
        Column("peak", lambda row: f"at {row.peak}" if row.peak else "", is_shown=any(row.peak for row in plan.memory)),
    ]
    return table("Memory of one rank", plan.memory, columns)


def _cost(plan: Tables) -> Section:
    if plan.cost is None:
        return Section("Estimated time of one step")
    step = plan.cost.step_seconds
    seconds = {_words(part): getattr(plan.cost, part) for part in PARTS if getattr(plan.cost, part)}
    note = f"{format_seconds(step)} per step on {plan.spec.get('cluster') or 'its cluster'}"
    if plan.cost.uncertain:
        note += " ({} to {})".format(*map(format_seconds, plan.cost.range))
    if plan.cost.flops and step:
        reached = plan.cost.flops / step
        peak = f", {reached / plan.cost.peak:.1%} of peak" if plan.cost.peak else ""
        note += f"; {reached / 1e12:.3g} TFLOP/s per device{peak}, recomputation not counted"
    columns = [
        Column("part", lambda item: item[0]),
        Column("seconds", lambda item: format_seconds(item[1]), is_number=True),
        Column("share", lambda item: f"{item[1] / step:.1%}" if step else "-", is_number=True),
    ]
    return table("Estimated time of one step", seconds.items(), columns, note)


def _words(part: str) -> str:
    return part.replace("_", " ")


def _summary(plan: Tables) -> str:
    s = plan.summary
    shares = (
        f"{s.flops_sharded_fraction:.1%} of the matrix FLOPs and {s.parameters_sharded_fraction:.1%} of the parameters"
    )
    sharded = f"over tp {plan.mesh.tp}, {shares} are sharded"
    return f"{s.num_parameters:,} parameters; {sharded}"


def format_shape(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"
