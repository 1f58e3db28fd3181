"""The templates, filled: whatever a model, a spec or a saved plan says is text and never markup."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from planner.report.page.palette import css
from planner.report.shapes import box

_SHARED = "planner.report.page"  # the frame of a page, its styles and its macros


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
    """A file of templates/, filled. ``values``: all that it names; ``package``: its templates/ come before those of
    this one.
    """
    return _environment(package).get_template(template).render(palette=css(), **values)
