"""One process of one measured run; started by run.py. Writes one JSON line: times, CPU, memory, losses.

python -m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.worker torch_tp2_by_hand --output FILE
"""

import argparse
import json
import os
import resource
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from benchmarks.model import BATCH, LENGTH
from benchmarks.runs import RUNS, Step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=RUNS)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--output", required=True)
    arguments = parser.parse_args()
    with own_step(arguments.name) as (rank, step):
        row = {"name": arguments.name, "rank": rank, **measure(step, arguments.steps, arguments.warmup)}
        with open(f"{arguments.output}.{rank}", "w") as file:
            json.dump(row, file)


@contextmanager
def own_step(name: str) -> Iterator[tuple[int, Step]]:
    """The rank of this process, and its step of the run ``name``; behind it all ranks end together."""
    torch.set_num_threads(1)
    size, make = RUNS[name]
    rank = int(os.environ.get("RANK", 0))
    if size > 1:
        dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    yield rank, make(rank, size)
    if size > 1:
        dist.barrier()  # gloo aborts when one rank leaves while another still talks
        dist.destroy_process_group()


def measure(step: Step, num_steps: int, num_warmup: int) -> dict[str, float | None]:
    """Medians over the steps after the warm-up: wall and CPU time a step (all threads of the process)."""
    wall, cpu, losses = [], [], []
    for i in range(num_steps):
        wall_start, cpu_start = time.perf_counter(), time.process_time()
        loss = step(i)
        wall.append(time.perf_counter() - wall_start)
        cpu.append(time.process_time() - cpu_start)
        losses.append(None if loss is None else float(loss))
    step_seconds = statistics.median(wall[num_warmup:])
    return {
        "tokens_per_s": BATCH * LENGTH / step_seconds,
        "step_ms": step_seconds * 1e3,
        "cpu_ms": statistics.median(cpu[num_warmup:]) * 1e3,
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }


if __name__ == "__main__":
    main()
