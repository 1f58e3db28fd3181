"""A Llama of 1.1 billion parameters in bfloat16 on one GPU: speed, gaps between kernels, attention's kernels, memory.

MFU          (6 · parameters + 6 · layers · length · width) · tokens/s / the GPU's dense bfloat16 peak
             (a causal product of keys and queries is half of a full one; the head counts, the embedding does not)
gaps         1 − time in which some kernel runs / time from the first kernel's start to the last one's end
memory       torch.cuda.max_memory_allocated beside the plan's sum without slack, max_memory_reserved beside all of it
"""

import gc
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from benchmarks.on_gpu.models import batch, llama
from benchmarks.on_gpu.table import Table
from planner import Plan, plan
from runtime import Engine

CLUSTERS = Path(__file__).parents[2] / "specs/clusters"
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}  # dense bfloat16 FLOP/s
MEMORY_LIMIT = 0.03  # of the forecast
MICRO, MICROBATCHES, WARM, TIMED, PROFILED = 4, 2, 3, 10, 2


def run(device: torch.device, *, tiny: bool = False) -> Table:
    table = Table("profile", ("figure", "no dropout", "attention dropout 0.1", "recompute: full"))
    columns = [
        figures(device, p, recompute, tiny=tiny) for p, recompute in ((0.0, "none"), (0.1, "none"), (0.0, "full"))
    ]
    for name in columns[0]:
        table.add(name, *(column[name] for column in columns))
    for run, column in zip(table.columns[1:], columns, strict=True):
        if column["peak / plan"] is not None:
            table.expect(f"{run}, memory beside the plan's", abs(column["peak / plan"] - 1), MEMORY_LIMIT)
    return table


def figures(device: torch.device, attention_dropout: float, recompute: str, *, tiny: bool) -> dict[str, Any]:
    """Every figure of one run, by name; None for those that this device does not have."""
    model, sizes = llama(tiny=tiny, attention_dropout=attention_dropout)
    length, vocabulary = sizes["max_position_embeddings"], sizes["vocab_size"]
    decided = plan_of(model, length, vocabulary, recompute=recompute)
    parameters = sum(torch.Size(row.shape).numel() for row in decided.parameters)
    given = batch(0, MICRO * MICROBATCHES, length, vocabulary)
    with Engine(decided, device=device) as engine:
        timed = 1 if tiny else TIMED
        seconds = seconds_a_step(engine, given, 1 if tiny else WARM, timed)
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        reserved = torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None
        kernels = kernels_of(engine, given, device)
    del engine, model
    release(device)
    tokens_per_s = MICRO * MICROBATCHES * length / seconds
    flops = tokens_per_s * flops_a_token(parameters - vocabulary * sizes["hidden_size"], sizes, length)
    row = decided.memory[0]
    return {
        "parameters": parameters,
        "ms a step": seconds * 1e3,
        "tokens/s": tokens_per_s,
        "TFLOP/s": flops / 1e12,
        "MFU %": percent(flops, peak_flops(device)),
        "gaps between kernels %": idle_percent((start, end) for _, start, end in kernels),
        "kernels a step": len(kernels) // PROFILED or None,
        "attention's kernels": attention_kernels(name for name, *_ in kernels),
        "peak GiB": gib(peak),
        "peak GiB by the plan": gib(row.total - row.slack - row.device),
        "peak / plan": peak / (row.total - row.slack - row.device) if peak else None,
        "reserved GiB": gib(reserved),
        "reserved GiB by the plan": gib(row.total - row.device),
        "plan: parameters, gradients, optimizer, activations GiB": ", ".join(
            f"{gib(n):.2f}" for n in (row.parameters, row.gradients, row.optimizer, row.activations)
        ),
    }


def flops_a_token(parameters: int, sizes: dict[str, int], length: int) -> float:
    """Forward and backward: 6 for each weight of a product; 6 · length · width for the causal attention of a layer."""
    return 6.0 * parameters + 6.0 * sizes["num_hidden_layers"] * length * sizes["hidden_size"]


