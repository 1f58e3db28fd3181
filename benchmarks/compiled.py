"""Cost and gain of `compile: true`: GPT-2 with 12 layers in one process, beside torch.compile of the full model.

    python -m benchmarks.compiled [--steps 12] [--rounds 3] [--ways eager compiled whole]

The model is Hugging Face's GPT2LMHeadModel: 12 layers, 256 wide, 8 heads, 8192 tokens, sequences of 128, batch 8, no
dropout. Each way runs in a process of its own: cold, with an empty cache on disk, and warm, with the cold one's cache.
All compile with one thread. Seconds to compile are CPU seconds, those of C++ compilers included: the time of the first
three steps beyond that of three later ones, so that lazy compilation counts.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LAYERS, WIDTH, HEADS, VOCABULARY, LENGTH, BATCH = 12, 256, 8, 8192, 128, 8
WAYS = ("eager", "compiled", "torch", "whole")
TIMEOUT_SECONDS = 1200


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="*", default=WAYS, choices=WAYS)
    parser.add_argument("--worker", choices=WAYS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        print(json.dumps(measure(arguments.worker, arguments.steps)))
        return
    rows: dict[str, list[dict[str, float]]] = {}
    for number in range(arguments.rounds):
        for way in arguments.ways:
            with tempfile.TemporaryDirectory() as cache:
                for heat in ("cold", "warm") if way in ("compiled", "whole") else ("cold",):
                    rows.setdefault(f"{way} {heat}", []).append(run(way, arguments.steps, cache))
                    print(number, way, heat, rows[f"{way} {heat}"][-1], file=sys.stderr, flush=True)
    print(table(rows))


def run(way: str, steps: int, cache: str) -> dict[str, float]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TORCHINDUCTOR_CACHE_DIR": cache}
    environment |= {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.compiled", "--worker", way, "--steps", str(steps)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    if done.returncode:
        raise SystemExit(f"{way} failed\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def table(rows: dict[str, list[dict[str, float]]]) -> str:
    lines = [
        "| way | compile, CPU s | compile, s | CPU ms a step | ms a step | last loss |",
        "|---|---|---|---|---|---|",
    ]
    for name, found in rows.items():
        row = {key: statistics.median(one[key] for one in found) for key in found[0]}
        lines.append(
            f"| {name} | {row['compile_cpu_s']:.1f} | {row['compile_s']:.1f} | {row['cpu_ms']:.1f} "
            f"| {row['step_ms']:.1f} | {row['last_loss']:.6f} |"
        )
    return "\n".join(lines)


def measure(way: str, num_steps: int) -> dict[str, float]:
    """One process: the first step, which compiles, and the median of those after the third."""
    import torch

    torch.set_num_threads(1)
    step = make(way)
    wall, cpu, loss = [], [], 0.0
    for i in range(num_steps):
        wall_start, cpu_start = time.perf_counter(), cpu_seconds()
        loss = step(i)
        wall.append(time.perf_counter() - wall_start)
        cpu.append(cpu_seconds() - cpu_start)
    own, taken = statistics.median(cpu[3:]), statistics.median(wall[3:])
    return {
        "compile_cpu_s": max(0.0, sum(cpu[:3]) - 3 * own),
        "compile_s": max(0.0, sum(wall[:3]) - 3 * taken),
        "cpu_ms": own * 1e3,
        "step_ms": taken * 1e3,
        "last_loss": loss,
    }


def cpu_seconds() -> float:
    """Of this process, and of those that it waited for."""
    times = os.times()
    return sum(times[:4])


def make(way: str) -> Callable[[int], float]:
    import torch

    model = build()
    if way in ("eager", "compiled"):
        from planner import plan
        from runtime import Engine

        engine = Engine(plan(model, spec(way == "compiled")))
        return lambda i: engine.train_step(batch(i)).loss
    compute: Any = torch.compile(model, dynamic=False) if way == "whole" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(i: int) -> float:
        loss = compute(**batch(i)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def build() -> Any:
    """The same weights in every process."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    off = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "use_cache": False}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    sizes = {"n_layer": LAYERS, "n_embd": WIDTH, "n_head": HEADS, "n_positions": LENGTH, "vocab_size": VOCABULARY}
    return GPT2LMHeadModel(GPT2Config(**sizes, **off, **ends))


def batch(i: int) -> dict[str, Any]:
    import torch

    generator = torch.Generator().manual_seed(1000 + i % 4)
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": ids}


def spec(compiled: bool) -> dict[str, Any]:
    return {
        "mesh": {},
        "batch": {"global": BATCH, "micro": BATCH},
        "inputs": {
            "input_ids": {"shape": [LENGTH], "dtype": "int64", "high": VOCABULARY},
            "labels": {"like": "input_ids"},
        },
        "optimizer": {"lr": 1e-3, "betas": [0.9, 0.999], "weight_decay": 0.01, "clip_grad_norm": None},
        "compile": compiled,
    }


if __name__ == "__main__":
    main()
