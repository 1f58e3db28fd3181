"""The page of a plan: pictures first, then every table that the terminal prints."""

from __future__ import annotations

from typing import Any

from planner.report.fold import fold
from planner.report.page.engine import render
from planner.report.page.machines import cluster_of
from planner.report.page.sizes import cost_bars, memory_bars, traffic_bars
from planner.report.page.tables import tables_of
from planner.report.page.timeline import timeline
from planner.report.sections import sections
from planner.tables.sizes import format_bytes, format_seconds
from planner.tables.tables import Tables

Facts = tuple[tuple[str, str], ...]


def plan_page(plan: Tables, *, full: bool = False, title: str = "") -> str:
    """One HTML page that needs no other file.

    ``full``: a row of the tables for every block, even if they repeat. ``title``: names of the model and the spec.
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
        folded=_folded,
    )


def _folded(names: tuple[str, ...]) -> str:
    """Blocks of a stage in few words."""
    return ", ".join(item.name for item in fold(names, str, lambda _: None))


def facts_of(plan: Tables) -> Facts:
    """The most important facts."""
    mesh, schedule, batch = plan.mesh, plan.schedule, plan.spec.get("batch", {})
    axes = [axis for axis in ("tp", "cp", "pp", "vpp", "dp", "ep", "etp", "edp") if _is_told(axis, mesh)]
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


def _is_told(axis: str, mesh: Any) -> bool:
    return getattr(mesh, axis) > 1 and (axis not in ("etp", "edp") or mesh.has_expert_axes)
