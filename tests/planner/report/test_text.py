"""What a plan says to a person: deterministic text, nothing left out, YAML."""

import io
import os
import re
from collections import Counter
from dataclasses import replace

import pytest
import yaml
from expecttest import assert_expected_inline
from rich.console import Console

from planner.frozen_plan import Plan
from planner.pipeline.kinds import KINDS
from planner.pipeline.schedule import build_schedule
from planner.report.sections import format_order, sections
from planner.report.text import print_sections, to_yaml
from planner.tables.sizes import format_bytes
from planner.tables.tables import Diagnostic
from tests.tools import paths

GOLDEN = paths.GOLDEN / "small_plan.txt"


def section(text: str, title: str) -> str:
    return next(part for part in text.split("\n\n") if part.startswith(title))


def test_describe_is_the_golden_text(small_plan: Plan):
    text = small_plan.describe()
    if os.environ.get("EXPECTTEST_ACCEPT"):
        GOLDEN.write_text(text, encoding="utf-8")
    assert text == GOLDEN.read_text(encoding="utf-8")


def test_describe_is_the_same_whatever_the_terminal(small_plan: Plan, monkeypatch: pytest.MonkeyPatch):
    before = small_plan.describe()
    for name, value in {"COLUMNS": "40", "FORCE_COLOR": "1", "TERM": "xterm-256color", "JUPYTER_COLUMNS": "30"}.items():
        monkeypatch.setenv(name, value)
    assert small_plan.describe() == before
    assert "\x1b" not in before
    assert max(map(len, before.splitlines())) <= 160


def test_full_describe_has_every_parameter_and_collective_by_name(small_plan: Plan):
    text = small_plan.describe(full=True)
    for parameter in small_plan.parameters:
        assert any(line.split()[0] == parameter.name for line in section(text, "Parameters").splitlines())
    assert len(section(text, "Collectives").splitlines()) == 2 + len(small_plan.collectives)
    assert "{" not in section(text, "Parameters")


def test_folded_counts_add_up_to_all_parameters(small_plan: Plan):
    rows = section(small_plan.describe(), "Parameters").splitlines()[2:]
    counts = [int(re.split(r"  +", row)[1]) for row in rows]
    assert sum(counts) == len(small_plan.parameters)


def test_long_names_stay_whole_and_square_brackets_are_not_markup(small_plan: Plan):
    name = "model.decoder.layers.0.self_attention.query_key_value_projection_of_many_heads.weight"
    reason = "cut by heads [b, s, h/tp], [bold]not markup[/bold], " + "because it is so " * 12
    row = replace(small_plan.parameters[1], name=name, reason=reason)
    text = replace(small_plan, parameters=(row,)).describe()
    assert name in text
    assert "[bold]not" in text
    words = [w for line in section(text, "Parameters").splitlines() for w in line.split()]
    assert words.count("because") == 12


def test_parameters_with_different_reasons_do_not_share_a_row(small_plan: Plan):
    odd = replace(small_plan.parameters[3], reason="spec override", origin="spec.yaml:9")
    text = replace(small_plan, parameters=(*small_plan.parameters[:3], odd, *small_plan.parameters[4:])).describe()
    assert "h.0.attn.out.weight" in text
    assert "spec override [spec.yaml:9]" in text


def test_diagnostics_of_repeated_blocks_fold(small_plan: Plan):
    many = tuple(Diagnostic("warning", "no rule", f"h.{i}.attn", "add one") for i in range(126))
    text = replace(small_plan, diagnostics=many).describe()
    assert "h.{0..125}.attn" in text
    assert "Warnings (126)" in text


