"""The page of a plan: all of the plan is on it, it needs nothing else, and what a model says is text."""

import itertools
import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from passes.errors import PlanError
from planner.frozen_plan import Plan
from planner.mesh import Mesh
from planner.pipeline.schedule import Schedule
from planner.pipeline.simulate import simulate
from planner.report.page.plan_page import plan_page
from planner.report.sections import sections
from planner.tables.tables import Diagnostic
from tests.tools.html_page import Element, read_page
from tests.tools.paths import ROOT

EVIL = "</script><script>alert(1)</script>\"'&{{ 7 * 7 }}"


def names_of(text: str) -> list[str]:
    """A folded name as the names for which it stands: ``h.{0..2,5}.w`` is four."""
    parts = re.split(r"\{([\d.,]+)\}", text)
    choices = [[part] if i % 2 == 0 else numbers_of(part) for i, part in enumerate(parts)]
    return ["".join(words) for words in itertools.product(*choices)]


def numbers_of(text: str) -> list[str]:
    runs = [run.partition("..") for run in text.split(",")]
    return [str(n) for first, _, last in runs for n in range(int(first), int(last or first) + 1)]


def tables_of(page: Element) -> dict[str, list[list[str]]]:
    return {
        part.first("h2").text: [[td.text for td in tr.all("td")] for body in part.all("tbody") for tr in body.all("tr")]
        for part in page.all("section", "table")
    }


@pytest.mark.thorough
def test_every_table_of_the_terminal_is_on_the_page_cell_by_cell(moe_plan: Plan, moe_page: Element):
    tables = tables_of(moe_page)
    for section in sections(moe_plan, each_remark=True):
        assert [tuple(row) for row in tables[section.title]] == list(section.rows)
        assert section.note in moe_page.text


@pytest.mark.thorough
def test_messages_between_stages_stand_between_the_stages(moe_plan: Plan, moe_page: Element):
    stages = list(moe_page.first("ol", "stages").all("li"))
    assert [stage.first("b").text for stage in stages] == [f"stage {s.index}" for s in moe_plan.stages]
    assert [len(list(stage.all("div", "sends"))) for stage in stages] == [1, 0]
    assert moe_plan.stages[0].sends[0].name in stages[0].first("div", "sends").first("span").attributes["title"]


def test_every_diagnostic_is_on_the_page_and_warnings_are_on_top(small_plan: Plan):
    warned = replace(small_plan, diagnostics=(Diagnostic("warning", "too large", "cluster", "raise tp"),))
    page = read_page(plan_page(warned))
    assert tables_of(page)["Warnings (1)"] == [["warning", "cluster", "1", "too large", "raise tp"]]
    top = page.first("ul", "warnings").text
    assert "too large" in top
    assert "raise tp" in top


def test_the_title_names_model_and_spec_and_remarks_are_opened_on_demand(small_plan: Plan):
    noted = replace(small_plan, diagnostics=(Diagnostic("info", "all is well", "head"),))
    page = read_page(plan_page(noted, title="gpt.py:build · gpt.yaml"))
    assert page.first("title").text.startswith("gpt.py:build · gpt.yaml ")
    assert page.first("h1").text == page.first("title").text
    remarks = next(part for part in page.all("section", "table") if part.first("h2").text == "Remarks (1)")
    assert "all is well" in remarks.first("details").text


@pytest.mark.thorough
def test_ids_are_unique_and_every_reference_to_one_is_met(moe_page: Element):
    ids = [e.attributes["id"] for e in moe_page.all() if "id" in e.attributes]
    assert len(ids) == len(set(ids))
    references = ("href", "aria-controls", "aria-describedby")
    wanted = {e.attributes[n].lstrip("#") for e in moe_page.all() for n in references if n in e.attributes}
    assert wanted - {"data:,"} <= set(ids)


@pytest.mark.thorough
def test_the_page_names_nothing_outside_of_itself(moe_text: str, moe_page: Element):
    assert set(re.findall(r"https?://[^\s\"'<]+", moe_text)) <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"@import|url\((?!#)", moe_text)
    links = [e.attributes[n] for e in moe_page.all() for n in ("src", "href") if n in e.attributes]
    assert all(link.startswith("#") or link == "data:," for link in links)
    policy = next(m for m in moe_page.all("meta") if "http-equiv" in m.attributes).attributes["content"]
    assert policy.startswith("default-src 'none'")


