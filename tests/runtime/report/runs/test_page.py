"""What a page and a table of runs show: every figure of every run, spikes and gaps too, and text as text."""

import itertools
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from math import inf, nan, ulp
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from planner.pipeline.schedule import Action
from planner.report.shapes import round_ticks
from runtime.cli import app
from runtime.profiling.trace import MEASURED, PLANNED
from runtime.report.log import StepRow
from runtime.report.memory_rows import ActionMemory, Compared, MemoryReport, predicted_by_action
from runtime.report.runs.page import LETTER, WIDTH, Axes, chart, page
from runtime.report.runs.reading import RecordedRun, Series
from runtime.report.runs.table import (
    COLUMNS,
    FIGURES,
    PARTS,
    Line,
    action_times,
    category_bars,
    fullest,
    lines_of,
    sections_of,
    summary,
    tick_texts,
)
from tests.planner.report.page.test_browser import CONTRAST, LAYOUT
from tests.tools.browser import ask, needs_browser

ROWS = tuple(
    StepRow(i, 6.0 - i / 10, 1.0, 1e-3, 1000.0 + i, validation_loss=5.0 if i == 20 else None, memory_bytes=1 << 30)
    for i in range(1, 31)
)
OTHER = tuple(replace(row, loss=row.loss + 0.5, bubble=0.25, planned_bubble=0.2) for row in ROWS)


def event(track: int, stage: int, kind: str, milliseconds: float, **more: int) -> dict:
    args = {"stage": stage, "microbatch": 0, **more}
    return {"ph": "X", "pid": 0, "tid": track, "cat": kind, "dur": milliseconds * 1000, "args": args}


TRACKS = [
    {"ph": "M", "name": "thread_name", "pid": 0, "tid": track, "args": {"name": name}}
    for track, name in ((MEASURED, "measured"), (PLANNED, "planned"))
]


class Texts(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []

    def handle_data(self, data: str) -> None:
        self.found.append(data)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]


def read(html: str) -> Texts:
    texts = Texts()
    texts.feed(html)
    return texts


def test_every_figure_of_a_run_is_a_chart_and_no_other_is():
    html = page([RecordedRun("one", ROWS), RecordedRun("two", OTHER)])
    charts = re.findall(r"<figcaption>(.*?)(?: <small|</figcaption>)", html)
    present = {"loss", "validation_loss", "grad_norm", "lr", "tokens_per_s", "memory_bytes", "bubble"}
    assert charts == [figure.title for figure in FIGURES if figure.field in present]
    cells = {text.strip() for text in read(html).found}
    assert {*summary(RecordedRun("one", ROWS)), *summary(RecordedRun("two", OTHER)), *COLUMNS} <= cells


def test_the_page_needs_nothing_else_and_shows_text_as_text():
    html = page([RecordedRun("<script>alert(1)</script>", ROWS)])
    assert "<script>alert" not in html
    assert all(link.startswith("#") or link == "data:," for link in read(html).links)
    assert "default-src 'none'" in html
    assert not re.search(r"https?://(?!www\.w3\.org)", html)


def test_a_value_that_is_no_number_is_a_gap_and_is_told():
    rows = [replace(row, loss=nan if row.step == 10 else inf if row.step == 11 else row.loss) for row in ROWS]
    (line,) = lines_of(FIGURES[0], [RecordedRun("one", tuple(rows))])
    picture = ElementTree.fromstring(chart(FIGURES[0], [line]))
    (path,) = [p for p in picture.iter("path") if p.get("class") == "line"]
    assert path.get("d", "").count("M") == 2
    assert "nan" not in path.get("d", "")
    broken = page([RecordedRun("one", (*ROWS, replace(ROWS[-1], step=31, loss=nan)))])
    assert "at the end: one nan" in re.sub(r"<[^>]*>", "", broken)


