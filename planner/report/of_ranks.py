"""The sections of a printed plan about single ranks: experts, graphs, recomputation, memory, seconds."""

from collections.abc import Sequence
from operator import attrgetter

from planner.cost.layout import PARTS
from planner.cost.memory import LASTING, MemoryRow
from planner.cost.memory import PARTS as MEMORY_PARTS
from planner.mesh import Mesh
from planner.recompute.decide import RecomputeRow
from planner.regions.regions import GraphRegion
from planner.report.section import TIMES, Column, Fold, Named, Section, fold, folded, numbers, table, texts
from planner.sharding.buffers import BufferPlan
from planner.spec.fields import AUTO
from planner.tables.sizes import format_bytes, format_seconds
from planner.tables.tables import ExpertsPlan, Tables

SHOWN = 8  # maximum number of ranks, or groups, that are listed in full
LONG_ORDER = 24  # the same for actions, or slots


def sections_of_ranks(plan: Tables, full: bool) -> tuple[Section, ...]:
    graphs = _experts(plan, full), _regions(plan, full), _graphs(plan, full), _recompute(plan, full)
    return *graphs, _compiled(plan, full), _optimizer(plan), _memory(plan), _lengths(plan), _cost(plan)


def _experts(plan: Tables, full: bool) -> Section:
    """Return a row for each layer and ep rank; equal layers share their rows."""
    name, same = attrgetter("block"), attrgetter("num_experts", "top_k", "how", "ranks", "bytes", "sends")
    folds = fold(plan.experts, name, same, full=full)
    rows = tuple(cells for item in folds for cells in _cells(item))
    columns = ("block", TIMES, "experts", "per token", "dispatch", "ep rank", "has", "on ranks", "sends", "sent")
    right = frozenset({TIMES, "experts", "per token", "ep rank", "sent"})
    return Section("Experts", columns, rows, _groups(plan.mesh) if rows else "", right)


def _cells(item: Fold) -> list[tuple[str, ...]]:
    row: ExpertsPlan = item.rows[0]
    head = item.name, str(len(item.rows)), str(row.num_experts), str(row.top_k), row.how
    if not row.ranks:
        return [(*head, "-", "all", "every rank", "-", "-")]
    each = row.num_experts // len(row.ranks)
    lines = []
    for ep_rank, ranks in enumerate(row.ranks):
        first = ep_rank * each
        has = str(first) if each == 1 else f"{first} to {first + each - 1}"
        lines.append((str(ep_rank), has, _shortened([str(r) for r in ranks]), row.sends, f"{row.bytes:,}"))
    if len(lines) > SHOWN:
        lines = [*lines[:2], ("…",) * 5, lines[-1]]
    empty = ("",) * len(head)
    return [(*(head if i == 0 else empty), *cells) for i, cells in enumerate(lines)]


def _groups(mesh: Mesh) -> str:
    """Return the note of the table: the expert groups of the first stage, for axes of more than one rank."""
    if not mesh.has_expert_axes:
        return "experts are sharded like other matrices; `mesh.ep` would distribute them over ranks"
    lines = [
        "sent: bytes that a rank dispatches for one microbatch; the combine returns as many. If a token is sent once "
        "to a rank with several of its experts, all choices are assumed to be equally likely",
        "grouped products add weight gradients to the buffer expert by expert; if one kernel multiplies all "
        "experts (bfloat16 on Hopper or later), one kernel also computes their gradient, which is added at once",
    ]
    for axis in ("etp", "ep", "edp"):
        if mesh.size(axis) > 1:
            groups = [f"[{_shortened([str(r) for r in group])}]" for group in mesh.groups_over(axis)]
            lines.append(f"{axis:4} groups  {_shortened(groups)}")
    return "\n".join(lines)


def _shortened(items: Sequence[str]) -> str:
    if len(items) <= SHOWN:
        return ", ".join(items)
    return f"{', '.join(items[:3])}, … {items[-1]} ({len(items)})"


def _regions(plan: Tables, full: bool) -> Section:
    def crossing(key: str) -> tuple[Column, Column]:
        """Return columns of the number and the names of values; each folded block has other names for its values."""

        def names(rows: Sequence[GraphRegion]) -> str:
            return ", ".join(getattr(rows[0], key)) + (", …" if len(rows) > 1 else "")

        count = Column("", lambda r: str(len(getattr(r, key))), is_shown=False)
        return count, Column(key, names, joins=True)

    columns = [
        *texts("scope"),
        Column("captured", lambda r: "yes" if r.captured else "no"),
        *crossing("inputs"),
        *crossing("outputs"),
        Column("slot bytes", lambda r: f"{r.bytes:,}", is_number=True),
        Column("reason", attrgetter("reason")),
    ]
    return folded("Graph regions", plan.graph_regions, Named("block", attrgetter("block")), columns, full=full)


