"""The HTML page of a plan: pictures first, then every table that the terminal prints.

The pictures are a chart of the schedule, cut if it is long, and bars of the memory of each pipeline rank, the seconds
of a step, and the bytes of each axis.
"""

from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise

from passes.errors import PlanError
from planner.cluster.cluster import Cluster, read_cluster
from planner.cluster.links import level_between, outermost
from planner.cost.layout import PARTS
from planner.cost.planned import usable_bytes
from planner.mesh import EXPERT_AXES
from planner.pipeline.simulate import simulate
from planner.report.of_ranks import MEMORY_PARTS, words
from planner.report.page.engine import render, tables_of
from planner.report.schedule import schedule_svg
from planner.report.section import names_text
from planner.report.sections import sections
from planner.report.shapes import Bars, bars_of
from planner.tables.sizes import format_bytes, format_seconds
from planner.tables.tables import Tables

Facts = tuple[tuple[str, str], ...]
_READS_WELL = 0.15  # minimum share of the limit for bars to be drawn with the limit
PHASES = ("forward", "backward", "recomputation", "step")
MOST_DRAWN = 1200  # maximum number of drawn actions: each is about 200 bytes and four elements


def plan_page(plan: Tables, *, full: bool = False, title: str = "") -> str:
    """Return one self-contained HTML page.

    ``full``: a row for every block, including repeated ones. ``title``: names of the model and the spec.
    """
    cluster, why_not = cluster_of(plan)
    return render(
        "plan.html.j2",
        title=f"{title or 'plan'} {plan.hash()[:12]}",
        facts=facts_of(plan),
        warnings=[d for d in plan.diagnostics if d.level != "info"],
        stages=plan.stages,
        timeline=timeline(plan),
        memory=memory_bars(plan, cluster, why_not),
        cost=cost_bars(plan),
        traffic=traffic_bars(plan, cluster),
        tables=tables_of(sections(plan, full=full, each_remark=True)),
        format_bytes=format_bytes,
        folded=names_text,
    )


def facts_of(plan: Tables) -> Facts:
    mesh, schedule, batch = plan.mesh, plan.schedule, plan.spec.get("batch", {})
    axes = [axis for axis in ("tp", "cp", "pp", "vpp", "dp", "ep", "etp", "edp") if getattr(mesh, axis) > 1]
    axes = [axis for axis in axes if mesh.has_expert_axes or axis not in ("etp", "edp")]
    facts = [
        ("mesh", " · ".join(f"{axis} {getattr(mesh, axis)}" for axis in axes) or "one rank"),
        ("devices", f"{mesh.world_size:,}"),
        ("parameters", f"{plan.summary.num_parameters:,}"),
        ("batch", f"{batch.get('global', '?')} sequences, {batch.get('micro', '?')} per microbatch"),
        *([("lengths", ", ".join(str(row.length) for row in plan.lengths))] if plan.lengths else []),
        ("schedule", f"{schedule.kind}, {schedule.num_microbatches} microbatches"),
        ("bubble", f"{schedule.bubble_fraction:.1%}"),
    ]
    if plan.memory:
        facts.append(("fullest rank", format_bytes(max(row.total for row in plan.memory))))
    if plan.cost is not None:
        facts.append(("a step", f"{format_seconds(plan.cost.step_seconds)}, estimated"))
    return tuple(facts)


def memory_bars(plan: Tables, cluster: Cluster | None, why_not: str = "") -> Bars | None:
    """Return a bar for each pp rank, and the memory of a device if the cluster is known."""
    rows = []
    for row in plan.memory:
        sizes = [(part, getattr(row, part)) for part in MEMORY_PARTS]
        named = [(words(part), size, f"{words(part)} {format_bytes(size)}") for part, size in sizes]
        peak = f", peak at {row.peak}" if row.peak else ""
        rows.append((f"pp rank {row.pp_rank}", named, format_bytes(row.total) + peak))
    limits, note = [], why_not
    if cluster is not None:
        usable, device = usable_bytes(cluster), cluster.device
        most = max((row.total for row in plan.memory), default=0)
        note = (
            f"A rank may use {format_bytes(usable)} of the {format_bytes(int(device.memory))} of {device.name}; "
            f"the fullest rank uses {most / usable:.1%} of that."
        )
        if most > usable * _READS_WELL:  # else the bars would be too short to be read
            limits = [(float(usable), f"usable: {format_bytes(usable)}")]
    return bars_of("Memory", rows, list(map(words, MEMORY_PARTS)), limits, note) if rows else None


