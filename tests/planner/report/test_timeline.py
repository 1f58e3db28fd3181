"""The chart of a schedule: all there, to scale, and readable in print, in the dark and at 64 microbatches."""

import re
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from itertools import pairwise
from xml.etree.ElementTree import Element

import pytest

from planner.pipeline.schedule import Schedule, build_schedule
from planner.pipeline.simulate import Simulation, simulate
from planner.report.schedule import schedule_svg

SVG = "{http://www.w3.org/2000/svg}"
SIZES = [("gpipe", 2, 4, 1), ("1f1b", 4, 4, 1), ("1f1b", 4, 64, 1), ("interleaved_1f1b", 4, 8, 2), (None, 4, 64, 2)]
SIZES += [("1f1b", 1, 1, 1), ("1f1b", 2, 200, 1), (None, 3, 6, 4)]


def chart(kind: str | None, pp: int, num_microbatches: int, vpp: int) -> tuple[Schedule, Simulation, Element]:
    schedule = build_schedule(kind, pp, num_microbatches, vpp)
    simulation = simulate(schedule)
    return schedule, simulation, ElementTree.fromstring(schedule_svg(schedule, simulation))


def actions(root: Element) -> list[tuple[str, str, list[str], Element]]:
    """Class, tooltip, texts and box of each bar."""
    groups = [g for g in root.iter(f"{SVG}g") if g.get("class", "").startswith("action ")]
    return [
        (
            g.get("class", "").split()[1],
            g.findtext(f"{SVG}title", ""),
            [t.text or "" for t in g.iter(f"{SVG}text")],
            box,
        )
        for g in groups
        if (box := g.find(f"{SVG}rect")) is not None
    ]


def number(box: Element, name: str) -> float:
    return float(box.attrib[name])


def unit_of(root: Element, schedule: Schedule) -> float:
    """Pixels of a forward: no bar of a forward is cut, as lines end on whole units."""
    return min(number(box, "width") for kind, _, _, box in actions(root) if kind == "F")


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_action_is_drawn_as_long_as_it_takes_and_tells_microbatch_and_chunk(sizes):
    schedule, simulation, root = chart(*sizes)
    unit, drawn = unit_of(root, schedule), defaultdict(float)
    for kind, name, texts, box in actions(root):
        microbatch, chunk = name[1:].split(".")
        assert kind == name[0]
        assert texts == ([microbatch, f"c{chunk}"] if schedule.vpp > 1 else [microbatch])
        drawn[name] += number(box, "width")
    expected = defaultdict(float)
    for order, spans in zip(schedule.orders, simulation.spans, strict=True):
        for action, (start, end) in zip(order, spans, strict=True):
            expected[str(action)] += (end - start) * unit
    assert drawn == pytest.approx(expected)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_bars_of_a_row_follow_in_time_and_what_they_leave_bare_is_the_bubble(sizes):
    schedule, simulation, root = chart(*sizes)
    rows = [p.attrib["d"] for p in root.iter(f"{SVG}path") if p.get("class") == "row"][1:]  # the first is the legend's
    boxes = defaultdict(list)
    for _, _, _, box in actions(root):
        boxes[number(box, "y")].append((number(box, "x"), number(box, "x") + number(box, "width")))
    places = [tuple(map(float, re.findall(r"[\d.]+", row)[:3])) for row in rows]
    assert {y for _, y, _ in places} >= set(boxes)
    for left, top, width in places:
        bars = boxes[top]
        assert bars == sorted(bars)
        assert all(end <= start + 1e-6 for (_, end), (start, _) in pairwise(bars))
        assert all(left <= start and end <= left + width + 1e-6 for start, end in bars)
    bare = 1 - sum(end - start for bars in boxes.values() for start, end in bars) / sum(width for *_, width in places)
    assert bare == pytest.approx(simulation.bubble_fraction)
    assert len(places) % schedule.pp == 0, "each line has all ranks"
    assert [t.text for t in root.iter(f"{SVG}text") if (t.text or "").startswith("rank ")] == [
        f"rank {r}" for r in range(schedule.pp)
    ] * (len(places) // schedule.pp)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_digits_fit_into_the_shortest_bar_and_the_chart_onto_a_screen(sizes):
    schedule, _, root = chart(*sizes)
    digits = max(len(text) for _, _, texts, _ in actions(root) for text in texts)
    assert unit_of(root, schedule) >= 7 * digits + 6  # a digit of 11 px is some 6.5 px wide
    assert float(root.attrib["width"]) <= 1600
    right = max(number(box, "x") + number(box, "width") for *_, box in actions(root))
    bottom = max(number(box, "y") + number(box, "height") for *_, box in actions(root))
    assert right <= float(root.attrib["width"])
    assert bottom <= float(root.attrib["height"])


def test_a_backward_is_hatched_and_a_forward_is_not_in_the_chart_and_in_its_legend():
    _, _, root = chart("interleaved_1f1b", 4, 8, 2)
    for group in root.iter(f"{SVG}g"):
        hatches = [p for p in group.iter(f"{SVG}path") if p.get("fill") == "url(#hatch)"]
        assert len(hatches) == ("B" in group.get("class", "").split())
    legend = [g for g in root.iter(f"{SVG}g") if "legend" in g.get("class", "")]
    assert [g.get("class") for g in legend] == ["F legend", "B legend"]
    words = " ".join(t.text or "" for t in root.iter(f"{SVG}text"))
    for text in ("forward of microbatch 3", "backward of microbatch 3", "bubble", "on chunk 1", "interleaved_1f1b"):
        assert text in words
    assert "2 chunks a rank, 8 microbatches" in root.findtext(f"{SVG}title", "")


def luminance(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_digits_stand_out_from_bars_and_forwards_from_backwards_without_their_hue():
    """WCAG 2.2: 4.5 for text, 3 for shapes."""
    _, _, root = chart(None, 4, 16, 4)
    style = root.findtext(f"{SVG}style", "")
    digits = {kind: color(style, rf"\.{kind} text") for kind in "FB"}
    fills = {kind: {box.attrib["fill"] for k, _, _, box in actions(root) if k == kind} for kind in "FB"}
    assert [len(fills[kind]) for kind in "FB"] == [4, 4], "each of four chunks has its tone"
    assert all(contrast(fill, digits[kind]) >= 4.5 for kind in "FB" for fill in fills[kind])
    assert all(contrast(light, dark) >= 3 for light in fills["F"] for dark in fills["B"])
    for theme in style.split("@media"):
        text, page, row = (color(theme, name) for name in ("text", r"\.page", r"\.row"))
        assert contrast(text, page) >= 7
        assert page != row
        for kind in "FB":
            edge = color(theme, rf"\.{kind} \.bar", "stroke")
            assert all(max(contrast(fill, row), contrast(edge, row)) >= 3 for fill in fills[kind])


def color(theme: str, name: str, what: str = "fill") -> str:
    return re.findall(rf"(?:^|\s){name} {{[^}}]*{what}: (#\w+)", theme)[0]


def test_the_file_needs_nothing_but_itself():
    text = schedule_svg(schedule := build_schedule("1f1b", 2, 4), simulate(schedule))
    assert "prefers-color-scheme: dark" in text
    assert re.findall(r"https?://\S+?(?=\")", text) == ["http://www.w3.org/2000/svg"]
    assert not re.search(r"href|@import|<script|<image|url\((?!#hatch)", text)
