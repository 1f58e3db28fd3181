"""One process of a profiled run; started by categories.py. Writes one JSON line: milliseconds a step by category.

Of the thread that runs the step: each op's own time, without the ops that it calls, goes to the category of its name.
An op inside the optimizer's update is the update's, and time outside of all ops is Python's: the engine, autograd
Functions, the hooks. Times are by the clock, for torch's profiler has no other; CPU is of the same steps without it.
"""

import argparse
import contextlib
import json
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.runs import RUNS, Step
from benchmarks.worker import own_step

PRODUCTS, ATTENTION, OTHER, EXCHANGE, OPTIMIZER, PYTHON = (
    "products", "attention", "other ops", "collectives", "optimizer", "Python",
)  # fmt: skip
CATEGORIES = (PRODUCTS, ATTENTION, OTHER, EXCHANGE, OPTIMIZER, PYTHON)
PRODUCT_OPS = ("mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "mkldnn_linear", "addmv", "mv")
STEP, UPDATE, WAIT = "benchmark: step", "benchmark: update", "benchmark: wait"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=RUNS)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--output", required=True)
    arguments = parser.parse_args()
    with own_step(arguments.name) as (rank, step):
        for i in range(3):
            step(i)
        row = {**cpu_of(step, arguments.steps), **wall_by_category(step, arguments.steps)}
        with open(f"{arguments.output}.{rank}", "w") as file:
            json.dump(row, file)


def cpu_of(step: Step, num_steps: int) -> dict[str, float]:
    """Without the profiler: wall, CPU of the whole process, and of its thread that runs the step."""
    rows: list[tuple[float, ...]] = []
    for i in range(num_steps):
        before = _clocks()
        step(3 + i)
        rows.append(tuple(b - a for a, b in zip(before, _clocks(), strict=True)))
    wall, cpu, thread = (statistics.median(column) * 1e3 for column in zip(*rows, strict=True))
    return {"step": wall, "CPU": cpu, "CPU elsewhere": cpu - thread}


def _clocks() -> tuple[float, float, float]:
    return time.perf_counter(), time.process_time(), time.thread_time()


def wall_by_category(step: Step, num_steps: int) -> dict[str, float]:
    with _marked(), profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiled:
        for i in range(num_steps):
            with record_function(STEP):
                step(3 + i)
    totals: Counter[str] = Counter()
    for event in profiled.events() or ():
        inside = _names_around(event)
        if STEP in inside:
            totals[category(event.name, inside)] += event.self_cpu_time_total
    return {name: totals[name] / 1e3 / num_steps for name in CATEGORIES}


def category(name: str, inside: list[str]) -> str:
    """Of an event's own time. ``inside``: its name and those around it.

    >>> category("aten::addmm", ["aten::addmm", "aten::linear", STEP])
    'products'
    """
    if WAIT in inside or any(around.startswith(("c10d::", "gloo:")) for around in inside):
        return EXCHANGE
    if UPDATE in inside or any(around.startswith("Optimizer.step#") for around in inside):
        return OPTIMIZER
    op = name.removeprefix("aten::").strip("_")
    if op == name:
        return PYTHON
    if "scaled_dot_product" in op or "flash_attention" in op:
        return ATTENTION
    return PRODUCTS if op in PRODUCT_OPS else OTHER


def _names_around(event: Any) -> list[str]:
    names = []
    while event is not None:
        names.append(event.name)
        event = event.cpu_parent
    return names


@contextlib.contextmanager
def _marked() -> Iterator[None]:
    """Mark in the profiler the waits for other processes and the engine's updates; torch's optimizers mark theirs."""
    from runtime.optimizer.zero1 import DistributedOptimizer

    with contextlib.ExitStack() as stack:
        for owner, method, mark in ((dist.Work, "wait", WAIT), (DistributedOptimizer, "step", UPDATE)):
            stack.callback(setattr, owner, method, getattr(owner, method))
            setattr(owner, method, _recorded(getattr(owner, method), mark))
        yield


def _recorded(method: Any, mark: str) -> Any:
    def run(*arguments: Any, **named: Any) -> Any:
        with record_function(mark):
            return method(*arguments, **named)

    return run


if __name__ == "__main__":
    main()
