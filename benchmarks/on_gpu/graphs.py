"""CUDA graphs beside eager steps: the same numbers with dropout on, and the time of a model that is bound by launches.

equal      loss and gradients of three steps, in parts of the largest element; GPT-2, Llama and BERT, float32
speed      12 layers, width 768, one sequence of 128 tokens, bfloat16: a step, and the gaps between its kernels
memory     static bytes as counted beside those of the plan
"""

from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.on_gpu.equal import exact_products, worst
from benchmarks.on_gpu.models import SMALL, batch, gpt2, planned, small
from benchmarks.on_gpu.profile import idle_percent, kernels_of, seconds_a_step
from benchmarks.on_gpu.table import Table
from planner import plan
from runtime import Engine

STEPS, WARM, TIMED = 3, 5, 20
EQUAL_LIMIT, STATIC_LIMIT, SPEEDUP = 1e-6, 0.02, 1.3
SCOPES: dict[str, list[str] | None] = {"eager": None, "layers": [], "attention": ["attn"], "step": ["full_iteration"]}


@dataclass(frozen=True)
class Speed:
    """``gaps`` in percent, None if no kernel was seen; bytes are static ones."""

    seconds: float
    gaps: float | None
    num_graphs: int
    num_bytes: int
    planned_bytes: int


def run(device: torch.device, *, tiny: bool = False) -> Table:
    exact_products()
    table = Table("graphs", ("run", "ms a step", "times eager", "gaps %", "graphs", "static MiB", "planned MiB"))
    for name in SMALL[:1] if tiny else SMALL:
        compare(table, name, device)
    found = {run: speed(scope, device, tiny=tiny) for run, scope in SCOPES.items()}
    for name, figures in found.items():
        ratio = found["eager"].seconds / figures.seconds
        sizes = figures.num_bytes / 2**20, figures.planned_bytes / 2**20
        table.add(name, figures.seconds * 1e3, ratio, figures.gaps, figures.num_graphs, *sizes)
        if figures.planned_bytes:
            table.expect(f"{name}, static bytes", abs(sizes[0] / sizes[1] - 1), STATIC_LIMIT)
    if device.type == "cuda":
        ratio = found["layers"].seconds / found["eager"].seconds
        table.expect("a step with whole layers as graphs, in eager ones", ratio, 1 / SPEEDUP)
    return table


def graphs(scope: list[str] | None, device: torch.device) -> dict[str, Any]:
    """The section of the spec."""
    impl = "local" if device.type == "cuda" else "emulate"
    return {} if scope is None else {"cuda_graphs": {"impl": impl, "scope": scope, "warmup_steps": 1}}


def compare(table: Table, name: str, device: torch.device) -> None:
    """Note figures of a model with dropout that are out of reach; adds no row."""
    eager, *graphed = (_steps(name, scope, device) for scope in SCOPES.values())
    for run, found in zip(list(SCOPES)[1:], graphed, strict=True):
        for step, ((loss, gradients), (truth, wanted)) in enumerate(zip(found, eager, strict=True)):
            at, largest = f"{name}, {run}, step {step}", worst(gradients, wanted)
            table.hold(f"{at}, loss", abs(loss - truth) / abs(truth), EQUAL_LIMIT)
            table.hold(f"{at}, gradient of {largest[1]}", largest[0], EQUAL_LIMIT)


def _steps(name: str, scope: list[str] | None, device: torch.device) -> list[tuple[float, dict[str, Any]]]:
    with Engine(planned(small(name, dropout=True), **graphs(scope, device)), device=device) as engine:
        found = []
        for step in range(STEPS):
            found.append((engine.forward_backward(batch(step)), engine.gather_gradients()))
            engine.optimizer_step()
        return found


def speed(scope: list[str] | None, device: torch.device, *, tiny: bool) -> Speed:
    model, length, vocabulary = gpt2(tiny=tiny)
    tokens = {"shape": [length], "dtype": "int64", "high": vocabulary}
    spec = {"mesh": {}, "batch": {"global": 1, "micro": 1}, "inputs": {"input_ids": tokens, "labels": tokens}}
    decided = plan(model, spec | {"precision": {"parameters": "bfloat16"}} | graphs(scope, device))
    given = batch(0, 1, length, vocabulary)
    with Engine(decided, device=device) as engine:
        seconds = seconds_a_step(engine, given, 2 if tiny else WARM, 1 if tiny else TIMED)
        gaps = idle_percent((start, end) for _, start, end in kernels_of(engine, given, device))
        counted = (0, 0) if engine.graphs is None else (engine.graphs.num_graphs, engine.graphs.static_bytes)
    return Speed(seconds, gaps, *counted, decided.memory[0].graph_buffers)