def test_warnings_stand_first_and_remarks_of_one_kind_share_a_row(small_plan: Plan):
    remarks = [Diagnostic("info", f"linear [{n}, 8] is sharded (column): for {n} reasons", f"part{n}") for n in (2, 4)]
    warned = (
        *remarks,
        Diagnostic("info", "chosen of 8 layouts", "mesh"),
        Diagnostic("warning", "slow", "head", "tp: 1"),
    )
    plan = replace(small_plan, diagnostics=warned)
    titles = [part.split()[0] for part in plan.describe().split("\n\n") if part]
    assert titles[:3] == ["Plan", "Warnings", "Parameters"]
    _, _, _, *rows = section(plan.describe(), "Remarks (3)").splitlines()
    assert [re.split(r"  +", row) for row in rows] == [
        ["part2, and more", "2", "linear is sharded (column)"],
        ["mesh", "1", "chosen of 8 layouts"],
    ]
    assert "for 4 reasons" in plan.describe(full=True)


def wide_plan(plan: Plan) -> Plan:
    """Its table of memory has all columns, and numbers of many digits."""
    parts = {part: 3 << 33 for part in ("logits", "working", "communication", "graph_buffers", "slack")}
    more = {"of_microbatch": (1 << 30,) * 3, "peak": "F6.0, then B12.1"}
    rows = [replace(row, **parts, **more, total=row.total + sum(parts.values())) for row in plan.memory]
    return replace(plan, memory=tuple(rows))


def test_no_value_is_cut_in_a_file(small_plan: Plan):
    plan = wide_plan(small_plan)
    _, *rows = section(plan.describe(), "Memory of one rank").splitlines()[1:]
    assert len(rows[0]) > 160
    assert all(row.endswith("at F6.0, then B12.1") for row in rows)
    assert all(row.count("24.00 GiB") == 5 for row in rows)


@pytest.mark.parametrize("width", [40, 100])
def test_a_narrow_terminal_folds_values_and_cuts_none(small_plan: Plan, width: int):
    plan, out = wide_plan(small_plan), io.StringIO()
    print_sections(sections(plan), Console(file=out, width=width, color_system=None))
    printed = Counter(out.getvalue().replace(" ", "").replace("\n", ""))
    assert printed == Counter(plan.describe().replace(" ", "").replace("\n", ""))
    assert max(len(line) for line in out.getvalue().splitlines()) <= width


def test_long_orders_show_runs_by_their_ends():
    order = build_schedule("1f1b", 4, 16).orders[1]
    assert_expected_inline(format_order(order), """F0..F2 [B0 F3]..[B12 F15] B13..B15""")
    assert_expected_inline(format_order(build_schedule("gpipe", 2, 16).orders[0]), """F0..F15 B0..B15""")
    assert format_order(build_schedule("1f1b", 2, 4).orders[0]) == "F0 F1 B0 F2 B1 F3 B2 B3"


def read_order(text: str) -> list[tuple[str, int]]:
    """The actions that ``format_order`` printed for one chunk."""
    actions: list[tuple[str, int]] = []
    for run in re.findall(r"\[[^\]]*\](?:\.\.\[[^\]]*\])?|\S+", text):
        first, _, last = run.partition("..")
        heads = [(word[0], int(word[1:])) for word in first.strip("[]").split()]
        repeats = int(last.strip("[]").split()[0][1:]) - heads[0][1] + 1 if last else 1
        actions += [(kind, number + step) for step in range(repeats) for kind, number in heads]
    return actions


@pytest.mark.parametrize("kind", [k for k in KINDS if not KINDS[k].runs_chunks])
@pytest.mark.parametrize("num_microbatches", [4, 12, 13, 40])
def test_printed_orders_stand_for_every_action(kind: str, num_microbatches: int):
    for order in build_schedule(kind, 4, num_microbatches).orders:
        assert read_order(format_order(order)) == [(a.kind, a.microbatch) for a in order]


def test_a_terminal_gets_its_own_width(small_plan: Plan):
    out = io.StringIO()
    print_sections(sections(small_plan), Console(file=out, width=100, color_system=None))
    assert max(len(line) for line in out.getvalue().splitlines()) <= 100


def test_yaml_is_the_json(small_plan: Plan):
    assert yaml.safe_load(to_yaml(small_plan)) == small_plan.to_dict()


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (3 << 30, "3.00 GiB"), (5 << 40, "5.00 TiB")],
)
def test_bytes_read_well(num_bytes: int, text: str):
    assert format_bytes(num_bytes) == text
