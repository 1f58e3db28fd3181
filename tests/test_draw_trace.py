"""A picture of a trace: which spans of which step it shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.draw_trace import draw, rows_of

TRACE = {
    "traceEvents": [
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "rank 0"}},
        *({"ph": "M", "name": "thread_name", "pid": 0, "tid": t, "args": {"name": n}} for t, n in ((1, "a"), (2, "b"))),
        *(
            {"ph": "X", "name": name, "cat": cat, "pid": 0, "tid": tid, "ts": ts, "dur": dur, "args": args}
            for name, cat, tid, ts, dur, args in (
                ("step 3", "step", 1, 0.0, 90.0, {"step": 3}),
                ("begin", "phase", 1, 0.0, 10.0, {"step": 3}),
                ("F0.0", "forward", 1, 10.0, 30.0, {"step": 3, "microbatch": 0, "chunk": 0, "stage": 0}),
                ("wait", "wait", 1, 12.0, 5.0, {}),
                ("update", "phase", 1, 40.0, 50.0, {"step": 3}),
                ("step 4", "step", 1, 100.0, 90.0, {"step": 4}),
                ("F0.0", "forward", 1, 110.0, 30.0, {"step": 4, "microbatch": 0, "chunk": 0, "stage": 0}),
                ("wait", "wait", 1, 112.0, 5.0, {}),
                ("F0.0", "forward", 2, 10.0, 30.0, {"step": 3, "microbatch": 0, "chunk": 0, "stage": 0}),
                ("F0.0", "forward", 2, 110.0, 30.0, {"step": 4, "microbatch": 0, "chunk": 0, "stage": 0}),
            )
        ),
    ]
}


def test_a_picture_shows_actions_waits_and_the_update_of_one_step():
    shown = {name: [(e["name"], e["ts"]) for e in events] for name, events in rows_of(TRACE, 3)}
    assert shown == {"rank 0 a": [("F0.0", 10.0), ("update", 40.0), ("wait", 12.0)], "rank 0 b": [("F0.0", 10.0)]}
    last = {name: [(e["name"], e["ts"]) for e in events] for name, events in rows_of(TRACE, None)}
    assert last["rank 0 a"] == [("F0.0", 110.0), ("wait", 112.0)]
    with pytest.raises(SystemExit, match=r"no step 7, but \[3, 4\]"):
        rows_of(TRACE, 7)


def test_a_picture_is_drawn(tmp_path: Path):
    pytest.importorskip("matplotlib")
    draw(TRACE, tmp_path / "trace.svg")
    assert "rank 0 b" in (tmp_path / "trace.svg").read_text()
