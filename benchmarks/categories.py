"""The time of a step by category, beside hand-written torch: `python -m benchmarks.categories [--only NAME…]`.

products      mm, addmm, bmm, linear          optimizer     the update; of ours with the norm
attention     scaled dot product              Python        time outside of ops: engine, autograd, hooks, modules
other ops     all other ops of torch          collectives   starting them, and waiting for other ranks
CPU elsewhere     of threads that do not run the step: gloo's sums and copies, c10d's

Milliseconds a step, the mean over ranks and then the median over rounds. A category's are by the clock, with the
profiler on, which costs each op about a microsecond; step and CPU are without it. DDP waits in C++, which counts as
Python's.
"""

import argparse
import statistics
import sys

from benchmarks.category_worker import CATEGORIES
from benchmarks.run import median, sitting, start
from benchmarks.runs import RUNS

COLUMNS = (*CATEGORIES, "step", "CPU", "CPU elsewhere")
# Ours and a user's hand-written version, side by side; the names are those of runs.py.
PAIRS = (
    ("torch_one_process", "ours_one_process"),
    ("torch_tp2_by_hand", "ours_tp2"),
    ("torch_dp2_zero", "ours_dp2_zero1"),
    ("torch_pp2_1f1b", "ours_pp2"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--only", nargs="*", choices=RUNS, default=[name for pair in PAIRS for name in pair])
    arguments = parser.parse_args()
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in arguments.only}
    for number in range(arguments.rounds):
        for name in arguments.only:
            rounds[name].append(_mean(start("benchmarks.category_worker", name, arguments.steps)))
            print(f"round {number + 1}: {name} {rounds[name][-1]['CPU']:.0f} ms of CPU", file=sys.stderr)
    print(sitting(arguments.rounds, arguments.steps))
    print(table({name: median(rows) for name, rows in rounds.items()}))


def _mean(ranks: list[dict[str, float]]) -> dict[str, float]:
    return {column: statistics.mean(row[column] for row in ranks) for column in COLUMNS}


def table(rows: dict[str, dict[str, float]]) -> str:
    lines = [f"| run | {' | '.join(COLUMNS)} |", "|---" * (1 + len(COLUMNS)) + "|"]
    for name, row in rows.items():
        lines.append(f"| {name} | {' | '.join(f'{row[column]:.1f}' for column in COLUMNS)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
