"""Logs of runs are read whole or refused by line; a line that a kill cut short is no error."""

import json
import re
import tracemalloc
from dataclasses import asdict
from pathlib import Path

import pytest
from typer.testing import CliRunner

from passes.errors import PlanError
from runtime.cli import app
from runtime.report.log import StepRow
from runtime.report.memory_rows import ActionMemory, Compared, MemoryReport
from runtime.report.runs.reading import Rows, names_of, read_runs


def rows(count: int = 3) -> list[StepRow]:
    return [StepRow(i, 5.0 / i, 1.0, 1e-3, 100.0 * i) for i in range(1, count + 1)]


def write(path: Path, values: list[StepRow] | list[dict], tail: str = "") -> Path:
    dicts = [asdict(row) if isinstance(row, StepRow) else row for row in values]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in dicts) + tail)
    return path


def test_a_log_is_what_was_logged(tmp_path):
    assert list(Rows(write(tmp_path / "run.jsonl", rows()))) == rows()


def test_a_last_line_cut_short_is_left_out_but_none_before_it(tmp_path):
    log = write(tmp_path / "run.jsonl", rows(), tail='{"step": 4, "lo')
    assert len(list(Rows(log))) == 3
    log.write_text(log.read_text() + "\n" + json.dumps(asdict(rows()[0])) + "\n")
    with pytest.raises(PlanError, match="is not JSON") as error:
        list(Rows(log))
    assert "line 4" in str(error.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda row: row.pop("loss"), "another version.*misses loss"),
        (lambda row: row.update(entropy="high"), "another version.*unknown entropy"),
        (lambda row: row.update(loss="low"), "damaged: loss: "),
    ],
)
def test_metrics_that_are_not_ours_are_one_error_by_line(tmp_path, change, words):
    values = [asdict(row) for row in rows()]
    change(values[1])
    with pytest.raises(PlanError, match=words) as error:
        list(Rows(write(tmp_path / "run.jsonl", values)))
    assert "line 2" in str(error.value)
    assert error.value.fix