@given(st.lists(st.floats(allow_nan=False, width=32), min_size=1, max_size=3000), st.integers(10, 200))
def test_thinning_keeps_both_ends_the_lowest_and_the_highest(values, most):
    points = list(enumerate(values))
    series = Series(most)
    for step, value in points:
        series.add(step, value)
    kept = series.points
    assert len(kept) == len(points) or len(kept) > most / 4
    assert len(kept) <= max(most + 4, 4)
    assert kept[0] == points[0]
    assert kept[-1] == points[-1]
    assert [step for step, _ in kept] == sorted({step for step, _ in kept})
    assert min(v for _, v in kept) == min(values)
    assert max(v for _, v in kept) == max(values)


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_are_round_few_and_inside(low, length):
    high = low + length
    ticks = round_ticks(low, high)
    assert 1 <= len(ticks) <= 11
    room = 1e-6 * length + 4 * ulp(abs(low) + length)
    assert all(low - room <= tick <= high + room for tick in ticks)


@given(st.floats(-1e9, 1e9), st.floats(1e-5, 1e9))
def test_the_text_of_a_tick_is_its_value_and_no_other_ticks(low, length):
    length = max(length, abs(low) * 1e-9)
    ticks = round_ticks(low, low + length)
    texts = tick_texts(ticks)
    assert len(set(texts)) == len(ticks)
    assert [float(text.replace(",", "")) for text in texts] == pytest.approx(ticks, rel=0, abs=length * 1e-3)


SIGNS = {"loss": (2.3, 1e-9), "lr": (1e-5, 1e-8), "tokens_per_s": (1234567.0, 3.0), "memory_bytes": (1 << 36, 1 << 20)}


@pytest.mark.parametrize(("field", "values"), SIGNS.items())
@pytest.mark.parametrize("step", [1, 7, 5000])
def test_texts_of_a_chart_can_be_read_on_a_telephone(field, values, step):
    """A picture no wider than the page of 390 pixels less its borders: its font of 12 pixels is not made smaller."""
    figure = next(figure for figure in FIGURES if figure.field == field)
    first, change = values
    rows = tuple(replace(ROWS[0], step=i * step, **{field: first + change * i}) for i in range(1, 201))
    picture = ElementTree.fromstring(chart(figure, lines_of(figure, [RecordedRun("one", rows)])))
    assert picture.get("viewBox", "").split()[2] == str(WIDTH)
    assert WIDTH * 0.95 <= 390 - 2 * 20
    drawn = [(text.get("class", ""), float(text.get("x", 0)), text.text or "") for text in picture.iter("text")]
    for kind, widths in (("end", (1.0, 0.0)), ("middle", (0.5, 0.5))):
        texts = [(x - widths[0] * LETTER * len(text), x + widths[1] * LETTER * len(text), text)
                 for classes, x, text in drawn if kind in classes]  # fmt: skip
        assert 2 <= len(texts) <= 7
        assert len({text for *_, text in texts}) == len(texts)
        assert all(left >= 0 and right <= WIDTH for left, right, _ in texts)
        if kind == "middle":
            assert all(a[1] < b[0] for a, b in itertools.pairwise(texts))


def test_points_lie_where_their_values_are():
    axes = Axes.around(FIGURES[0], [Line(0, "one", ((1, 0.0), (11, 4.0)))])
    assert axes.x(1) < axes.x(6) == (axes.x(1) + axes.x(11)) / 2
    assert axes.y(4.0) < axes.y(2.0) == pytest.approx((axes.y(0.0) + axes.y(4.0)) / 2)


def test_times_of_actions_stand_beside_those_planned():
    events = (
        TRACKS + [event(MEASURED, 0, "forward", ms) for ms in (3.0, 4.0, 9.0)] + [event(PLANNED, 0, "forward", 2.0)]
    )
    events += [event(MEASURED, 1, "backward", 8.0), event(MEASURED, 1, "wait", 99.0, from_stage=0)]
    first, second = action_times(RecordedRun("one", ROWS, tuple(events)))
    assert (first.stage, first.kind, first.count, first.measured, first.planned, first.ratio) == (
        0, "forward", 3, 4.0, 2.0, 2.0,
    )  # fmt: skip
    assert (second.stage, second.kind, second.planned, second.ratio) == (1, "backward", None, None)
    assert "Time of actions" in page([RecordedRun("one", ROWS, tuple(events))])


