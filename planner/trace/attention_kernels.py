"""Attention as the kernels of a GPU keep it: its result and one number a row, with dropout too, and never the shares.

    cuDNN               Hopper, Blackwell: 16-bit, multiples of 8 features  keeps q, k, v, y, log Σexp of each row, mask
    flash               16-bit, no mask, up to 256 features a head          keeps q, k, v, y, Σexp of each row
    memory-efficient    a mask or float32; as many key heads as heads       the same, and the mask
    math                all else: float64, shared keys with a mask          keeps scores and shares, [b, h, s, t]

With dropout the first three keep two numbers of the generator instead of a dropout mask. The rules are those
of torch's choice (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp), without strides: cuDNN comes first where torch
prefers it (``device.cudnn_attention`` of the cluster file), and takes values of another width and masks of shared keys.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from passes.ops.axis import widened
from passes.program.ops.aten import HALF, packet_of

CUDNN, FLASH, EFFICIENT, MATH = "cuDNN", "flash", "memory-efficient", "math"
_WIDEST = 256  # features of a head
_ROWS = 32  # the memory-efficient kernel rounds up the rows of its sums


def kernel_of(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, cudnn: bool = False) -> str:
    """Return the kernel that a GPU takes. ``cudnn``: it prefers cuDNN's."""
    if any(x.dim() != 4 or x.dtype != q.dtype for x in (q, k, v)) or q.dtype not in (*HALF, torch.float32):
        return MATH
    widths = {x.shape[-1] for x in (q, k, v)}
    is_long = min(q.shape[2], k.shape[2]) > 1 and not (mask is not None and mask.requires_grad)
    if cudnn and is_long and q.dtype in HALF and max(widths) <= _WIDEST and all(width % 8 == 0 for width in widths):
        return CUDNN
    if q.dtype in HALF and mask is None and len(widths) == 1 and q.shape[-1] <= _WIDEST:
        return FLASH
    step = 8 if q.dtype in HALF else 4
    if q.shape[1] == k.shape[1] == v.shape[1] and all(width % step == 0 for width in widths):
        return EFFICIENT
    return MATH


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    cudnn: bool = False,
) -> Tensor:
    """Compute scaled_dot_product_attention, as far as memory goes."""
    kernel = kernel_of(query, key, value, attn_mask, cudnn=cudnn)
    if kernel != MATH:
        return _Fused.apply(query, key, value, attn_mask, kernel)
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, kernel: str) -> Tensor:
        batch, heads, rows, _ = q.shape
        ctx.kernel = kernel
        if kernel == FLASH or (kernel == CUDNN and v.shape[-1] == q.shape[-1]):
            y = torch.empty_like(q.transpose(1, 2)).transpose(1, 2)  # as the query lies, if it lies without gaps
        else:
            y = q.new_empty(batch, rows, heads, v.shape[-1]).transpose(1, 2)
        rows = -(-rows // _ROWS) * _ROWS if kernel == EFFICIENT else rows
        sizes = [(), ()] if kernel == CUDNN else [(2,)]
        generator = [q.new_empty(size, dtype=torch.int64) for size in sizes]
        ctx.save_for_backward(q, k, v, mask, q.new_empty(batch, heads, rows, dtype=torch.float32), y, *generator)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, mask, sums, *_ = ctx.saved_tensors
        beside = [torch.empty_like(sums)]
        if ctx.kernel in (CUDNN, FLASH):
            beside.append(q.new_empty(q.shape, dtype=torch.float32))  # the gradient of q is summed up there
            if k.shape[1] != q.shape[1]:  # those of shared keys, for each head
                beside += [x.new_empty(x.shape[0], q.shape[1], *x.shape[2:]) for x in (k, v)]
        of_mask = torch.empty_like(mask) if ctx.needs_input_grad[3] else None
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), of_mask, None


class _RmsNorm(torch.autograd.Function):
    """One kernel each way, which saves its inputs and the root of each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, widened(x.narrow(-1, 0, 1)).clone())
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight)


def rms_norm(x: Tensor, size: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """Compute aten.rms_norm, as far as memory goes."""
    return _RmsNorm.apply(x, weight)


class KernelsOfGPU(TorchFunctionMode):
    """Inside, attention and RMS norms keep what the kernels of a GPU keep, wherever they are called from. ``cudnn``: of
    one that prefers cuDNN's attention."""

    def __init__(self, *, cudnn: bool = False) -> None:
        super().__init__()
        attends = partial(attention, cudnn=cudnn)
        self._of_gpu: dict[Any, Callable[..., Tensor]] = {
            F.scaled_dot_product_attention: attends,
            torch.ops.aten.scaled_dot_product_attention: attends,
            torch.ops.aten.rms_norm: rms_norm,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        called: Callable[..., Any] = self._of_gpu.get(packet_of(func)) or func
        return called(*args, **(kwargs or {}))
