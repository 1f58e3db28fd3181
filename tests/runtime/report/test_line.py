"""What a line says of a step, what it leaves out, and that it fits its terminal."""

from __future__ import annotations

import io
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from runtime.report.log import StepRow
from runtime.report.progress import LiveLine, Progress, Unchanging, clock, format_row

ROW = StepRow(
    3,
    5.5561,
    1.9324,
    2e-4,
    4321.4,
    loss_scale=32768.0,
    validation_loss=5.25,
    step_seconds=0.25,
    data_share=0.031,
    flops_per_s=1.234e12,
    peak_share=0.4321,
    memory_bytes=3 << 30,
    bubble=0.314,
    planned_bubble=0.27272,
    seconds_left=3723.0,
)


def test_all_that_is_known_is_said_with_its_unit():
    assert format_row(ROW) == (
        "loss 5.556100  grad norm 1.932  lr 2.00e-04  validation 5.250000  scale 32768  tokens/s 4321  "
        "1.23 TFLOP/s (43.2 %)  3.00 GiB  bubble 31 % (planned 27 %)  data 3 %  1:02:03 left"
    )


def test_what_is_absent_is_left_out():
    assert format_row(StepRow(3, 5.5561, 1.9324, 2e-4, 4321.4)) == (
        "loss 5.556100  grad norm 1.932  lr 2.00e-04  tokens/s 4321"
    )
    assert format_row(replace(ROW, data_share=0.001, seconds_left=0.0)).endswith("bubble 31 % (planned 27 %)")


@pytest.mark.parametrize("width", [10, 20, 40, 80, 120, 300])
def test_a_narrow_line_keeps_the_loss_and_leaves_out_what_matters_least(width):
    line = format_row(ROW, width)
    assert len(line) <= max(width, len("loss 5.556100"))
    assert line.startswith("loss 5.556100")
    assert ("data 3 %" in line, "bubble" in line) == (width >= 40, width >= 300)


def test_what_stands_still_is_said_once():
    told = Unchanging()
    first, again, more = told.without(ROW), told.without(ROW), told.without(replace(ROW, memory_bytes=4 << 30))
    assert first == ROW
    assert again == replace(ROW, memory_bytes=None, loss_scale=None, planned_bubble=None)
    assert more.memory_bytes == 4 << 30
    assert told.without(replace(ROW, loss_scale=16384.0)).loss_scale == 16384.0


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (3723, "1:02:03"), (183845, "2 d 03:04:05")]
)
def test_time_reads_as_a_clock(seconds, text):
    assert clock(seconds) == text


@pytest.mark.parametrize("width", [20, 40, 59, 60, 100, 250])
def test_the_live_line_is_one_line_of_its_terminal(width):
    line = LiveLine(100, 0)
    line.step, line.row = 3, ROW
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(line)
    (text,) = out.getvalue().splitlines()
    assert len(text) <= width
    assert text.startswith("step 3/100")
    assert "loss 5.55" in text or width < 30


def test_a_terminal_has_one_line_that_does_not_scroll():
    out = io.StringIO()
    console = Console(file=out, width=70, force_terminal=True, color_system=None)
    with Progress(4, console=console) as progress:
        for step in range(1, 5):
            progress.show(replace(ROW, step=step))
            progress._live.refresh()
    assert out.getvalue().count("\n") == 1  # at its end
    assert "step 4/4" in out.getvalue()


def test_elsewhere_each_step_is_a_line(capsys):
    with Progress(10) as progress:
        progress.show(ROW)
        progress.show(replace(ROW, step=4, seconds_left=None))
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"step  3  {format_row(ROW)}"
    assert "3.00 GiB" not in second
    assert "planned" not in second


def test_quiet_is_for_eyes_alone(capsys):
    written: list[StepRow] = []
    sink = SimpleNamespace(write=lambda row, own: written.append(row), close=lambda: None)
    with Progress(10, [sink], quiet=True) as progress:
        progress.show(ROW)
    assert capsys.readouterr().out == ""
    assert written == [ROW]


def test_ranks_that_do_not_lead_say_nothing(capsys):
    with Progress(10, enabled=False) as progress:
        progress.show(ROW)
    assert capsys.readouterr().out == ""
