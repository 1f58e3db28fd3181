"""The time of a search over all axes, in all and by phase, and its memory: `python benchmarks/search.py`.

Each job runs in a process of its own, on meta weights, without a process group. The capture is listed separately: it is
made once, and a plan needs it too.
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

from benchmarks.planning import GPT2, LLAMA, inputs, model_of, peak_mib  # noqa: E402

TIMEOUT_SECONDS = 580
LLAMA_8B = {
    **LLAMA,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
}

# name -> config, devices, global batch, inputs, and the target: seconds with capture
JOBS: dict[str, tuple[dict, int, int, dict, float | None]] = {
    "gpt2, 12 layers, 64 devices": (GPT2, 64, 512, inputs(1024, 50257), 3),
    "gpt2, 24 layers, 64 devices": ({**GPT2, "n_layer": 24}, 64, 512, inputs(1024, 50257), None),
    "llama 8B, 64 devices": ({**LLAMA_8B, "max_position_embeddings": 8192}, 64, 512, inputs(8192, 128256), 8),
    "llama 405B shape, 16,384 devices": (
        {**LLAMA, "num_hidden_layers": 126}, 16384, 2048, inputs(4096, 128256), 30,
    ),
}  # fmt: skip
MOST_MIB = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", choices=list(JOBS), help="run this job here and print JSON")
    arguments = parser.parse_args()
    if arguments.job:
        print(json.dumps(measure(arguments.job)))
        return
    print(
        "| search | with capture | reach | capture | cuts | bounds | estimates | reasons | layouts | estimated | MiB |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for name in JOBS:
        print(report(name, run(name)), flush=True)


def run(name: str) -> dict[str, Any]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--job", name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    if done.returncode:
        raise SystemExit(f"{name} failed\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def report(name: str, row: dict[str, Any]) -> str:
    reach, spent = JOBS[name][-1], row["seconds"]
    parts = [f"{spent.get(part, 0.0):.2f} s" for part in ("capture", "cuts", "bounds", "estimates", "reasons")]
    cells = [name, f"{row['total']:.2f} s (CPU {row['cpu']:.2f})", f"{reach} s" if reach else "-", *parts]
    return f"| {' | '.join(cells)} | {row['considered']:,} | {row['estimated']:,} | {row['peak_mib']:.0f} |"


def measure(name: str) -> dict[str, Any]:
    import torch
    import transformers.models.auto.modeling_auto  # noqa: F401 - so that its import is not counted

    from planner.api import find_layouts
    from planner.capture.model.reference import load_model

    torch.set_num_threads(1)
    config, devices, size, given, _ = JOBS[name]
    model = model_of(config, load_model)
    spec = {
        "mesh": "auto", "batch": {"global": size}, "inputs": given, "precision": {"parameters": "bfloat16"},
        "cluster": "dgx-h100", "devices": devices,
    }  # fmt: skip
    start, cpu = time.perf_counter(), time.process_time()
    result = find_layouts(model, spec)
    return {
        "total": time.perf_counter() - start,
        "cpu": time.process_time() - cpu,
        "seconds": result.seconds,
        "considered": result.num_considered,
        "estimated": result.num_estimated,
        "winner": str(result.winner.point),
        "peak_mib": peak_mib(),
    }


if __name__ == "__main__":
    main()
