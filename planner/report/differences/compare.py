"""All differences of two plans, table by table in reading order. None only if both are equal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from planner.report.differences import layout_tables, run_tables
from planner.report.differences.change import Change, change
from planner.report.differences.matching import REMARKS
from planner.report.fold import fold
from planner.tables.tables import Tables

Compare = Callable[[Tables, Tables], list[Change]]

# By the fields of a plan that each covers.
READERS: tuple[tuple[tuple[str, ...], Compare], ...] = (
    (("mesh", "spec"), run_tables.asked_changes),
    (("parameters",), layout_tables.parameter_changes),
    ((), run_tables.traffic_changes),
    (("collectives",), layout_tables.collective_changes),
    (("stages",), layout_tables.stage_changes),
    (("schedule",), layout_tables.schedule_changes),
    (("experts",), run_tables.expert_changes),
    (("graph_regions",), run_tables.region_changes),
    (("graph_slots",), run_tables.slot_changes),
    (("recompute",), run_tables.recompute_changes),
    (("compiled",), run_tables.compiled_changes),
    (("optimizer",), layout_tables.optimizer_changes),
    (("lengths",), run_tables.length_changes),
    (("memory",), run_tables.memory_changes),
    (("cost",), run_tables.cost_changes),
    (("summary",), run_tables.summary_changes),
    (("diagnostics",), run_tables.diagnostic_changes),
)


@dataclass(frozen=True, slots=True)
class Differences:
    """The differences of ``after`` from ``before``.

    ``models``: in words, how the models differ, if their parameters have other names. ``same_decisions``: both run
    the same, and only estimates or remarks differ.
    """

    changes: tuple[Change, ...]
    models: str
    same_decisions: bool

    @property
    def any(self) -> bool:
        return bool(self.changes)

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "different": self.any,
            "same_decisions": self.same_decisions,
            "models": self.models,
            "changes": [item.to_dict() for item in self.changes],
        }


def differences(before: Tables, after: Tables) -> Differences:
    """Every difference; remarks last."""
    found: list[Change] = []
    for covered, compare in READERS:
        mine = compare(before, after)
        if not mine:  # nothing that a reader looks at, and yet not equal
            mine = [_otherwise(name) for name in covered if getattr(before, name) != getattr(after, name)]
        found += mine
    found.sort(key=lambda item: item.table == REMARKS)
    return Differences(tuple(found), _models(before, after), before.hash() == after.hash())


def covered() -> set[str]:
    """The fields of a plan that some reader looks at."""
    return {name for names, _ in READERS for name in names}


def _otherwise(name: str) -> Change:
    return change(name.replace("_", " ").capitalize(), name, "values", "as before", "otherwise")


def _models(before: Tables, after: Tables) -> str:
    """Names that only one of them has, folded; "" if both have the same."""
    names = [{p.name for p in plan.parameters} for plan in (before, after)]
    words = []
    for mine, other, which in ((*names, "first"), (*names[::-1], "second")):
        alone = [p for p in (before if which == "first" else after).parameters if p.name in mine - other]
        if alone:
            folded = [item.name for item in fold(alone, lambda p: p.name, lambda _: None)]
            more = f", and {len(folded) - _SHOWN} more" if len(folded) > _SHOWN else ""
            words.append(f"{len(alone)} parameters only in the {which} ({', '.join(folded[:_SHOWN])}{more})")
    return f"different models: {'; '.join(words)}" if words else ""


_SHOWN = 4
