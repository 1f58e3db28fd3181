"""Measured beside predicted: seconds of a training step of a small GPT, on layouts of 4 and of 2 local processes.

    python -m benchmarks.local_layouts [--rounds 5] [--cluster cpu-local] [--only "tp4 m4,dp4 m4"] [--measured FILE]

Every process holds all engines of its number of ranks at once, and all layouts take turns, step by step, so that other
programs of the machine slow all alike. Measured is the fastest step of the rounds (and their median); predicted is
``cost.step_seconds`` of the plan, from the cluster file and the captured model alone. ``--measured`` keeps the measured
seconds in a file, and takes those of a file that is there.
"""

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from examples.gpt import GPT
from planner import plan
from planner.cluster.cluster import read_cluster
from planner.frozen_plan import Plan
from planner.spec.spec import Spec
from runtime.distributed.launch import launch
from runtime.engine.engine import Engine
from runtime.verify.batches import random_batch

VOCABULARY, LENGTH, WIDTH, LAYERS, HEADS, BATCH = 1024, 128, 256, 8, 8, 16
TIMEOUT_SECONDS = 1500.0


@dataclass(frozen=True, slots=True)
class Case:
    """One layout. ``more``: keys of its spec beside mesh and batch."""

    name: str
    mesh: dict[str, int]
    micro: int
    more: dict[str, Any]

    @property
    def num_ranks(self) -> int:
        axes = {axis: size for axis, size in self.mesh.items() if axis != "vpp"}
        return torch.Size(axes.values()).numel()

    def spec(self, cluster: str | None) -> dict[str, Any]:
        ids = {"shape": [LENGTH], "dtype": "int64", "high": VOCABULARY}
        return {
            "mesh": self.mesh,
            "batch": {"global": BATCH, "micro": self.micro},
            "inputs": {"input_ids": ids, "targets": {"like": "input_ids"}},
            "cluster": cluster,
            **self.more,
        }


def _case(text: str, **more: Any) -> Case:
    """``tp2·dp2 m4``: sizes of the axes, sequences of a microbatch."""
    axes, _, micro = text.partition(" m")
    mesh = {axis.rstrip("0123456789"): int(axis.lstrip("abcdefghijklmnopqrstuvwxyz")) for axis in axes.split("·")}
    return Case(" ".join([text, *more.pop("said", [])]), mesh, int(micro), more)


INTERLEAVED = {"pipeline": {"schedule": "interleaved_1f1b"}}
CASES = (
    _case("tp4 m4"),
    _case("tp4 m16"),
    _case("tp2·dp2 m2"),
    _case("tp2·dp2 m8"),
    _case("tp2·dp2 m2", said=["recompute"], recompute="full"),
    _case("tp2·dp2 m2", said=["sp"], tensor_parallel={"sequence_parallel": True}),
    _case("dp4 m1"),
    _case("dp4 m4"),
    _case("pp4 m1"),
    _case("pp4 m4"),
    _case("pp2·dp2 m1"),
    _case("pp2·dp2 m4"),
    _case("pp2·vpp2·dp2 m1", **INTERLEAVED),
    _case("tp2·pp2 m2"),
    _case("tp2·pp2 m8"),
    _case("tp2 m2"),
    _case("tp2 m16"),
    _case("dp2 m2"),
    _case("dp2 m8"),
    _case("dp2 m8", said=["recompute"], recompute="full"),
    _case("pp2 m1"),
    _case("pp2 m4"),
    _case("pp2·vpp2 m1", **INTERLEAVED),
)


def model() -> GPT:
    torch.manual_seed(0)
    return GPT(VOCABULARY, LENGTH, WIDTH, LAYERS, HEADS)


def planned(case: Case, cluster: str | None = None) -> Plan:
    return plan(model(), case.spec(cluster))


