"""Renders the templates of a page; texts of a model, a spec or a saved plan are escaped.

The style sheet uses only the colours of these tables, light and dark, so that a test of the tables covers the page:
texts contrast with every surface, shapes with the page (WCAG 2.2: 4.5 for text, 3 for shapes). Filled shapes are pastel
in both, with one dark text colour and an edge.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from planner.report.section import PROSE, Section
from planner.report.shapes import box

LIGHT = {
    "page": "#ffffff", "card": "#f6f8fa", "band": "#e9edf1",
    "ink": "#1f2328", "muted": "#525b65", "link": "#0550ae", "warning": "#7a4a00", "error": "#a40e26",
    "edge": "#6a737d", "line": "#d0d7de",
    "l0": "#0550ae", "l1": "#b35900", "l2": "#116329", "l3": "#a40e26", "l4": "#6639ba", "l5": "#4d5560",
}  # fmt: skip
DARK = {
    "page": "#0d1117", "card": "#161b22", "band": "#21262d",
    "ink": "#e6edf3", "muted": "#a3adb8", "link": "#79c0ff", "warning": "#e3b341", "error": "#ff9a94",
    "edge": "#8b949e", "line": "#30363d",
    "l0": "#79c0ff", "l1": "#ffa657", "l2": "#7ee787", "l3": "#ff8e86", "l4": "#d2a8ff", "l5": "#b7bdc8",
}  # fmt: skip
SURFACES = ("page", "card", "band")
TEXTS = ("ink", "muted", "link", "warning", "error")
LINES = ("l0", "l1", "l2", "l3", "l4", "l5")  # of a chart
ON_FILL = "#10202f"
FILLS = (
    "#a8d1f7", "#f7c6a3", "#b5e3b0", "#e2b8ec", "#f5e08c", "#a5e3e0", "#f4b4bf", "#cfd3da", "#dcc7a1",
)  # fmt: skip
_SHARED = "planner.report.page"  # the frame of a page, its styles and its macros
FILTERED = 8  # a table of more rows has a search field


def css() -> str:
    """Return the colours of a page as CSS custom properties, with a media query for dark screens."""
    shared = {"on-fill": ON_FILL} | {f"f{i}": fill for i, fill in enumerate(FILLS)}
    dark = f"@media (prefers-color-scheme: dark) {{ :root {{ {_properties(DARK)} }} }}"
    return f":root {{ color-scheme: light dark; {_properties(LIGHT | shared)} }}\n{dark}"


def _properties(colours: Mapping[str, str]) -> str:
    return " ".join(f"--{name}: {value};" for name, value in colours.items())


@lru_cache
def _environment(package: str) -> Environment:
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(name, "templates") for name in dict.fromkeys((package, _SHARED))]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["box"] = box
    return environment


def render(template: str, package: str = _SHARED, **values: Any) -> str:
    """Render a file of templates/ with ``values``. ``package``: its templates/ are searched before ours."""
    return _environment(package).get_template(template).render(palette=css(), **values)


@dataclass(frozen=True, slots=True)
class Table:
    """A table of a page. ``id``: its anchor. ``sortable``: rows are independent of each other."""

    id: str
    section: Section
    sortable: bool
    filtered: bool
    right: tuple[bool, ...]
    wraps: tuple[bool, ...]


def tables_of(sections: Iterable[Section]) -> tuple[Table, ...]:
    """Return the tables of a page. A table with nameless rows, which continue the row above them, is not sortable."""
    tables: list[Table] = []
    for number, section in enumerate(sections):
        sortable = len(section.rows) > 1 and all(any(row[:1]) for row in section.rows)
        words = re.sub(r"[^a-z]+", "-", section.title.lower()).strip("-")
        right = tuple(column in section.right for column in section.columns)
        wraps = tuple(column in PROSE for column in section.columns)
        tables.append(Table(f"table-{number}-{words}", section, sortable, len(section.rows) > FILTERED, right, wraps))
    return tuple(tables)
