"""Colours stand out (WCAG 2.2: 4.5 for text, 3 for shapes), and the style sheets have no others."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

import planner.report.page
import runtime.report.runs
from planner.report.page.engine import DARK, FILLS, LIGHT, LINES, ON_FILL, SURFACES, TEXTS, css

TEMPLATES = [Path(package.__path__[0]) / "templates" for package in (planner.report.page, runtime.report.runs)]


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_every_text_stands_out_from_every_surface(theme: dict[str, str]):
    for text, surface in itertools.product(TEXTS, SURFACES):
        assert contrast(theme[text], theme[surface]) >= 4.5, (text, surface)


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_shapes_have_an_edge_that_stands_out_and_so_does_each_line_of_a_chart(theme: dict[str, str]):
    for shape, surface in itertools.product(("edge", *LINES), SURFACES):
        assert contrast(theme[shape], theme[surface]) >= 3, (shape, surface)


def test_what_is_written_on_a_fill_can_be_read_and_fills_differ():
    assert all(contrast(ON_FILL, fill) >= 4.5 for fill in FILLS)
    assert len(set(FILLS)) == len(FILLS)


def test_both_themes_have_the_same_names():
    assert LIGHT.keys() == DARK.keys()
    assert css().count("--ink:") == 2


@pytest.mark.parametrize("file", sorted(f for d in TEMPLATES for f in d.iterdir()), ids=lambda path: path.name)
def test_templates_name_no_colour_of_their_own(file: Path):
    text = file.read_text()
    assert not re.search(r"#[0-9a-fA-F]{6}\b|#[0-9a-fA-F]{3}\b(?![\w-])|rgba?\(|hsl\(", text)
    known = {*LIGHT, "on-fill", *(f"f{i}" for i in range(len(FILLS)))}
    assert set(re.findall(r"var\(--([\w-]+)\)", text)) <= known
