"""The page of a search: every candidate is a point and a line that says why it loses, to scale."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from planner.api import find_layouts
from planner.report.page.scatter import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Point, scatter
from planner.report.shapes import Scale
from planner.search.page import search_page
from planner.search.search import Result
from planner.search.table import result_sections
from planner.spec.spec import Spec
from tests.planner.report.page.test_browser import CONTRAST, LAYOUT
from tests.tools.browser import ask, needs_browser
from tests.tools.html_page import Element, read_page

SPEC = {
    "mesh": "auto",
    "batch": {"global": 16, "micro": "auto"},
    "inputs": {"input_ids": {"shape": [64], "dtype": "int64", "high": 256}, "targets": {"like": "input_ids"}},
    "cluster": "dgx-h100",
    "devices": 8,
}


@pytest.fixture(scope="module")
def result() -> Result:
    from examples.gpt import build

    return find_layouts(build(), Spec.load(SPEC), top=3)


@pytest.fixture(scope="module")
def text(result: Result) -> str:
    return search_page(result)


@pytest.fixture(scope="module")
def page(text: str) -> Element:
    return read_page(text)


def test_every_candidate_is_a_point_and_a_line_with_its_reason(result: Result, page: Element):
    best = {candidate.point for candidate in result.best}
    others = [loser for loser in result.losers if loser.candidate.point not in best]
    lines = list(page.all("details", "candidate"))
    points = [a for a in page.all("a", "item")]
    assert len(points) == len(lines) == len(result.best) + len(others)
    assert [a.attributes["href"] for a in points] == [f"#{line.attributes['id']}" for line in lines]
    for line, loser in zip(lines[len(result.best) :], others, strict=True):
        assert str(loser.candidate.point) in line.text
        assert loser.why in line.first("summary").text
        assert loser.choice in line.text


def test_all_tables_of_the_terminal_are_below(result: Result, page: Element):
    tables = {part.first("h2").text: part for part in page.all("section", "table")}
    for section in result_sections(result):
        rows = [
            tuple(td.text for td in tr.all("td"))
            for body in tables[section.title].all("tbody")
            for tr in body.all("tr")
        ]
        assert rows == list(section.rows)


def test_others_that_were_estimated_are_dots_or_counted(result: Result, page: Element):
    assert len(result.estimated) == result.num_estimated
    named = len(list(page.all("a", "item")))
    cloud = next(page.all("path", "cloud")).attributes["d"].count("M")
    assert 0 < cloud <= result.num_estimated - named


def test_what_does_not_fit_lies_above_the_limit(result: Result):
    large = replace(result, memory_bytes=max(c.fullest.total for c in result.best) * 0.5)
    loser = replace(result.losers[0], fits=False, why="needs more")
    page = read_page(search_page(replace(large, best=result.best[:1], losers=(loser,))))
    limit = float(page.first("path", "limit").attributes["d"].split()[1].partition("H")[0])
    first = page.first("circle", "dot")
    assert float(first.attributes["cy"]) < limit
    assert "does not fit" in page.first("ul", "legend").text


def test_points_are_to_scale_inside_of_the_axes_and_labels_do_not_meet():
    points = [Point(1.0 + i / 50, 10.0 + i % 3, 0, str(i + 1), "", "") for i in range(12)]
    plot = scatter(points, [(1.1, 10.5), (99.0, 10.0)], (12.5, "limit"), str, str)
    assert plot.num_beyond == 1
    assert plot.cloud.count("M") == 1
    for placed in plot.points:
        assert LEFT <= placed.x <= WIDTH - RIGHT
        assert TOP <= placed.y <= HEIGHT - BOTTOM
    assert [p.x for p in plot.points] == sorted(p.x for p in plot.points)
    texts = [p.text for p in plot.points]
    assert all(abs(a[0] - b[0]) > 12 or abs(a[1] - b[1]) > 10 for i, a in enumerate(texts) for b in texts[i + 1 :])


@pytest.mark.parametrize("values", [[1.0, 2.0], [0.001, 50.0], [3.0], [0.0, 0.0]], ids=str)
def test_an_axis_holds_its_values_and_has_a_few_ticks(values: list[float]):
    axis = Scale.around(values, 0, 1)
    assert all(0 <= axis(value) <= 1 for value in values)
    assert 2 <= len(axis.ticks()) <= 20
    assert all(axis.holds(tick) for tick in axis.ticks())


@needs_browser
def test_the_page_can_be_read_and_a_point_tells_its_reason(text: str, page: Element, tmp_path: Path):
    assert ask(text, tmp_path, CONTRAST) == []
    assert ask(text, tmp_path, LAYOUT) == []
    script = """
      const points = document.querySelectorAll("a.item");
      points[1].dispatchEvent(new Event("focusin", { bubbles: true }));
      points[2].dispatchEvent(new MouseEvent("click", { bubbles: true, cancelable: true }));
      window.dispatchEvent(new Event("hashchange"));
      return [document.querySelector(".look").innerText, document.getElementById("candidate-3").open];
    """
    told, is_open = ask(text, tmp_path, script)
    why = list(page.all("details", "candidate"))[1].first("dd").text
    assert why in told
    assert is_open
