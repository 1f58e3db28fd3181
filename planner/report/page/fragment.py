"""A plan in a notebook: a part of a page without a script and ids, with styles that apply only to it."""

from __future__ import annotations

from planner.report.page.engine import render
from planner.report.page.machines import cluster_of
from planner.report.page.plan_page import facts_of
from planner.report.page.sizes import memory_bars
from planner.report.page.tables import tables_of
from planner.report.sections import sections
from planner.tables.tables import Tables

MOST_ROWS = 200  # of a table: a notebook is saved with all that it shows


def plan_fragment(plan: Tables) -> str:
    """HTML to stand in another page: sizes, warnings, memory, and each table to be opened."""
    cluster, _ = cluster_of(plan)
    return render(
        "fragment.html.j2",
        root=".meshwright-plan",
        title=f"plan {plan.hash()[:12]}",
        facts=facts_of(plan),
        warnings=[d for d in plan.diagnostics if d.level != "info"],
        memory=memory_bars(plan, cluster),
        tables=[table for table in tables_of(sections(plan, each_remark=True)) if table.section.rows],
        most_rows=MOST_ROWS,
    )
