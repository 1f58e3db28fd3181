"""The figures of a run in files: a log that a resumed run goes on in, TensorBoard, and a picture of the loss."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from passes.errors import PlanError
from runtime.report.log import Log, StepRow, _lines, draw_curve, rows_until

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
