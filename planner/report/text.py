"""What a Plan says to a person: the same sections as a terminal table, plain text or YAML.

Repeated blocks share one row whose name has ranges (``h.{0..11}.attn``) and whose count says how many rows it stands
for; nothing is left out. ``full`` gives each its own row. The text is the same on every machine.
"""

from __future__ import annotations

import io
from collections.abc import Iterable

import yaml
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from planner.report.section import PROSE
from planner.report.sections import Section, sections
from planner.tables.tables import Tables

WIDTH = 160


def to_text(plan: Tables, *, full: bool = False, width: int = WIDTH) -> str:
    """The tables as plain text of ``width`` columns, without colour codes or blanks at line ends."""
    return sections_text(sections(plan, full=full), width=width)


def sections_text(parts: Iterable[Section], *, width: int = WIDTH) -> str:
    """Sections as plain text of ``width`` columns, without colour codes or blanks at line ends."""
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, force_terminal=False, force_jupyter=False)
    _print(parts, console)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def print_plan(plan: Tables, console: Console | None = None, *, full: bool = False) -> None:
    """Print the tables on ``console`` (left out: stdout), with its width and colours."""
    _print(sections(plan, full=full), console or Console())


def _print(parts: Iterable[Section], console: Console) -> None:
    for section in parts:
        for part in _renderables(section):
            console.print(part)


def _renderables(section: Section) -> list[RenderableType]:
    # Text, not str: rich would take "[b, s]" in a cell for markup.
    parts: list[RenderableType] = [Text(section.title, style="bold")]
    if section.note:
        parts.append(Text(section.note))
    if section.rows:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for column in section.columns:
            justify = "right" if column in section.right else "left"
            table.add_column(column, justify=justify, overflow="fold", no_wrap=column not in PROSE)
        for row in section.rows:
            table.add_row(*map(Text, row))
        parts.append(table)
    return [*parts, Text("")]


def to_yaml(plan: Tables) -> str:
    """The plan's JSON as YAML, small lists on one line."""
    return yaml.safe_dump(plan.to_dict(), sort_keys=False, default_flow_style=None, width=120, allow_unicode=True)