def _graphs(plan: Tables, full: bool) -> Section:
    counts = ("num_regions", "num_slots", "num_graphs", "num_replays")
    sizes = ("input_bytes", "output_bytes", "gradient_bytes", "message_bytes")
    titles = ("regions", "slots", "graphs", "replays", "inputs", "outputs", "gradients", "messages")
    columns = [
        *numbers({"pp rank": "pp_rank"}),
        Column("chunk", lambda s: "all" if s.chunk is None else str(s.chunk), is_number=True),
        *numbers(dict(zip(titles, (*counts, *sizes), strict=True)), ","),
        Column("slots of microbatches", lambda s: " ".join(map(str, s.slots)) if full else format_slots(s.slots)),
    ]
    note = "replays per step; bytes of all slots; slots of microbatches 0, 1, …: (0 1).. repeats in turn"
    return table("Graphs", plan.graph_slots, columns, note)


def format_slots(slots: Sequence[int]) -> str:
    """Return ``(0 1 2)..`` for slots that repeat in turn; else the first slots."""
    first = next((n for n in range(1, len(slots)) if all(s == slots[i % n] for i, s in enumerate(slots))), len(slots))
    if first * 2 < len(slots) and first <= LONG_ORDER:
        return f"({' '.join(map(str, slots[:first]))}).."
    return " ".join(map(str, slots[:LONG_ORDER])) + (" …" if len(slots) > LONG_ORDER else "")


def _recompute(plan: Tables, full: bool) -> Section:
    """Return the recomputed ops by source line; equal blocks share a row."""

    def name(row: RecomputeRow) -> str:
        return row.where if row.where.startswith(row.block) else f"{row.block} {row.where}"

    columns = [
        *texts("kind", "ops"),
        *numbers({"freed": "bytes", "FLOPs": "flops", "bytes moved": "moved"}, ","),
    ]
    lines = ["per microbatch on one rank"]
    for stage in sorted({row.stage for row in plan.recompute}):
        mine = [row for row in plan.recompute if row.stage == stage]
        freed, flops, moved = (sum(getattr(row, key) for row in mine) for key in ("bytes", "flops", "moved"))
        done = f"{flops:,} FLOPs and {moved:,} bytes moved to recompute them"
        lines.append(f"stage {stage}: {freed:,} bytes freed, {done}")
    return folded("Recompute", plan.recompute, Named("where", name), columns, "\n".join(lines), full=full)


def _compiled(plan: Tables, full: bool) -> Section:
    """Return the compiled pieces, with their shared functions, and the ops that run eagerly, with the reason."""
    columns = [
        *texts("ops"),
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
    return folded("Compiled", plan.compiled, Named("where", attrgetter("where")), columns, note, full=full)


def _lengths(plan: Tables) -> Section:
    columns = [
        *numbers({key: key for key in ("length", "sequences", "microbatches")}),
        Column("fullest rank", lambda row: format_bytes(row.memory), is_number=True),
        Column("exchanged", lambda row: format_bytes(row.exchanged), is_number=True),
        Column("a step", lambda row: "-" if row.seconds is None else format_seconds(row.seconds), is_number=True),
    ]
    note = "parameters, stages and optimizer are the same at all lengths; the other tables are of the longest"
    return table("Lengths", plan.lengths, columns, note)


def _optimizer(plan: Tables) -> Section:
    name, buffers = plan.optimizer.name, plan.optimizer.buffers
    columns = [
        *numbers({"pp rank": "pp_rank"}),
        Column("parameters / gradients", lambda b: f"{b.dtype} / {b.gradient_dtype}"),
        *numbers({"elements": "num_elements"}, ","),
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
    """Return the rule of a buffer, with the number of matrices that it updates whole, and of their home ranks."""
    homes = [home for bucket in buffer.buckets for home in bucket.homes]
    over = f" on {len(set(homes))} home ranks of {buffer.matrix_axis}" if buffer.matrix_axis else ""
    return f"{buffer.rule}, {len(homes)} matrices{over}" if homes else buffer.rule


def _memory(plan: Tables) -> Section:
    def size(part: str) -> Column:
        is_shown = part in (*LASTING, "activations", "total") or any(getattr(row, part) for row in plan.memory)
        return Column(words(part), lambda row: format_bytes(getattr(row, part)), is_number=True, is_shown=is_shown)

    def each(row: MemoryRow) -> str:
        return " + ".join(map(format_bytes, row.of_microbatch))

    columns = [
        *numbers({"pp rank": "pp_rank"}),
        *map(size, (*MEMORY_PARTS, "total")),
        Column("per microbatch", each, is_number=True, is_shown=any(row.of_microbatch for row in plan.memory)),
        Column("peak", lambda row: f"at {row.peak}" if row.peak else "", is_shown=any(row.peak for row in plan.memory)),
    ]
    return table("Memory of one rank", plan.memory, columns)


def _cost(plan: Tables) -> Section:
    if plan.cost is None:
        return Section("Estimated time of one step")
    step = plan.cost.step_seconds
    seconds = {words(part): getattr(plan.cost, part) for part in PARTS if getattr(plan.cost, part)}
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


def words(part: str) -> str:
    return part.replace("_", " ")
