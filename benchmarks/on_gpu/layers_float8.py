"""Products of float8 (e4m3) with scales by tensor, by row and by block of 128, beside bfloat16.

error       beside the product of the same codes in float64
codes       of the cast, eager, compiled and on a CPU: equal or not
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.on_gpu.plain import timed
from benchmarks.on_gpu.rounding import of_tensors
from benchmarks.on_gpu.table import Table

FLOAT8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FLOAT8).max
BLOCK = 128
LIMITS = {torch.bfloat16: 6e-3, torch.float32: 2e-3}  # of errors with exact accumulation; fast: noted alone


def float8(device: torch.device, *, tiny: bool) -> Table:
    columns = ("scales", "result", "fast accumulation", "error", "ms", "with casts", "bfloat16", "codes")
    table = Table("layers: float8 products", columns)
    rows, inner, width = (16, 128, 128) if tiny else (8192, 4096, 14336)
    torch.manual_seed(0)
    a, b = torch.randn(rows, inner).bfloat16(), torch.randn(width, inner).bfloat16()
    x, w = a.to(device), b.to(device)
    count = 1 if tiny else 10
    plain = timed(lambda: x @ w.t(), count, device) * 1e3
    for name, (cast, multiply) in WAYS.items():
        codes = same_codes(cast, a, x, is_compiled=not tiny)
        (xq, xs), (wq, ws) = cast(x, False), cast(w, True)
        truth = [back(xq, xs) @ back(wq, ws).t()]
        for dtype in LIMITS:
            for fast in (False, True):

                def product(fast: bool = fast, dtype: torch.dtype = dtype, multiply: Any = multiply) -> Tensor:
                    return multiply(xq, wq, xs, ws, dtype, fast)  # noqa: B023

                def with_casts(
                    fast: bool = fast, dtype: torch.dtype = dtype, multiply: Any = multiply, cast: Any = cast
                ) -> Tensor:
                    (p, ps), (q, qs) = cast(x, False), cast(w, True)
                    return multiply(p, q, ps, qs, dtype, fast)

                result = str(dtype).removeprefix("torch.")
                try:
                    found = of_tensors([product()], truth)
                except Exception as refused:  # of a combination that this torch or device lacks
                    table.add(name, result, fast, f"{str(refused).splitlines()[0][:80]}", None, None, plain, codes)
                    continue
                milliseconds = (timed(call, count, device) * 1e3 for call in (product, with_casts))
                table.add(name, result, fast, found, *milliseconds, plain, codes)
                if not fast:
                    table.hold(f"by {name}, {result}", found, LIMITS[dtype])
    return table


def same_codes(cast: Any, on_cpu: Tensor, x: Tensor, *, is_compiled: bool) -> str:
    """Which casts give the codes of the eager one."""
    codes = cast(x, False)[0].view(torch.uint8)
    others: dict[str, Callable[[], Tensor]] = {"CPU": lambda: cast(on_cpu, False)[0]}
    if is_compiled:
        others["compiled"] = lambda: torch.compile(cast)(x, False)[0]
    found = {name: torch.equal(call().view(torch.uint8).cpu(), codes.cpu()) for name, call in others.items()}
    return ", ".join(f"{name} {'equal' if same else 'differs'}" for name, same in found.items())


def by_tensor(x: Tensor, is_weight: bool) -> tuple[Tensor, Tensor]:
    scale = x.abs().max().float() / LARGEST
    return (x.float() / scale).clamp(-LARGEST, LARGEST).to(FLOAT8), scale


def by_row(x: Tensor, is_weight: bool) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(1, keepdim=True).float() / LARGEST
    return (x.float() / scale).clamp(-LARGEST, LARGEST).to(FLOAT8), scale


def by_block(x: Tensor, is_weight: bool) -> tuple[Tensor, Tensor]:
    """Of a weight 128 × 128, of others 1 × 128."""
    rows = BLOCK if is_weight else 1
    blocks = x.float().view(x.shape[0] // rows, rows, x.shape[1] // BLOCK, BLOCK)
    scale = blocks.abs().amax((1, 3), keepdim=True) / LARGEST
    codes = (blocks / scale).clamp(-LARGEST, LARGEST).to(FLOAT8).view(x.shape)
    return codes, scale[:, 0, :, 0]


def back(codes: Tensor, scale: Tensor) -> Tensor:
    """Values of codes in float64."""
    if scale.dim() == 2:
        for dim in (0, 1):
            scale = scale.repeat_interleave(codes.shape[dim] // scale.shape[dim], dim)
    return codes.double() * scale.double()


def scaled(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype, fast: bool) -> Tensor:
    scale = b_scale.t() if b_scale.dim() else b_scale
    return torch._scaled_mm(a, b.t(), a_scale, scale, out_dtype=dtype, use_fast_accum=fast)


def scaled_by_block(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype, fast: bool) -> Tensor:
    kinds: Any = F.ScalingType  # pyright: ignore[reportAttributeAccessIssue]
    outer = a_scale.t().contiguous().t()  # as the kernel reads scales of 1 × 128
    given = (a, b.t(), outer, kinds.BlockWise1x128, b_scale.contiguous(), kinds.BlockWise128x128)
    return F.scaled_mm(*given, output_dtype=dtype, use_fast_accum=fast)  # pyright: ignore


WAYS: dict[str, tuple[Any, Any]] = {
    "tensor": (by_tensor, scaled),
    "row": (by_row, scaled),
    "block": (by_block, scaled_by_block),
}
