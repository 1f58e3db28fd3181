"""The same models in plain PyTorch and here, on one GPU, each eager and compiled.

Llama      of 1.1 billion parameters; and a network of 4 layers of 8 experts, 2 a token, in a loop over a ModuleList

plain      the model itself in bfloat16, ``backward`` of each microbatch, ``clip_grad_norm_``, fused AdamW over
           the bfloat16 parameters; compiled: ``torch.compile(model)``
ours       gradients and AdamW in float32; compiled: ``compile: true``
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.on_gpu.models import batch, llama, looped_experts
from benchmarks.on_gpu.profile import MICRO, MICROBATCHES, TIMED, WARM, gib, plan_of, release, seconds_a_step, wait
from benchmarks.on_gpu.table import Table
from runtime import Engine

LIMIT = 1.05
Made = tuple[nn.Module, int, int]  # a model on meta, the length of its sequences, its vocabulary


@dataclass(frozen=True)
class Figures:
    """``first``: seconds of the first step, with compilation; ``planned``: bytes, of ours."""

    first: float
    seconds: float
    peak: int | None
    planned: int | None = None


@dataclass(frozen=True)
class Run:
    """One run of a model on a device."""

    make: Callable[[], Made]
    device: torch.device
    tiny: bool
    compiled: bool

    @property
    def count(self) -> int:
        return 1 if self.tiny else TIMED

    @property
    def warm(self) -> int:
        return 1 if self.tiny else WARM


def run(device: torch.device, *, tiny: bool = False) -> Table:
    table = Table("plain", ("run", "first step s", "ms a step", "tokens/s", "times plain", "peak GiB", "by the plan"))
    models: dict[str, Callable[[], Made]] = {
        "Llama": lambda: _llama(tiny=tiny),
        "experts": lambda: looped_experts(tiny=tiny),
    }
    for model, make in models.items():
        compare(table, model, make, device, tiny=tiny)
    return table


def compare(table: Table, model: str, make: Callable[[], Made], device: torch.device, *, tiny: bool) -> None:
    tokens = MICRO * MICROBATCHES * make()[1]
    found = {
        f"{model}, {name}{', compiled' * compiled}": measured(how, Run(make, device, tiny, compiled))
        for compiled in (False, True)
        for name, how in (("plain", plain), ("ours", ours))
    }
    by_plain = found[f"{model}, plain"].seconds
    for name, x in found.items():
        ratio = by_plain / x.seconds
        table.add(name, x.first, x.seconds * 1e3, tokens / x.seconds, ratio, gib(x.peak), gib(x.planned))
    if not tiny:
        table.expect(f"{model}, ours in plain steps", found[f"{model}, ours"].seconds / by_plain, LIMIT)


def _llama(*, tiny: bool) -> Made:
    model, sizes = llama(tiny=tiny, attention_dropout=0.0)
    return model, sizes["max_position_embeddings"], sizes["vocab_size"]


def measured(how: Callable[[Run], Figures], run: Run) -> Figures:
    found = how(run)
    torch.compiler.reset()
    release(run.device)
    return found


def plain(run: Run) -> Figures:
    meta, length, vocabulary = run.make()
    model = _with_weights(meta, run.device)
    called = torch.compile(model) if run.compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    given = batch(0, MICRO * MICROBATCHES, length, vocabulary)

    def step() -> None:
        placed = {name: x.to(run.device, non_blocking=True).chunk(MICROBATCHES) for name, x in given.items()}
        for i in range(MICROBATCHES):
            returned = called(**{name: x[i] for name, x in placed.items()})
            loss: Tensor = returned if isinstance(returned, Tensor) else returned.loss
            (loss / MICROBATCHES).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    first = timed(step, 1, run.device)
    timed(step, run.warm, run.device)
    if run.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(run.device)
    return Figures(first, timed(step, run.count, run.device), peak_of(run.device))


def _with_weights(meta: nn.Module, device: torch.device) -> nn.Module:
    """Of no special values; buffers (rotary frequencies) too."""
    model, generator = meta.to_empty(device=device).to(torch.bfloat16), torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for value in (*model.parameters(), *model.buffers()):
            value.normal_(0.0, 0.02, generator=generator)
    return model


def ours(run: Run) -> Figures:
    model, length, vocabulary = run.make()
    decided = plan_of(model, length, vocabulary, compile=run.compiled)
    given = batch(0, MICRO * MICROBATCHES, length, vocabulary)
    with Engine(decided, device=run.device, timeout_seconds=300) as engine:
        first = timed(lambda: engine.train_step(given), 1, run.device)
        seconds = seconds_a_step(engine, given, run.warm, run.count)
        return Figures(first, seconds, peak_of(run.device), decided.memory[0].total)


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
