"""The figures of a run in files: a log that a resumed run goes on in, TensorBoard, and a picture of the loss."""

import io
import json
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from passes.errors import PlanError
from runtime.report.log import Log, StepRow, _lines, draw_curve, rows_until
from runtime.report.progress import LiveLine, Progress, Unchanging, clock, format_row

ROWS = [StepRow(step, 6.0 - 0.1 * step, 1.0, 1e-3, 100.0, one_process_loss=6.0 - 0.1 * step) for step in range(1, 9)]


def log_of(path: Path, rows: list[StepRow], first: int = 0) -> list[StepRow]:
    log = Log(str(path), first)
    for row in rows:
        log.write(row, {})
    log.close()
    return rows_until(str(path), 100)


def test_a_log_has_an_object_a_step_with_every_key(tmp_path):
    assert log_of(tmp_path / "log.jsonl", ROWS) == ROWS
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert all(list(row) == [field.name for field in fields(StepRow)] for row in rows)


def test_a_resumed_run_keeps_the_steps_that_it_goes_on_from(tmp_path):
    path = tmp_path / "log.jsonl"
    log_of(path, ROWS)
    path.write_text(path.read_text() + '{"step": 9, "lo')  # a line that a kill cut short
    again = [replace(row, loss=0.5) for row in ROWS[5:]]
    assert log_of(path, again, first=5) == [*ROWS[:5], *again]
    assert log_of(path, ROWS[:2]) == ROWS[:2]  # and a new one begins anew


def test_a_run_that_ends_before_its_first_step_leaves_the_log_as_it_was(tmp_path):
    """A kill right after a resume lost the steps after the save."""
    path = tmp_path / "log.jsonl"
    log_of(path, ROWS)
    before = path.read_bytes()
    Log(str(path), 5).close()
    assert path.read_bytes() == before
    killed = Log(str(path), 5)  # never closed
    assert rows_until(str(path), 100) == ROWS
    killed.write(ROWS[5], {})
    assert rows_until(str(path), 100) == ROWS[:6]
    assert [entry.name for entry in tmp_path.iterdir()] == ["log.jsonl"]


def test_a_log_of_an_older_version_has_fewer_figures(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1, "loss": 2.0, "grad_norm": 1.0, "lr": 0.1, "tokens_per_s": 5.0, "gone": 1}\n')
    assert rows_until(str(path), 3) == [StepRow(1, 2.0, 1.0, 0.1, 5.0)]


def test_a_log_that_cannot_be_opened_is_one_error(tmp_path):
    with pytest.raises(PlanError, match="cannot write the log: No such file or directory"):
        Log(str(tmp_path / "none" / "log.jsonl"))


def test_tensorboard_has_every_figure_of_every_step(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from runtime.report.log import TensorBoard

    writer = TensorBoard(str(tmp_path))
    for row in ROWS:
        writer.write(row, {})
    writer.close()
    found = EventAccumulator(str(tmp_path)).Reload()
    assert set(found.Tags()["scalars"]) == {"loss", "grad_norm", "lr", "tokens_per_s", "skipped", "one_process_loss"}
    assert [(event.step, event.value) for event in found.Scalars("loss")] == [
        (row.step, pytest.approx(row.loss, rel=1e-6)) for row in ROWS
    ]


def test_a_curve_has_a_line_for_each_loss_that_there_is():
    both = _lines(ROWS)
    assert [(label, points[0], len(points)) for label, points, _ in both] == [
        ("training", (1, 5.9), 8),
        ("one process", (1, 5.9), 8),
    ]
    checked = [replace(row, one_process_loss=None, validation_loss=5.0 if row.step % 4 == 0 else None) for row in ROWS]
    assert [(label, [x for x, _ in points]) for label, points, _ in _lines(checked)][1] == ("validation", [4, 8])


@pytest.mark.parametrize(("suffix", "head"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_a_curve_is_a_picture_of_its_kind(tmp_path, suffix, head):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"loss.{suffix}"
    draw_curve(ROWS, str(path))
    assert path.read_bytes().startswith(head)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_curve_that_cannot_be_written_leaves_nothing(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "loss.png").mkdir()
    with pytest.raises(PlanError, match="cannot write the picture"):
        draw_curve(ROWS, str(tmp_path / "loss.png"))
    assert [file.name for file in tmp_path.iterdir()] == ["loss.png"]


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
    console = Console(file=(out := io.StringIO()), width=70, force_terminal=True, color_system=None)
    with Progress(10, quiet=True, console=console) as progress:
        progress.show(ROW)
    assert capsys.readouterr().out == out.getvalue() == ""
