"""The checks on one GPU, one command a part, each under 8 minutes on an H200; no network.

    python benchmarks/gpu.py equal      one GPU computes what the CPU does: loss, gradients, parameters
    python benchmarks/gpu.py sync       nothing makes the host wait in a step
    python benchmarks/gpu.py dropout    factor, share of zeros and masks in bfloat16 and float16
    python benchmarks/gpu.py shared     two ranks on one GPU train as one process does
    python benchmarks/gpu.py graphs     CUDA graphs: the numbers of eager steps, and how much faster short kernels are
    python benchmarks/gpu.py profile    a 1.1-billion Llama in bfloat16: speed, gaps, attention's kernels, memory
    python benchmarks/gpu.py plain      the same models in plain PyTorch beside ours, eager and compiled
    python benchmarks/gpu.py documents  packed documents: padded, one mask, one kernel, and the two of a sliding window
    python benchmarks/gpu.py updates    ms of an update by each rule
    python benchmarks/gpu.py sharded    gradients and weights in shards: numbers and memory
    python benchmarks/gpu.py calibrated a step predicted by `meshwright calibrate` on this GPU, beside the one measured
    python benchmarks/gpu.py all --write                    all of them, appended to RESULTS.md as each one ends

Exit code 0: all within reach; 1: something is not, or a part broke off; 2: there is no GPU.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from benchmarks.on_gpu.table import RESULTS, Table, section

PARTS = (
    "equal",
    "sync",
    "dropout",
    "shared",
    "graphs",
    "profile",
    "plain",
    "documents",
    "updates",
    "sharded",
    "calibrated",
)


def main(arguments: list[str] | None = None) -> int:
    given = parsed(arguments)
    device = torch.device(given.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("benchmarks/gpu.py: torch sees no CUDA device here; run it on a machine with a GPU", file=sys.stderr)
        return 2
    results = [run_part(part, device, given) for part in (PARTS if given.part == "all" else (given.part,))]
    return 0 if all(results) else 1


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What is to be seen on one GPU.")
    parser.add_argument("part", choices=(*PARTS, "all"))
    parser.add_argument("--write", action="store_true", help="append the table to benchmarks/RESULTS.md")
    parser.add_argument("--device", default="cuda:0", help=argparse.SUPPRESS)  # cpu: a look at the code
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--results", type=Path, default=RESULTS, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def run_part(part: str, device: torch.device, given: argparse.Namespace) -> bool:
    """Print the part's table, and write it if asked; whether all is within reach."""
    start = time.perf_counter()
    try:
        table: Table = importlib.import_module(f"benchmarks.on_gpu.{part}").run(device, tiny=given.tiny)
    except Exception:  # the other parts still run
        print(f"benchmarks/gpu.py: {part} broke off\n{traceback.format_exc()}", file=sys.stderr)
        return False
    text = section(table, device, time.perf_counter() - start)
    print(text, flush=True)
    if given.write:
        with given.results.open("a") as file:
            file.write(text)
    return not table.failed


if __name__ == "__main__":
    sys.exit(main())
