"""Print a plan: the same sections as a terminal table, plain text or YAML.

Repeated blocks share one row with ranges in its name (``h.{0..11}.attn``) and their number as its count; with ``full``,
each has its own row. The text is the same on every machine.
"""

import io
from collections.abc import Iterable

import yaml
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from planner.report.section import PROSE, Section
from planner.tables.tables import Tables

WIDTH = 160
_PROSE_WIDTH = 30  # minimum width of a column that may wrap
_GAP = 2  # blanks between columns


def sections_text(parts: Iterable[Section]) -> str:
    """Return sections as plain text, without colour codes and trailing blanks. Tables are as wide as their values."""
    out = io.StringIO()
    for section in parts:
        wide = max(WIDTH, _needed(section))
        console = Console(file=out, width=wide, color_system=None, force_terminal=False, force_jupyter=False)
        _print(section, console)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def print_sections(parts: Iterable[Section], console: Console | None = None) -> None:
    """Print sections to ``console`` (default: stdout); values that are too wide for it are wrapped, not truncated."""
    console = console or Console(highlight=False)
    for section in parts:
        _print(section, console)


def _print(section: Section, console: Console) -> None:
    for part in _renderables(section, has_room=_needed(section) <= console.width):
        console.print(part)


def _needed(section: Section) -> int:
    """Return the width of the table with every value in full, except prose, which wraps."""
    most = [max(map(cell_len, cells)) for cells in zip(section.columns, *section.rows, strict=True)]
    shown = zip(section.columns, most, strict=True)
    widths = [min(wide, _PROSE_WIDTH) if column in PROSE else wide for column, wide in shown]
    return sum(widths) + _GAP * max(0, len(widths) - 1)


def _renderables(section: Section, has_room: bool) -> list[RenderableType]:
    # Text, not str, because rich reads "[b, s]" in a cell as markup
    parts: list[RenderableType] = [Text(section.title, style="bold")]
    if section.note:
        parts.append(Text(section.note))
    if section.rows:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for column in section.columns:
            justify = "right" if column in section.right else "left"
            table.add_column(column, justify=justify, overflow="fold", no_wrap=has_room and column not in PROSE)
        for row in section.rows:
            table.add_row(*map(Text, row))
        parts.append(table)
    return [*parts, Text("")]


def to_yaml(plan: Tables) -> str:
    return yaml.safe_dump(plan.to_dict(), sort_keys=False, default_flow_style=None, width=120, allow_unicode=True)
