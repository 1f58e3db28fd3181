"""The checks on one GPU: parts, each a process with a limit of its own, the most valuable first; no network.

    python benchmarks/gpu.py nccl       ranks that share the GPU over NCCL: axes, schedules, graphs, errors, saves
    python benchmarks/gpu.py half       bfloat16 beside float64 on the CPU: experts, attention, norms, graphs, compiled
    python benchmarks/gpu.py layers     ms of layers by kind of kernel at the shapes of tp 1 to 8; float8; copies
    python benchmarks/gpu.py profile    a 1.1-billion Llama in bfloat16: speed, gaps, attention's kernels, memory
    python benchmarks/gpu.py calibrated a step predicted by `meshwright calibrate` on this GPU, beside the one measured
    python benchmarks/gpu.py plain      the same models in plain PyTorch beside ours, eager and compiled
    python benchmarks/gpu.py equal      one GPU computes what the CPU does: loss, gradients, parameters
    python benchmarks/gpu.py sync       nothing makes the host wait in a step
    python benchmarks/gpu.py dropout    factor, share of zeros and masks in bfloat16 and float16
    python benchmarks/gpu.py shared     two ranks on one GPU over gloo train as one process does
    python benchmarks/gpu.py graphs     CUDA graphs: the numbers of eager steps, and how much faster short kernels are
    python benchmarks/gpu.py sharded    gradients and weights in shards: numbers and memory
    python benchmarks/gpu.py updates    ms of an update by each rule
    python benchmarks/gpu.py documents  packed documents: padded, one mask, one kernel, and the two of a sliding window
    python benchmarks/gpu.py all --seconds 560 --results tables

Several parts are run in the order above. ``--results``: a folder, which gets PART.md as each table ends, and PART.log.

Exit code 0: all parts ran and their numbers are right; a forecast that missed is noted in the table alone; 2: there is
no GPU; 3: time was up before some part; 10 and above: the first part, counted from nccl = 10, that broke off, ran out
of time or has wrong numbers. The last line names all such parts. benchmarks/on_gpu/README.md lists the calls to make.
"""

import argparse
import importlib
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from math import inf
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from benchmarks.on_gpu.table import section, tables_of

PARTS = {  # the limit of each in seconds, twice the time on an H200 where that is known
    "nccl": 300.0,
    "half": 240.0,
    "layers": 240.0,
    "profile": 150.0,
    "calibrated": 180.0,
    "plain": 300.0,
    "equal": 60.0,
    "sync": 60.0,
    "dropout": 30.0,
    "shared": 90.0,
    "graphs": 90.0,
    "sharded": 300.0,
    "updates": 200.0,
    "documents": 300.0,
}
NO_GPU, LATE, FIRST = 2, 3, 10  # exit codes
LEAST = 20.0  # seconds, without which no part begins
SHOWN = 2000  # characters of a log


def main(arguments: Sequence[str] | None = None) -> int:
    given = parsed(arguments)
    device = torch.device(given.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("benchmarks/gpu.py: torch sees no CUDA device here; run it on a machine with a GPU", file=sys.stderr)
        return NO_GPU
    parts = [part for part in PARTS if part in given.parts or "all" in given.parts]
    return run_part(parts[0], device, given) if len(parts) == 1 else run_parts(parts, given)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Checks on one GPU.")
    parser.add_argument("parts", nargs="+", choices=(*PARTS, "all"))
    parser.add_argument("--seconds", type=float, default=inf, help="for all parts together")
    parser.add_argument("--results", type=Path, help="a folder for the tables")
    parser.add_argument("--device", default="cuda:0", help=argparse.SUPPRESS)  # cpu: a look at the code
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def code_of(part: str) -> int:
    return FIRST + list(PARTS).index(part)


def run_part(part: str, device: torch.device, given: argparse.Namespace) -> int:
    """Print the tables of a part in this process, and write them if asked; its exit code."""
    start, is_right, mode = time.perf_counter(), True, "w"
    try:
        for table in tables_of(importlib.import_module(f"benchmarks.on_gpu.{part}").run(device, tiny=given.tiny)):
            text = section(table, device, time.perf_counter() - start)
            print(text, end="", flush=True)
            if given.results is not None:
                given.results.mkdir(parents=True, exist_ok=True)
                with (given.results / f"{part}.md").open(mode) as file:
                    file.write(text)
            is_right, mode = is_right and not table.failed, "a"
    except Exception:
        print(f"benchmarks/gpu.py: {part} broke off\n{traceback.format_exc()}", file=sys.stderr)
        return code_of(part)
    return 0 if is_right else code_of(part)


def run_parts(parts: Sequence[str], given: argparse.Namespace) -> int:
    """Each part in a process of its own."""
    end = time.monotonic() + given.seconds
    broken: dict[str, str] = {}
    late: list[str] = []
    for part in parts:
        left = end - time.monotonic()
        if left < LEAST:
            late.append(part)
        elif reason := run_process(part, min(left, PARTS[part]), given):
            broken[part] = reason
    if late:
        print(f"benchmarks/gpu.py: time was up before {', '.join(late)}", file=sys.stderr)
    if broken:
        reasons = "; ".join(f"{part}: {reason}" for part, reason in broken.items())
        print(f"benchmarks/gpu.py: broken: {reasons}", file=sys.stderr)
        return code_of(next(iter(broken)))
    return LATE if late else 0


def run_process(part: str, limit: float, given: argparse.Namespace) -> str:
    """Why the part broke off; empty if it did not."""
    command = [sys.executable, __file__, part, "--device", given.device, *(["--tiny"] if given.tiny else [])]
    with ExitStack() as stack:
        log: Any = None
        if given.results is not None:
            given.results.mkdir(parents=True, exist_ok=True)
            command += ["--results", str(given.results)]
            log = stack.enter_context((given.results / f"{part}.log").open("w+"))
        process = subprocess.Popen(command, stderr=log, start_new_session=True)
        try:
            code = process.wait(limit)
            reason = "" if code == 0 else "wrong numbers, or an error" if code > 0 else f"signal {-code}"
        except subprocess.TimeoutExpired:
            reason = f"no end within {limit:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # its ranks end with it
                process.wait()
        if reason and log is not None:
            log.seek(0)
            print(f"{part}: {reason}\n{log.read()[-SHOWN:]}", file=sys.stderr, flush=True)
    return reason


if __name__ == "__main__":
    sys.exit(main())
