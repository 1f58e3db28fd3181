"""Update rules on one GPU: ms of an update of a Llama of 1.1 billion parameters in bfloat16, and bytes at the peak."""

from functools import partial
from typing import Any

import torch

from benchmarks.on_gpu.models import batch, llama
from benchmarks.on_gpu.plain import timed
from benchmarks.on_gpu.profile import MICRO, MICROBATCHES, TIMED, cluster, gib, release
from benchmarks.on_gpu.table import Table
from planner import plan
from runtime import Engine

RULES = ("adamw", "sgd", "lion", "adagrad", "muon")


def run(device: torch.device, *, tiny: bool = False) -> Table:
    table = Table("updates", ("rule", "ms an update", "ms a step", "optimizer GiB", "peak GiB", "by the plan"))
    for rule in RULES:
        table.add(rule, *figures(device, rule, tiny=tiny))
    return table


def figures(device: torch.device, rule: str, *, tiny: bool) -> tuple[Any, ...]:
    model, sizes = llama(tiny=tiny, attention_dropout=0.0)
    length, vocabulary = sizes["max_position_embeddings"], sizes["vocab_size"]
    tokens = {"shape": [length], "dtype": "int64", "high": vocabulary}
    spec = {
        "mesh": {},
        "batch": {"global": MICRO * MICROBATCHES, "micro": MICRO},
        "inputs": {"input_ids": tokens, "labels": tokens},
        "optimizer": {"name": rule, "lr": 1e-4},
        "precision": {"parameters": "bfloat16"},
        "cluster": cluster(),
        "compile": False,
    }
    made, given = plan(model, spec), batch(0, MICRO * MICROBATCHES, length, vocabulary)
    count = 1 if tiny else TIMED
    with Engine(made, device=device) as engine:
        timed(partial(engine.train_step, given), count, device)
        step = timed(partial(engine.train_step, given), count, device)
        backward = timed(partial(engine.forward_backward, given), count, device)
        held = engine.optimizer.measured_bytes()["optimizer"]
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    del engine, model
    release(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    return (step - backward) * 1e3, step * 1e3, gib(held), gib(peak), gib(made.memory[0].total)
