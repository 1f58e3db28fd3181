"""Measure one device: matrix products, attention, ops that only move bytes, and small ops.

product      y[m, n] = x[m, k] @ W[n, k].T, and both gradients    2·m·k·n operations each
attention    causal, forward and backward                         3 · 4·b·h·s·s·d operations, all of it counted
moving       copy, and the ops between products, both ways        bytes that are read and written
small        a chain of ops on few elements, forward and backward

Each call takes other operands than the one before, as the layers of a model do: no cache holds all of them. Values
are random: a GPU that multiplies equal numbers draws less power, and its clock stays higher than in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.calibrate.found import Timed
from runtime.calibrate.timing import Clock

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_ON_CPU = ((32, 256, 256), (128, 64, 256), (128, 256, 256), (256, 512, 512), (512, 512, 2048))
_ON_CUDA = ((256, 2048, 2048), (2048, 256, 2048), (1024, 1024, 1024), (4096, 4096, 4096), (8192, 8192, 8192))
_NO_CACHE = {"cpu": 1 << 26, "cuda": 1 << 29}  # bytes
_MOST_SETS = 64
_CHAIN = 100
_MOST_SECONDS = 3.0  # of one call; a slower one is left out


def products(clock: Clock, skipped: list[str]) -> Iterator[Timed]:
    """Each dtype from small to large, until a call would take too long."""
    sizes = _ON_CUDA if clock.device.type == "cuda" else _ON_CPU
    for dtype in DTYPES:
        name, rate = str(dtype).removeprefix("torch."), 0.0
        for m, k, n in sizes:
            work = 2.0 * m * k * n
            if rate and work / rate > _MOST_SECONDS:
                skipped.append(f"a product of {name} [{m}, {k}] · [{k}, {n}]: it would take {work / rate:.0f} s")
                break
            operands = _in_turn(clock, ((m, k), (n, k), (m, n)), dtype)
            seconds = clock.seconds(lambda operands=operands: _product_and_gradients(*next(operands)))
            timed = Timed(name, work, seconds / 3, (m, k, n))
            rate = timed.rate
            yield timed


def _product_and_gradients(x: Tensor, weight: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return F.linear(x, weight), y @ weight, y.t() @ x


def attention(clock: Clock) -> Iterator[Timed]:
    """In the dtype in which models of this device are trained."""
    on_cuda = clock.device.type == "cuda"
    b, h, s, d = (4, 16, 2048, 64) if on_cuda else (1, 4, 256, 64)
    dtype = torch.bfloat16 if on_cuda else torch.float32
    operands = _in_turn(clock, ((b, h, s, d),) * 3, dtype, asks=True)

    def call() -> None:
        q, k, v = next(operands)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(out, (q, k, v), out)

    yield Timed(str(dtype).removeprefix("torch."), 3.0 * 4 * b * h * s * s * d, clock.seconds(call))


def moved(clock: Clock) -> Iterator[Timed]:
    """Copies too large for any cache, then the memory-bound ops between the products of a block."""
    large = 1 << (28 if clock.device.type == "cuda" else 23)  # elements
    first, second, out = (torch.full((large,), 0.5, device=clock.device) for _ in range(3))
    yield Timed("copy", 8.0 * large, clock.seconds(lambda: out.copy_(first)))
    yield Timed("add", 12.0 * large, clock.seconds(lambda: torch.add(first, second, out=out)))
    rows, width = (8192, 4096) if clock.device.type == "cuda" else (512, 512)
    for name, passes, op in _between_products(width):
        operands = _in_turn(clock, ((rows, width),), torch.float32, asks=True)
        seconds = clock.seconds(lambda operands=operands, op=op: _both_ways(op, *next(operands)))
        yield Timed(name, 4.0 * passes * rows * width, seconds)


def _between_products(width: int) -> Iterator[tuple[str, int, Callable[[Tensor], Tensor]]]:
    """Name, tensors of x's size that are read and written both ways, op."""
    yield "gelu", 5, lambda x: F.gelu(x, approximate="tanh")
    yield "layer_norm", 5, lambda x: F.layer_norm(x, (width,))
    yield "add of one", 2, lambda x: x + 1.0  # its gradient is the one that came
    yield "softmax", 5, lambda x: torch.softmax(x, -1)


def _both_ways(op: Callable[[Tensor], Tensor], x: Tensor) -> None:
    out = op(x)
    torch.autograd.grad(out, x, out.detach())


def small(clock: Clock) -> Timed:
    """The least time of an op, on the host or on the device: one op of a chain of tiny ones, forward or backward."""
    x = torch.full((16,), 0.5, device=clock.device, requires_grad=True)

    def call() -> None:
        y = x
        for _ in range(_CHAIN):
            y = y * 0.5
        torch.autograd.grad(y, x, y.detach())

    return Timed("small", 1.0, clock.seconds(call) / (2 * _CHAIN))


def _in_turn(
    clock: Clock, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, *, asks: bool = False
) -> Iterator[tuple[Tensor, ...]]:
    """The same shapes again and again, in turn from more memory than a cache has. ``asks``: for a gradient."""
    num_bytes = sum(prod(shape) for shape in shapes) * dtype.itemsize
    count = max(2, min(_MOST_SETS, _NO_CACHE[clock.device.type] // num_bytes))
    return cycle(
        [
            tuple(torch.randn(shape, device=clock.device, dtype=dtype, requires_grad=asks) for shape in shapes)
            for _ in range(count)
        ]
    )