def peak_flops(device: torch.device) -> float | None:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((flops for gpu, flops in PEAKS.items() if gpu in name), None)


def cluster() -> str:
    """The cluster file of this machine's GPU."""
    return cluster_of(torch.cuda.get_device_name() if torch.cuda.is_available() else "")


def cluster_of(gpu: str) -> str:
    """The file with the device ``gpu``, as its driver names it; that of an H200 for another or none."""
    words = re.split(r"\W+", gpu)
    devices = {file: yaml.safe_load(file.read_text())["device"].get("name", "") for file in CLUSTERS.glob("*.yaml")}
    files = sorted(file for file, device in devices.items() if device and device.split()[0] in words)
    return str(files[0] if files else CLUSTERS / "h200.yaml")


def percent(part: float, whole: float | None) -> float | None:
    return 100.0 * part / whole if whole else None


def gib(num_bytes: float | None) -> Any:
    return None if num_bytes is None else num_bytes / 2**30


def idle_percent(intervals: Iterable[tuple[float, float]]) -> float | None:
    """The share of the time from the first start to the last end that no interval covers; None for no interval."""
    busy, last, first = 0.0, None, None
    for start, end in sorted(intervals):
        first = start if first is None else first
        last = start if last is None else last
        busy += max(0.0, end - max(start, last))
        last = max(last, end)
    return None if first is None or last is None or last == first else 100.0 * (1.0 - busy / (last - first))


def attention_kernels(names: Iterable[str]) -> str | None:
    """The families of attention's own kernels among ``names``; None if scores were computed by plain products. Those of
    cuDNN have flash in their names too, so each name is of the first family that it fits."""
    signs = {"sdpa": "cudnn", "flash": "flash", "fmha_cutlass": "memory-efficient"}
    families = {next((family for sign, family in signs.items() if sign in name.lower()), "") for name in names}
    return ", ".join(sorted(families - {""})) or None


def plan_of(model: nn.Module, length: int, vocabulary: int, **more: Any) -> Plan:
    return plan(model, spec_of(length, vocabulary) | more)


def spec_of(length: int, vocabulary: int) -> dict[str, Any]:
    tokens = {"shape": [length], "dtype": "int64", "high": vocabulary}
    return {
        "mesh": {},
        "batch": {"global": MICRO * MICROBATCHES, "micro": MICRO},
        "inputs": {"input_ids": tokens, "labels": tokens},
        "precision": {"parameters": "bfloat16"},
        "optimizer": {"clip_grad_norm": 1.0, "lr": 1e-4},
        "cluster": cluster(),  # so that memory is that of a GPU's kernels
        "compile": False,
    }


def seconds_a_step(engine: Engine, given: dict[str, Any], warm: int, timed: int) -> float:
    for _ in range(warm):
        engine.train_step(given)
    wait(engine.groups.device)
    if engine.groups.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(engine.groups.device)
    start = time.perf_counter()
    for _ in range(timed):
        engine.train_step(given)
    wait(engine.groups.device)
    return (time.perf_counter() - start) / timed


def kernels_of(engine: Engine, given: dict[str, Any], device: torch.device) -> list[tuple[str, float, float]]:
    """(name, start, end) in microseconds of the kernels of ``PROFILED`` steps; nothing on a CPU."""
    return kernels_in(lambda: [engine.train_step(given) for _ in range(PROFILED)], device)


def kernels_in(call: Callable[[], object], device: torch.device) -> list[tuple[str, float, float]]:
    """The same of any call."""
    if device.type != "cuda":
        return []
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        wait(device)
    on_device = [event for event in seen.events() or [] if event.device_type == torch.autograd.DeviceType.CUDA]
    return [(event.name, event.time_range.start, event.time_range.end) for event in on_device]


def release(device: torch.device) -> None:
    """Memory of an engine that nothing holds any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