def cost_bars(plan: Tables) -> Bars | None:
    if plan.cost is None:
        return None
    sizes = [(part, getattr(plan.cost, part)) for part in PARTS]
    named = [(words(part), seconds, f"{words(part)} {format_seconds(seconds)}") for part, seconds in sizes]
    said = format_seconds(plan.cost.step_seconds)
    if plan.cost.uncertain:
        said += ", between {} and {}".format(*map(format_seconds, plan.cost.range))
    row = ("a step", named, said)
    return bars_of("Seconds of a step", [row], list(map(words, PARTS)))


def traffic_bars(plan: Tables, cluster: Cluster | None) -> Bars | None:
    """Return a bar for each axis: bytes of a step on the pp rank that exchanges most over it."""
    rank_of = {stage.index: stage.pp_rank for stage in plan.stages}
    counted: dict[str, dict[int | None, Counter[str]]] = {}
    for c in plan.collectives:
        if c.kind == "recv":
            continue  # the sender's row already counts the message
        times = plan.schedule.num_microbatches if c.per == "microbatch" else 1
        rank = None if c.stage is None else rank_of.get(c.stage, c.stage)
        of_rank = counted.setdefault(c.axis, {}).setdefault(rank, Counter())
        of_rank["recomputation" if c.again else c.phase] += c.bytes * c.count * times
    rows = []
    for axis, ranks in counted.items():
        rank, most = max(ranks.items(), key=lambda item: sum(item[1].values()))
        link = link_of(axis, plan, cluster)
        named = [(phase, most[phase], f"{axis}, {phase}: {most[phase]:,} bytes") for phase in PHASES]
        on = f", pp rank {rank}" if rank is not None and plan.mesh.pp > 1 else ""
        name = f"{axis} · {link}" if link else axis
        rows.append((name, named, f"{format_bytes(sum(most.values()))}{on}"))
    note = "Per step, on one rank of the pp rank with the most bytes; sizes of full tensors, as in the table."
    return bars_of("Bytes by axis and link", rows, PHASES, note=note) if rows else None


def cluster_of(plan: Tables) -> tuple[Cluster | None, str]:
    name = plan.spec.get("cluster")
    if not name:
        return None, "the spec names no cluster"
    try:
        return read_cluster(str(name)), ""
    except PlanError as error:
        return None, f"the cluster {name} cannot be read: {error.what}"


def link_of(axis: str, plan: Tables, cluster: Cluster | None) -> str:
    """Return the name of the slowest link that an exchange over ``axis`` uses; "" if it is not known."""
    mesh = plan.mesh
    if cluster is None:
        return ""
    if axis in ("pp", "embedding"):
        firsts = [mesh.rank_of(pp=stage.pp_rank) for stage in plan.stages]
        pairs = pairwise(firsts) if axis == "pp" else [(firsts[0], firsts[-1])]
        level = max((level_between(a, b, cluster) for a, b in pairs), default=0)
    elif set(axis.split("-")) <= {*EXPERT_AXES, "world", "tp", "cp", "dp"}:
        level = outermost(mesh, axis, cluster) or 0
    else:
        return ""
    return cluster.links[level].name


@dataclass(frozen=True, slots=True)
class Timeline:
    """The chart of a schedule. ``svg``: complete and escaped; ``note``: says which part is not drawn."""

    svg: str
    note: str = ""


def timeline(plan: Tables) -> Timeline | None:
    """Return the chart; None for one pp rank, or for orders that contradict each other in an edited plan."""
    row, mesh = plan.schedule, plan.mesh
    if mesh.pp == 1:
        return None
    try:
        schedule = row.on(mesh)
        simulation = simulate(schedule)
    except PlanError:
        return None
    starts = sorted(start for spans in simulation.spans for start, _ in spans)
    if len(starts) <= MOST_DRAWN:
        return Timeline(schedule_svg(schedule, simulation))
    drawn, end = sum(start < starts[MOST_DRAWN] for start in starts), starts[MOST_DRAWN]
    note = f"The chart shows the first {drawn:,} of {len(starts):,} actions; the table below lists all."
    return Timeline(schedule_svg(schedule, replace(simulation, duration=end)), note)
