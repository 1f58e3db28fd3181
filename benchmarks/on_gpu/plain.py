"""The same Llama of 1.1 billion parameters in plain PyTorch and here, on one GPU, each eager and compiled.

plain      the Hugging Face model in bfloat16, ``backward`` of each microbatch, ``clip_grad_norm_``, fused AdamW over
           the bfloat16 parameters; compiled: ``torch.compile(model)``
ours       the plan of the profile: gradients and AdamW in float32; compiled: ``compile: true``
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.on_gpu.models import batch, llama
from benchmarks.on_gpu.profile import MICRO, MICROBATCHES, TIMED, WARM, gib, plan_of, seconds_a_step, wait
from benchmarks.on_gpu.table import Table
from runtime import Engine


@dataclass(frozen=True)
class Figures:
    """``first``: seconds of the first step, with compilation."""

    first: float
    seconds: float
    peak: int | None


def run(device: torch.device, *, tiny: bool = False) -> Table:
    table = Table("plain", ("run", "first step s", "ms a step", "tokens/s", "times plain", "peak GiB"))
    tokens = MICRO * MICROBATCHES * llama(tiny=tiny, attention_dropout=0.0)[1]["max_position_embeddings"]
    runs = {"plain": plain, "plain, compiled": plain, "ours": ours, "ours, compiled": ours}
    found = {name: measured(how, device, tiny, "compiled" in name) for name, how in runs.items()}
    for name, figures in found.items():
        ratio = found["plain"].seconds / figures.seconds
        table.add(name, figures.first, figures.seconds * 1e3, tokens / figures.seconds, ratio, gib(figures.peak))
    if not tiny:
        table.hold("ours in plain steps", found["ours"].seconds / found["plain"].seconds, 1.05)
    return table


def measured(how: Callable[..., Figures], device: torch.device, tiny: bool, compiled: bool) -> Figures:
    found = how(device, tiny, compiled)
    gc.collect()
    torch.compiler.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def plain(device: torch.device, tiny: bool, compiled: bool) -> Figures:
    meta, sizes = llama(tiny=tiny, attention_dropout=0.0)
    model = meta.to_empty(device=device).to(torch.bfloat16)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.02, generator=generator)
    for buffer in model.buffers():  # rotary frequencies, of which no value matters here
        buffer.normal_(generator=generator)
    called = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    given = batch(0, MICRO * MICROBATCHES, sizes["max_position_embeddings"], sizes["vocab_size"])

    def step() -> None:
        placed = {name: x.to(device, non_blocking=True).chunk(MICROBATCHES) for name, x in given.items()}
        for i in range(MICROBATCHES):
            loss: Tensor = called(**{name: x[i] for name, x in placed.items()}).loss
            (loss / MICROBATCHES).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    first = timed(step, 1, device)
    timed(step, 1 if tiny else WARM, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = timed(step, 1 if tiny else TIMED, device)
    return Figures(first, seconds, peak_of(device))


def ours(device: torch.device, tiny: bool, compiled: bool) -> Figures:
    model, sizes = llama(tiny=tiny, attention_dropout=0.0)
    length, vocabulary = sizes["max_position_embeddings"], sizes["vocab_size"]
    more: dict[str, Any] = {"compile": True} if compiled else {}
    given = batch(0, MICRO * MICROBATCHES, length, vocabulary)
    with Engine(plan_of(model, length, vocabulary, **more), device=device, timeout_seconds=300) as engine:
        first = timed(lambda: engine.train_step(given), 1, device)
        seconds = seconds_a_step(engine, given, 1 if tiny else WARM, 1 if tiny else TIMED)
        return Figures(first, seconds, peak_of(device))


def timed(step: Callable[[], object], count: int, device: torch.device) -> float:
    """Seconds a step."""
    wait(device)
    start = time.perf_counter()
    for _ in range(count):
        step()
    wait(device)
    return (time.perf_counter() - start) / count


def peak_of(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