def test_what_holds_no_step_is_refused(tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(PlanError, match="has no steps"):
        read_runs([tmp_path / "empty.jsonl"])
    (tmp_path / "run").mkdir()
    with pytest.raises(PlanError, match="has no step logs"):
        read_runs([tmp_path / "run"])
    with pytest.raises(PlanError, match="there is no log file"):
        read_runs([tmp_path / "nothing.jsonl"])


def test_a_directory_gives_every_log_in_it_and_names_tell_them_apart(tmp_path):
    for name in ("one/run", "two/run", "two/more"):
        write(tmp_path / f"{name}.jsonl", rows())
    found = read_runs([tmp_path / "one", tmp_path / "two"])
    assert [run.name for run in found] == ["one/run", "two/more", "two/run"]
    assert names_of([tmp_path / "a.jsonl", tmp_path / "b.jsonl"]) == ["a", "b"]
    assert len(set(names_of([tmp_path / "a.jsonl"] * 2))) == 2


def test_a_trace_belongs_to_the_log_that_it_lies_beside(tmp_path):
    write(tmp_path / "a.jsonl", rows())
    events = [{"ph": "X", "name": "F0.0"}]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    assert read_runs([tmp_path])[0].trace == tuple(events)
    write(tmp_path / "b.jsonl", rows())  # now nothing says whose it is
    assert [run.trace for run in read_runs([tmp_path])] == [(), ()]
    (tmp_path / "b.json").write_text(json.dumps({"traceEvents": events}))
    assert [run.trace for run in read_runs([tmp_path])] == [(), tuple(events)]


def test_what_lies_beside_a_log_is_read_or_is_one_error(tmp_path):
    write(tmp_path / "a.jsonl", rows())
    report = MemoryReport((Compared(0, "gradients", 8, 8, 0.01),), ("a note",), (ActionMemory(0, 0, "F0.0", 4, 4, 6),))
    beside = tmp_path / "memory.json"
    beside.write_text(json.dumps(report.to_dict()))
    assert read_runs([tmp_path])[0].memory == report
    older = {name: value for name, value in report.to_dict().items() if name != "actions"}
    for name, text, words in (
        ("memory.json", json.dumps(older), "not a memory report of this version: actions"),
        ("memory.json", "", "memory is damaged: it is not JSON"),
        ("trace.json", '{"traceEvents": [', "trace is damaged: it is not JSON"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(PlanError, match=words) as error:
            read_runs([tmp_path])
        assert name in str(error.value)
        beside.unlink(missing_ok=True)


@pytest.mark.parametrize("beside", ["run.jsonl", "run.json", "run.memory.json"])
def test_deep_json_is_one_error(tmp_path, beside):
    write(tmp_path / "run.jsonl", rows())
    (tmp_path / beside).write_text("[" * 100_000 + "]" * 100_000 + "\n")
    with pytest.raises(PlanError, match="is not JSON"):
        read_runs([tmp_path / "run.jsonl"])


def test_a_log_is_read_line_by_line(tmp_path):
    """Beside the steps themselves there is no copy of the text, however long its lines are."""
    log = tmp_path / "run.jsonl"
    line = json.dumps(asdict(rows()[0])) + " " * 100_000 + "\n"
    log.write_text(line * 200)
    tracemalloc.start()
    try:
        assert len(list(Rows(log))) == 200
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < log.stat().st_size / 10
    log.write_text(json.dumps("x" * (1 << 21)))
    with pytest.raises(PlanError, match="a line of the log is longer than 1024 KiB"):
        list(Rows(log))


def peak_of_a_report(log: Path, format: str) -> int:
    tracemalloc.start()
    try:
        assert CliRunner().invoke(app, ["report", str(log), "--format", format, "-o", f"{log}.out"]).exit_code == 0
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.thorough
@pytest.mark.parametrize("format", ["table", "json", "html"])
def test_memory_of_a_report_hardly_grows_with_the_steps(tmp_path, format):
    """At most 24 bytes a step, for medians; a step is some 200 bytes of text."""
    short, long = (write(tmp_path / str(n) / "run.jsonl", rows(n)) for n in (2_000, 10_000))
    peak_of_a_report(short, format)  # modules are imported, templates compiled
    grown = peak_of_a_report(long, format) - peak_of_a_report(short, format)
    assert grown < 8_000 * 32


def test_json_of_a_report_has_every_step_under_its_run(tmp_path):
    for name in ("a", "b"):
        write(tmp_path / f"{name}.jsonl", rows())
    told = json.loads(CliRunner().invoke(app, ["report", str(tmp_path), "--format", "json"]).output)
    assert [(run["name"], run["actions"], run["memory"]) for run in told] == [("a", [], None), ("b", [], None)]
    assert [StepRow(**step) for run in told for step in run["steps"]] == [*rows(), *rows()]


def test_figures_of_the_users_own_are_reported(tmp_path):
    values = [asdict(row) | {"loss/books": 4.0 / row.step, "own": float("nan")} for row in rows()]
    log = write(tmp_path / "run.jsonl", values)
    table = CliRunner().invoke(app, ["report", str(log)]).stdout
    assert "Figures of your own" in table
    assert re.search(r"run +loss/books +4 +1.333 +1.333 +4\n", table)
    assert re.search(r"run +own +nan +nan +nan +nan\n", table)
    assert "loss/books over steps: run" in CliRunner().invoke(app, ["report", str(log), "--format", "html"]).stdout
    steps = json.loads(CliRunner().invoke(app, ["report", str(log), "--format", "json"]).stdout)[0]["steps"]
    assert [step["loss/books"] for step in steps] == [4.0, 2.0, 4.0 / 3]
    assert steps[0].keys() == values[0].keys()
