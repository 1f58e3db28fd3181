"""Memory of a Llama of 405B on 16,384 devices by sequence, cp and recompute, and how long it took to plan:
`python benchmarks/long_sequences.py`.

The mesh is tp 8 · cp · pp 16, and dp on the remaining ranks, with sequence parallelism, bfloat16 with float32
gradients, ZeRO-1 and 1f1b. Each plan is made in a process of its own, on meta weights.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

DEVICES, TP, PP, MICROBATCHES = 16_384, 8, 16, 32
LENGTHS, CP, KINDS = (8192, 131_072), (1, 8, 16), ("none", "selective", "full")
TIMEOUT_SECONDS = 900
GIB = 1 << 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", nargs=3, metavar=("LENGTH", "CP", "RECOMPUTE"), help="plan this and print JSON")
    parser.add_argument("--layers", type=int, default=126)
    arguments = parser.parse_args()
    if arguments.case:
        length, cp, kind = arguments.case
        print(json.dumps(planned(int(length), int(cp), kind, arguments.layers)))
        return
    head = ("sequence", "cp", "recompute", "fullest rank", "peak", "parameters + gradients + optimizer")
    head = (*head, "activations", "working", "exchanges", "plan, s (CPU)")
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for length in LENGTHS:
        for cp in CP:
            for kind in KINDS:
                print(line(length, cp, kind, run(length, cp, kind, arguments.layers)), flush=True)


def run(length: int, cp: int, kind: str, layers: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--case", str(length), str(cp), kind, "--layers", str(layers)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    if done.returncode:
        raise SystemExit(f"{length}, cp {cp}, {kind} failed\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def line(length: int, cp: int, kind: str, row: dict[str, Any]) -> str:
    state = " + ".join(f"{row[part] / GIB:.1f}" for part in ("parameters", "gradients", "optimizer"))
    return (
        f"| {length} | {cp} | {kind} | {row['total'] / GIB:.1f} GiB, pp {row['pp_rank']} | {row['peak']} | "
        f"{state} | {(row['activations'] + row['logits']) / GIB:.1f} | {row['working'] / GIB:.1f} | "
        f"{row['communication'] / GIB:.1f} | {row['seconds']:.1f} s ({row['cpu_seconds']:.1f}) |"
    )


def planned(length: int, cp: int, kind: str, layers: int) -> dict[str, Any]:
    """The fullest rank's row, and the seconds of planning alone."""
    import torch

    from benchmarks.planning import LLAMA, inputs, model_of
    from planner import plan
    from planner.capture.model.reference import load_model

    torch.set_num_threads(1)
    dp = DEVICES // (TP * cp * PP)
    spec = {
        "mesh": {"tp": TP, "cp": cp, "pp": PP, "dp": dp},
        "batch": {"global": MICROBATCHES * dp, "micro": 1},
        "inputs": inputs(length, LLAMA["vocab_size"]),
        "tensor_parallel": {"sequence_parallel": True},
        "precision": {"parameters": "bfloat16", "gradients": "float32"},
        "recompute": kind,
    }
    model = model_of({**LLAMA, "num_hidden_layers": layers, "max_position_embeddings": length}, load_model)
    start, cpu = time.perf_counter(), time.process_time()
    made = plan(model, spec)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
    fullest = max(made.to_dict()["memory"], key=lambda row: row["total"])
    return {**fullest, "seconds": seconds, "cpu_seconds": cpu_seconds}


if __name__ == "__main__":
    main()
