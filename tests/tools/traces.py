"""What must hold for a trace of a run, whoever recorded it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from planner.mesh import Mesh
from planner.pipeline.schedule import Order
from runtime.profiling.trace import MEASURED, PLANNED

ROUNDING = 2e-3  # microseconds: of two ends
ACTIONS = ("forward", "backward", "weight gradient")  # categories
Event = dict[str, Any]


def tracks(trace: dict[str, Any]) -> dict[tuple[int, int], list[Event]]:
    """The spans of each rank's two tracks."""
    found: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            found[event["pid"], event["tid"]].append(event)
    return found


def check_trace(trace: dict[str, Any], orders: Sequence[Order], mesh: Mesh, steps: Sequence[int]) -> None:
    """Both tracks of every rank have each action of the plan once a step, in its order, and their spans nest."""
    found = tracks(trace)
    assert sorted(found) == [(rank, track) for rank in range(mesh.world_size) for track in (MEASURED, PLANNED)]
    for (rank, track), events in found.items():
        wanted = [str(action) for action in orders[mesh.coordinate(rank)["pp"]]]
        check_nesting(events)
        for step in steps:
            actions = [e for e in events if e["args"].get("step") == step and e["cat"] in ACTIONS]
            assert [e["name"] for e in actions] == wanted, (rank, track, step)
            assert all(b["ts"] >= a["ts"] + a["dur"] - ROUNDING for a, b in pairwise(actions))
        assert {e["args"]["step"] for e in events if "step" in e["args"]} == {*steps}


def check_nesting(events: Sequence[Event]) -> None:
    """Each span lies in the one that is open when it begins, or after it."""
    open_ends: list[float] = []
    for event in events:
        start, end = event["ts"], event["ts"] + event["dur"]
        assert event["dur"] >= 0, event
        while open_ends and start >= open_ends[-1] - ROUNDING:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1] + ROUNDING, event
        open_ends.append(end)


def check_causes(trace: dict[str, Any], num_arrows: int) -> None:
    """Messages arrive after the action that sends them has begun, but for what clocks may be apart."""
    error = 1e6 * trace["otherData"]["clocks differ by at most (seconds)"]
    begun = {e["id"]: e for e in trace["traceEvents"] if e["ph"] == "s"}
    ended = {e["id"]: e for e in trace["traceEvents"] if e["ph"] == "f"}
    assert begun.keys() == ended.keys()
    assert len(begun) == num_arrows
    for number, sent in begun.items():
        source = next(
            e
            for e in tracks(trace)[sent["pid"], MEASURED]
            if e["cat"] in ("forward", "backward") and e["ts"] <= sent["ts"] <= e["ts"] + e["dur"]
        )
        assert ended[number]["ts"] >= source["ts"] - error