def test_the_command_shows_each_format(tmp_path: Path):
    from dataclasses import asdict

    log = tmp_path / "run.jsonl"
    log.write_text("".join(json.dumps(asdict(row)) + "\n" for row in ROWS))
    table = CliRunner().invoke(app, ["report", str(log)])
    assert table.exit_code == 0
    assert "1 to 30" in table.output
    (told,) = json.loads(CliRunner().invoke(app, ["report", str(tmp_path), "--format", "json"]).output)
    assert (told["name"], len(told["steps"])) == ("run", 30)
    done = CliRunner().invoke(app, ["report", str(log), "--format", "html", "-o", str(tmp_path / "runs.html")])
    assert done.exit_code == 0
    assert (tmp_path / "runs.html").read_text() == page([RecordedRun("run", ROWS)]).rstrip("\n") + "\n"
    refused = CliRunner().invoke(app, ["report", str(tmp_path / "none.jsonl")])
    assert refused.exit_code == 2
    assert "Traceback" not in refused.output


def held(rank: int, pp_rank: int, size: int) -> tuple[list[Compared], list[ActionMemory]]:
    rows = [Compared(rank, part, size, size + rank, 0.01) for part in (*PARTS, "at the peak")]
    return rows, [
        ActionMemory(rank, pp_rank, name, size * n, size * n, size * 3) for n, name in ((1, "F0.0"), (2, "F1.0"))
    ]


def with_memory() -> RecordedRun:
    """Two pp ranks of two ranks each, of which the second holds more."""
    ranks = [held(rank, rank // 2, (1 + rank // 2) << 20) for rank in range(4)]
    rows = tuple(row for of_rank, _ in ranks for row in of_rank)
    return RecordedRun(
        "one", ROWS, memory=MemoryReport(rows, (), tuple(one for _, actions in ranks for one in actions))
    )


def test_memory_measured_stands_beside_that_planned_by_category_and_by_action():
    run = with_memory()
    bars = category_bars([run])
    assert bars is not None
    assert run.memory is not None
    assert fullest(run.memory) == {0: 1, 1: 3}
    words = [f"{word}, pp rank {pp}" for pp in (0, 1) for word in ("measured", "planned")]
    assert [bar.name.split(", ", 1)[1] for bar in bars.bars] == [", ".join(reversed(w.split(", "))) for w in words]
    lengths = [sum(segment.width for segment in bar.segments) for bar in bars.bars]
    assert lengths[2] == pytest.approx(2 * lengths[0], rel=0.01)
    runs, _, actions = sections_of([run])
    assert runs.title == "Runs (1)"
    assert actions.rows[2] == ("one", "1", "3", "F0.0", "2.00 MiB", "2.00 MiB", "6.00 MiB")


def test_what_a_rank_keeps_follows_from_its_order():
    order = [Action("F", 0, 0), Action("F", 0, 1), Action("F", 1, 0), Action("B", 0, 1), Action("B", 0, 0)]
    assert list(predicted_by_action((10, 3), order).values()) == [10, 13, 23, 23, 20]
    assert predicted_by_action((10, 3), [*order, Action("W", 0, 0)]) == {}


@needs_browser
def test_a_page_of_runs_can_be_read(tmp_path: Path):
    events = [*TRACKS, event(MEASURED, 0, "forward", 3.0), event(PLANNED, 0, "forward", 2.0)]
    html = page([replace(with_memory(), trace=tuple(events)), RecordedRun("two", OTHER)])
    looked = f"return [(() => {{ {CONTRAST} }})(), (() => {{ {LAYOUT} }})()].flat();"
    for dark in (False, True):
        assert ask(html, tmp_path, looked, dark=dark) == []
