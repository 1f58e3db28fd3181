"""The colours of a page, light and dark: each text stands out from each surface, each shape from the page.

The style sheet names no colour but these, so that a test of this table is a test of the page (WCAG 2.2: 4.5 for text,
3 for shapes). Filled shapes are pastel in both, with one dark text colour and an edge.
"""

from __future__ import annotations

from collections.abc import Mapping

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


def css() -> str:
    """Custom properties of a page, with those of a dark screen in a media query."""
    shared = {"on-fill": ON_FILL} | {f"f{i}": fill for i, fill in enumerate(FILLS)}
    dark = f"@media (prefers-color-scheme: dark) {{ :root {{ {_properties(DARK)} }} }}"
    return f":root {{ color-scheme: light dark; {_properties(LIGHT | shared)} }}\n{dark}"


def _properties(colours: Mapping[str, str]) -> str:
    return " ".join(f"--{name}: {value};" for name, value in colours.items())
