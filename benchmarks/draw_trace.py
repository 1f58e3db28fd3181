"""Draw a step of a trace of `meshwright train --profile`: `python -m benchmarks.draw_trace trace.json -o trace.svg`.

Two rows for each rank: its actions, and the planned ones. For more, open the trace in ui.perfetto.dev.
"""

import argparse
import json
from pathlib import Path
from typing import Any

COLORS = {"forward": "#4c78a8", "backward": "#f58518", "wait": "#d9d9d9", "phase": "#54a24b"}
LABELS = {
    "forward": "forward",
    "backward": "backward",
    "wait": "waits for a message",
    "phase": "sum of gradients, update",
}
SHOWN_PHASES = ("sum of gradients", "update")
ROW_INCHES, HEIGHT, GAP = 0.36, 0.8, 0.5
CHARACTER = 0.012  # of the width of the picture

Event = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("-o", "--output", type=Path, default=Path("trace.svg"))
    parser.add_argument("--step", type=int, help="its number; the last one of the trace if not given")
    options = parser.parse_args()
    draw(json.loads(options.trace.read_text()), options.output, options.step)
    print(options.output)


def draw(trace: dict[str, Any], path: Path, step: int | None = None) -> None:
    from matplotlib import rcParams
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rcParams["svg.fonttype"] = "none"
    rows = rows_of(trace, step)
    names = [name for name, _ in rows]
    figure = Figure(figsize=(9.0, 1.1 + ROW_INCHES * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    begun = min(event["ts"] for _, events in rows for event in events)
    ended = max(event["ts"] + event["dur"] for _, events in rows for event in events)
    places = [index + GAP * (index // 2) for index in range(len(rows))]
    for place, (_, events) in zip(places, rows, strict=True):
        waits = [event for event in events if event["cat"] == "wait"]
        for event in events:
            _bar(axes, event, place, begun)
            _label(axes, event, waits, place, begun, ended - begun)
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.set_xlim(0, (ended - begun) / 1000)
    axes.set_xlabel("milliseconds")
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    handles = [Patch(color=color, label=LABELS[kind]) for kind, color in COLORS.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False)
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def rows_of(trace: dict[str, Any], step: int | None) -> list[tuple[str, list[Event]]]:
    """A name and the spans of each track, of one step."""
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    steps = [event["args"]["step"] for event in spans if event["cat"] == "step"]
    chosen = step if step is not None else max(steps)
    if chosen not in steps:
        raise SystemExit(f"the trace has no step {chosen}, but {sorted(set(steps))}")
    rows = []
    for (rank, track), name in sorted(tracks.items()):
        here = [event for event in spans if (event["pid"], event["tid"]) == (rank, track)]
        shown = [event for event in here if event["args"].get("step") == chosen and _is_shown(event)]
        first, last = shown[0]["ts"], max(event["ts"] + event["dur"] for event in shown)
        shown += [event for event in here if event["cat"] == "wait" and first <= event["ts"] <= last]
        rows.append((f"rank {rank} {name}", shown))
    return rows


def _is_shown(event: Event) -> bool:
    return event["cat"] in ("forward", "backward") or event["name"] in SHOWN_PHASES


def _bar(axes: Any, event: Event, place: float, begun: float) -> None:
    left, length = (event["ts"] - begun) / 1000, event["dur"] / 1000
    is_wait = event["cat"] == "wait"
    edge = {"edgecolor": "white", "linewidth": 0.0 if is_wait else 0.6}
    height = HEIGHT * (0.6 if is_wait else 1.0)
    axes.barh(place, length, left=left, height=height, color=COLORS[event["cat"]], zorder=3 if is_wait else 2, **edge)


def _label(axes: Any, event: Event, waits: list[Event], place: float, begun: float, width: float) -> None:
    """Draw the name of an action in its time without waits, if there is room for it."""
    end = event["ts"] + event["dur"]
    start = max([event["ts"], *(w["ts"] + w["dur"] for w in waits if event["ts"] <= w["ts"] < end)])
    text = event["name"].removesuffix(".0")
    if "chunk" in event["args"] and end - start > CHARACTER * len(text) * width:
        at = ((start + end) / 2 - begun) / 1000
        axes.text(at, place, text, ha="center", va="center", fontsize=7, color="white", zorder=4)


if __name__ == "__main__":
    main()