def test_whatever_a_model_says_is_text(small_plan: Plan):
    parameters = [replace(p, reason=EVIL, where=f"{EVIL}   ({EVIL})") for p in small_plan.parameters]
    parameters[1] = replace(parameters[1], name=f"h.0.{EVIL}")
    evil = replace(
        small_plan,
        parameters=tuple(parameters),
        collectives=tuple(replace(c, where=EVIL, kind=EVIL) for c in small_plan.collectives),
        stages=tuple(replace(s, sends=tuple(replace(v, name=EVIL) for v in s.sends)) for s in small_plan.stages),
        schedule=replace(small_plan.schedule, kind=EVIL),
        diagnostics=(Diagnostic("warning", EVIL, EVIL, EVIL),),
        spec={**small_plan.spec, "cluster": EVIL},
    )
    num_scripts = len(_scripts(plan_page(small_plan)))
    for text, expected in ((plan_page(evil, full=True), num_scripts), (evil._repr_html_(), 0)):
        page = read_page(text)
        assert "alert(1)" not in "".join(script.text for script in _scripts(text))
        assert len(_scripts(text)) == expected
        assert EVIL in page.text
        assert "49" not in re.findall(r"alert\(1\)[^<]*", text)[0]


def _scripts(text: str) -> list[Element]:
    return list(read_page(text).all("script"))


def test_a_full_page_has_a_row_for_every_parameter(moe_plan: Plan):
    rows = tables_of(read_page(plan_page(moe_plan, full=True)))[f"Parameters ({len(moe_plan.parameters)})"]
    assert [row[0] for row in rows] == [p.name for p in moe_plan.parameters]


def test_a_cluster_that_is_not_here_is_told_and_the_rest_is_drawn(small_plan: Plan):
    text = plan_page(replace(small_plan, spec={**small_plan.spec, "cluster": "no/such.yaml"}))
    assert "the cluster no/such.yaml cannot be read" in text


def test_a_plan_of_one_rank_has_a_page(small_plan: Plan):
    one = replace(small_plan.stages[0], blocks=("h.0", "h.1"), sends=())
    parameters = tuple(replace(p, stages=(0,)) for p in small_plan.parameters)
    schedule = replace(small_plan.schedule, orders=small_plan.schedule.orders[:1], peak_in_flight=(1,))
    plan = replace(
        small_plan, mesh=Mesh(), stages=(one,), schedule=schedule, parameters=parameters, collectives=(), memory=()
    )
    page = read_page(plan_page(plan))
    assert not list(page.all(of_class="schedule"))
    assert "one rank" in page.first("dl", "facts").text


def test_a_notebook_shows_the_tables_of_a_plan_as_text(small_plan: Plan):
    page = read_page(small_plan._repr_html_())
    assert page.first("pre").text == small_plan.describe()


def test_orders_that_do_not_fit_are_not_drawn_and_no_error(small_plan: Plan):
    first, second = small_plan.schedule.orders
    swapped = (*second[:-2], second[-1], second[-2])
    turned = replace(small_plan, schedule=replace(small_plan.schedule, orders=(tuple(reversed(first)), swapped)))
    schedule = Schedule("1f1b", 2, 1, 4, 2, turned.schedule.orders)
    with pytest.raises(PlanError):
        simulate(schedule)
    assert 'id="schedule"' not in plan_page(turned)


def test_templates_are_in_the_wheel():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    folder = ROOT / "planner" / "report" / "page"
    held = {path for pattern in listed["planner.report.page"] for path in folder.glob(pattern)}
    assert held == {path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}


def test_a_loaded_plan_has_the_same_page(moe_plan: Plan, moe_text: str, tmp_path: Path):
    moe_plan.save(tmp_path / "plan.json")
    assert plan_page(Plan.load(tmp_path / "plan.json")) == moe_text


def test_all_that_acts_is_reached_by_the_keyboard_and_has_a_name(moe_page: Element):
    labelled = {id(e) for label in moe_page.all("label") for e in label.all()}
    assert all(id(element) in labelled for element in moe_page.all("input"))
    assert all(any(item.all("summary")) for item in moe_page.all("details"))
    for element in moe_page.all(of_class="scroll"):
        if list(element.all("table")):
            assert element.attributes["tabindex"] == "0"
            assert element.attributes["aria-label"]
    levels = [int(e.tag[1]) for e in moe_page.all() if e.tag in ("h1", "h2", "h3")]
    assert levels[0] == 1
    assert all(b - a <= 1 for a, b in itertools.pairwise(levels))
