"""Gradients and weights in shards (zero 2 and 3) on one GPU: two ranks over gloo, which train as one process does.

Then a Llama of 1.1 billion parameters in bfloat16: the bytes of a rank at its peak beside the plan's, for each zero.
"""

from typing import Any

import torch

from benchmarks.on_gpu.equal import Run, compare, exact_products, steps
from benchmarks.on_gpu.models import batch, llama, planned, small
from benchmarks.on_gpu.profile import cluster, gib
from benchmarks.on_gpu.shared import TIMEOUT_SECONDS
from benchmarks.on_gpu.table import Table
from planner import plan
from runtime import Engine
from runtime.distributed.launch import launch

CASES: dict[str, dict[str, Any]] = {
    "zero 2": {"zero": 2},
    "zero 3": {"zero": 3},
    "zero 3, gathered once a step": {"zero": 3, "reshard": False},
}
MEMORY_LIMIT = 0.03  # of the forecast


def run(device: torch.device, *, tiny: bool = False) -> Table:
    exact_products()
    columns = ("case", "loss", "gradients", "worst gradient", "parameters", "worst parameter")
    table = Table("sharded", columns)
    for name in ("gpt2",) if tiny else ("gpt2", "llama"):
        truth = steps(planned(small(name)), device)
        for case, asked in CASES.items():
            found = launch(rank_steps, 2, name, asked, str(device), timeout_seconds=TIMEOUT_SECONDS)[0]
            compare(table, f"{name}, dp 2, {case}", found, truth)
    for zero in (1, 2, 3):
        peak, forecast = launch(rank_memory, 2, zero, str(device), tiny, timeout_seconds=TIMEOUT_SECONDS)[0]
        table.add(f"1.1 billion, dp 2, zero {zero}: peak GiB", gib(peak), "plan", gib(forecast), "", "")
        if peak is not None:
            table.expect(f"peak of zero {zero} over its forecast", peak / forecast, 1 + MEMORY_LIMIT)
    return table


def rank_steps(name: str, asked: dict[str, Any], device: str) -> Run:
    """The steps of each rank; the tensors are rank 0's."""
    exact_products()
    optimizer = {"clip_grad_norm": 1.0, "lr": 1e-3, **asked}
    return steps(planned(small(name), {"dp": 2}, optimizer=optimizer), device)


def rank_memory(zero: int, device: str, tiny: bool) -> tuple[int | None, int]:
    """Bytes of a rank at the peak of its third step, and those of the plan."""
    model, sizes = llama(tiny=tiny, attention_dropout=0.0)
    length, vocabulary = sizes["max_position_embeddings"], sizes["vocab_size"]
    tokens = {"shape": [length], "dtype": "int64", "high": vocabulary}
    spec = {
        "mesh": {"dp": 2},
        "batch": {"global": 4, "micro": 1},
        "inputs": {"input_ids": tokens, "labels": tokens},
        "optimizer": {"lr": 1e-4, "zero": zero},
        "precision": {"parameters": "bfloat16"},
        "cluster": cluster(),
        "compile": False,
    }
    made = plan(model, spec)
    with Engine(made, device=device) as engine:
        engine.train_step(batch(0, 4, length, vocabulary))
        is_on_gpu = engine.groups.device.type == "cuda"
        if is_on_gpu:
            torch.cuda.reset_peak_memory_stats(engine.groups.device)
        engine.train_step(batch(1, 4, length, vocabulary))
        peak = torch.cuda.max_memory_allocated(engine.groups.device) if is_on_gpu else None
    return peak, made.memory[0].total