def measure(names: list[str], rounds: int) -> dict[str, list[float]]:
    """On one of the ranks: seconds of each step of each layout, of the slowest rank."""
    rank, cases = int(os.environ["RANK"]), [case for case in CASES if case.name in names]
    dist.init_process_group("gloo")
    engines = {case.name: Engine(planned(case)) for case in cases}
    batch = random_batch(Spec.load(cases[0].spec(None)), planned(cases[0]), 0)
    seconds: dict[str, list[float]] = {case.name: [] for case in cases}
    for number in range(rounds + 1):
        if rank == 0:
            print(f"  {len(names)} layouts, round {number} of {rounds}", file=sys.stderr, flush=True)
        for name, engine in engines.items():
            took = _step(engine, batch)
            if number:  # the first includes one-time work
                seconds[name].append(took)
    for engine in engines.values():
        engine.close()
    dist.destroy_process_group()
    return seconds


def _step(engine: Engine, batch: dict[str, torch.Tensor]) -> float:
    dist.barrier()
    began = time.perf_counter()
    assert engine.train_step(batch).loss > 0
    engine.optimizer.wait_parameters()
    took = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took)


@dataclass(frozen=True, slots=True)
class Row:
    case: Case
    fastest: float
    median: float
    predicted: float

    def __str__(self) -> str:
        ratio = self.predicted / self.fastest
        seconds = f"{self.fastest:>9.3f} {self.median:>9.3f} {self.predicted:>9.3f} {ratio:>6.2f}"
        return f"{self.case.name:<24} {self.case.num_ranks:>5} {seconds}"


def summary(rows: list[Row], title: str) -> str:
    """Rank correlation, and the excess cost of the layout that is predicted best over the measured best."""
    from scipy.stats import spearmanr

    if len(rows) < 3:
        return f"{title}: too few layouts"
    correlation = float(spearmanr([r.fastest for r in rows], [r.predicted for r in rows])[0])
    chosen, best = min(rows, key=lambda r: r.predicted), min(rows, key=lambda r: r.fastest)
    beyond = chosen.fastest / best.fastest - 1
    return (
        f"{title}: rank correlation {correlation:.2f} of {len(rows)} layouts; predicted best {chosen.case.name}, "
        f"{beyond:.1%} behind the best measured ({best.case.name})"
    )


def _measured(chosen: list[Case], rounds: int) -> tuple[list[float], dict[str, list[float]]]:
    """Load averages; of each layout the seconds of its steps."""
    loads, found = [os.getloadavg()[0]], dict[str, list[float]]()
    for size in sorted({case.num_ranks for case in chosen}, reverse=True):
        names = [case.name for case in chosen if case.num_ranks == size]
        found |= launch(measure, size, names, rounds, timeout_seconds=TIMEOUT_SECONDS)[0]
        loads.append(os.getloadavg()[0])
    return loads, found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cluster", default="cpu-local")
    parser.add_argument("--only", default="", help="names of layouts, by commas")
    parser.add_argument("--measured", type=Path, help="keep what was measured here, or take it from here")
    given = parser.parse_args()
    chosen = [case for case in CASES if not given.only or case.name in given.only.split(",")]
    cluster = read_cluster(given.cluster)
    if given.measured is not None and given.measured.exists():
        loads, found = json.loads(given.measured.read_text())
    else:
        loads, found = _measured(chosen, given.rounds)
    if given.measured is not None:
        given.measured.write_text(json.dumps([loads, found]))
    rows = []
    for case in chosen:
        cost, took = planned(case, given.cluster).cost, found[case.name]
        rows.append(Row(case, min(took), statistics.median(took), cost.step_seconds if cost else float("nan")))
    print(f"{cluster.name}; load average {', '.join(f'{load:.1f}' for load in loads)} before, between and after")
    print(f"{'layout':<24} {'ranks':>5} {'fastest':>9} {'median':>9} {'predicted':>9} {'ratio':>6}")
    for row in sorted(rows, key=lambda row: row.fastest):
        print(row)
    for size in (4, 2):
        print(summary([row for row in rows if row.case.num_ranks == size], f"{size} processes"))
    print(summary(rows, "all"))


if __name__ == "__main__":
    main()
