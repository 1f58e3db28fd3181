"""The templates, filled: whatever a model, a spec or a saved plan says is text and never markup."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from planner.report.page.palette import css


@lru_cache(maxsize=1)
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("planner.report.page", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def render(template: str, root: str = ":root", **values: Any) -> str:
    """A file of templates/, filled. ``values``: all that it names; ``root``: what has the colours."""
    return _environment().get_template(template).render(palette=css(root), **values)
