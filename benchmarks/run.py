"""Measure meshwright beside hand-written torch, in one sitting: `python benchmarks/run.py [--rounds N] [--only NAME…]`.

The runs take turns in every round, so that a busy machine slows all of them alike; figures are medians over the rounds.
CPU is the mean over ranks of the CPU time that a process spends in a step: steadier than wall time on a shared machine.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.runs import FOLDER, RUNS, SAVED  # noqa: E402 - the repository's root has to be on the path first

TIMEOUT_SECONDS = 300
Row = dict[str, float]

# ours, theirs, the figure of the ratio, and its target
RATIOS = (
    ("ours_tp2", "torch_tp2_by_hand", "cpu_ms", "at most", 0.97),
    ("ours_tp2_compiled", "torch_tp2_by_hand", "cpu_ms", "at most", 0.88),
    ("ours_tp2_compiled", "torch_tp2_by_hand_compiled", "cpu_ms", "at most", 1.0),
    ("ours_tp2", "torch_tp2_dtensor", "tokens_per_s", "at least", 1.6),
    ("ours_dp2_zero1", "torch_dp2_zero", "tokens_per_s", "at least", 1.03),
    ("ours_dp2_zero3", "torch_dp2_fsdp2", "tokens_per_s", "at least", 1.05),
    ("ours_dp2_zero3", "ours_dp2_zero1", "tokens_per_s", "at least", 0.9),
    ("ours_pp2", "torch_pp2_1f1b", "tokens_per_s", "at least", 1.2),
    ("ours_pp2_zero_bubble", "torch_pp2_1f1b", "tokens_per_s", "at least", 1.2),
    ("ours_pp4", "torch_pp4_1f1b", "tokens_per_s", "at least", 1.2),
    ("ours_pp4_zero_bubble", "torch_pp4_1f1b", "tokens_per_s", "at least", 1.2),
    ("ours_tp2", "torch_tp2_by_hand", "peak_rss_mib", "at most", 1.0),
    ("ours_tp2_saved", "torch_tp2_by_hand", "peak_rss_mib", "at most", 1.0),
    ("ours_dp2_zero1", "torch_dp2_zero", "peak_rss_mib", "at most", 1.0),
    ("ours_dp2_zero3", "torch_dp2_fsdp2", "peak_rss_mib", "at most", 1.0),
    ("ours_pp2", "torch_pp2_1f1b", "peak_rss_mib", "at most", 1.0),
    ("ours_pp4", "torch_pp4_1f1b", "peak_rss_mib", "at most", 1.0),
    ("ours_experts_ep2", "ours_experts_dp2", "tokens_per_s", "at least", 1.0),
    ("ours_experts_ep2", "torch_experts_dp2_zero", "tokens_per_s", "at least", 1.0),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", nargs="*", choices=RUNS, default=list(RUNS))
    parser.add_argument("--json", type=Path, help="also write every row of every round here")
    arguments = parser.parse_args()
    rounds: dict[str, list[Row]] = {name: [] for name in arguments.only}
    for number in range(arguments.rounds):
        for name in arguments.only:
            rounds[name].append(run(name, arguments.steps))
            print(f"round {number + 1}: {name} {rounds[name][-1]['tokens_per_s']:.0f} tokens/s", file=sys.stderr)
    medians = {name: median(rows) for name, rows in rounds.items()}
    print(sitting(arguments.rounds, arguments.steps))
    print(table(medians))
    print(ratios(medians))
    if arguments.json:
        arguments.json.write_text(json.dumps(rounds, indent=1))


def sitting(rounds: int, steps: int) -> str:
    """The conditions of the figures: versions, the machine, and how busy it was."""
    busy = ", ".join(f"{load:.1f}" for load in os.getloadavg())
    return (
        f"{rounds} rounds of {steps} steps; torch {version('torch')}, Python {platform.python_version()}, "
        f"{os.cpu_count()} cores ({platform.machine()}), load average at the end {busy}\n"
    )


def run(name: str, steps: int) -> Row:
    """One run's row: the slowest rank's time, mean CPU, worst RSS."""
    return merge(start("benchmarks.worker", name, steps))


def start(module: str, name: str, steps: int) -> list[dict]:
    """Start the processes of a run, each with ``module`` as its main program; the row that each of them wrote."""
    size, _ = RUNS[name]
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "row"
        worker = ["-m", module, name, "--steps", str(steps), "--output", str(output)]
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)] if size > 1 else []
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), FOLDER: directory}
        if name in SAVED:
            code = f"from benchmarks.runs import *; prepare(SAVED[{name!r}], BATCH, Path({directory!r}))"
            subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, timeout=TIMEOUT_SECONDS, check=True)
        command = [sys.executable, *launcher, *worker]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS
        )
        if done.returncode:
            raise SystemExit(f"{name} failed\n{done.stderr[-4000:]}")
        return [json.loads(Path(f"{output}.{rank}").read_text()) for rank in range(size)]


def merge(ranks: list[dict]) -> Row:
    losses = [row for row in ranks if row["first_loss"] is not None]
    return {
        "tokens_per_s": min(row["tokens_per_s"] for row in ranks),
        "step_ms": max(row["step_ms"] for row in ranks),
        "cpu_ms": statistics.mean(row["cpu_ms"] for row in ranks),
        "peak_rss_mib": max(row["peak_rss_mib"] for row in ranks),
        "first_loss": losses[-1]["first_loss"],
        "last_loss": losses[-1]["last_loss"],
    }


def median(rows: list[Row]) -> Row:
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


def table(medians: dict[str, Row]) -> str:
    lines = [
        "| run | tokens/s | ms a step | CPU ms a step and rank | peak RSS MiB | first loss | last loss |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in medians.items():
        lines.append(
            f"| {name} | {row['tokens_per_s']:.0f} | {row['step_ms']:.0f} | {row['cpu_ms']:.0f} "
            f"| {row['peak_rss_mib']:.0f} | {row['first_loss']:.6f} | {row['last_loss']:.6f} |"
        )
    return "\n".join(lines)


def ratios(medians: dict[str, Row]) -> str:
    lines = ["", "| ratio | of | measured | reach |", "|---|---|---|---|"]
    for ours, theirs, figure, sense, reach in RATIOS:
        if ours in medians and theirs in medians:
            measured = medians[ours][figure] / medians[theirs][figure]
            lines.append(f"| {ours} / {theirs} | {figure} | {measured:.3f} | {sense} {reach} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
