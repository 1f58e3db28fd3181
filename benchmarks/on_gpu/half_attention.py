"""Attention in bfloat16: of cp ranks by flash and by cuDNN's kernel, of MLA and GQA, and of documents."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.on_gpu.plain import timed
from benchmarks.on_gpu.profile import attention_kernels, kernels_in
from benchmarks.on_gpu.rounding import hold, of_tensors
from benchmarks.on_gpu.table import Table
from passes.ops import flash, gathered_attention
from passes.ops.axis import AxisHandle
from passes.ops.document_blocks import has_kernel
from passes.ops.documents import attention_by_documents
from passes.partition.sequence import facts
from tests.tools.cudnn_stand_in import stand_in

CP = 2
# heads of q and of k, widths of q and of v
SHAPES = {"MLA": (16, 16, 192, 128), "GQA": (32, 8, 128, 128), "heads of 64": (16, 16, 64, 64)}
DOCUMENTS = 4


def operands(
    length: int, heads: int, key_heads: int, width: int, value_width: int, sequences: int = 1
) -> tuple[list[Tensor], Tensor]:
    """q, k, v and the gradient of the result, in values of bfloat16."""
    torch.manual_seed(0)
    shapes = ((heads, width), (key_heads, width), (key_heads, value_width), (heads, value_width))
    *made, grad = (torch.randn(sequences, h, length, d).bfloat16() for h, d in shapes)
    return made, grad


def with_gradients(
    call: Callable[..., Tensor], made: list[Tensor], grad: Tensor, device: torch.device | str, dtype: torch.dtype
) -> list[Tensor]:
    leaves = [x.to(device, dtype).requires_grad_() for x in made]
    y = call(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad.to(device, dtype))]


def over_cp(device: torch.device, length: int) -> Table:
    """Causal attention of each cp rank's rows to keys of all, in parts that are merged; and its backward. Without a GPU
    cuDNN's two ops are stood in for.
    """
    table = Table("half: attention over cp 2", ("kernel", "cp rank", "error", "own error"))
    made, grad = operands(length, 4, 4, 64, 64)
    for rank in range(CP):
        rows = torch.cat([torch.arange(a, b) for a, b in facts.rows(length, CP, rank)])
        own_rows, own_grad = [made[0][:, :, rows], *made[1:]], grad[:, :, rows]
        mask = rows[:, None] >= torch.arange(length)

        def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor = mask) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, mask.to(q.device))

        truth = with_gradients(masked, own_rows, own_grad, "cpu", torch.float64)
        own = of_tensors(with_gradients(masked, own_rows, own_grad, device, torch.bfloat16), truth)
        for name in flash.KERNELS:
            axis = AxisHandle("cp", CP, rank)

            def parts(q: Tensor, k: Tensor, v: Tensor, axis: AxisHandle = axis, name: str = name) -> Tensor:
                return gathered_attention.attend_in_parts(q, k, v, axis, None, name)

            with nullcontext() if device.type == "cuda" else stand_in():
                found = of_tensors(with_gradients(parts, own_rows, own_grad, device, torch.bfloat16), truth)
            table.add(name, rank, found, own)
            hold(table, f"{name}, cp rank {rank}", found, own)
    return table


def kernels(device: torch.device, length: int) -> Table:
    """The kernel that PyTorch takes, and those that it could take; forward and backward. Errors are PyTorch's own."""
    columns = ("causal attention", "flash", "cuDNN", "memory-efficient", "kernels", "ms", "error", "of plain products")
    table = Table("half: kernels of attention", columns)
    for name, (heads, key_heads, width, value_width) in SHAPES.items():
        made, grad = operands(length, heads, key_heads, width, value_width)
        gqa = heads != key_heads

        def causal(q: Tensor, k: Tensor, v: Tensor, gqa: bool = gqa) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)

        def run(call: Any = causal, made: list[Tensor] = made, grad: Tensor = grad) -> list[Tensor]:
            return with_gradients(call, made, grad, device, torch.bfloat16)

        with sdpa_kernel(SDPBackend.MATH):
            own = run()
        truth = with_gradients(causal, made, grad, "cpu", torch.float64)
        found, limit = of_tensors(run(), truth), of_tensors(own, truth)
        names = attention_kernels(kernel for kernel, *_ in kernels_in(run, device))
        seconds = timed(run, 1 if device.type == "cpu" else 10, device)
        table.add(name, *_may(made, gqa, device), names, seconds * 1e3, found, limit)
    return table


def _may(made: list[Tensor], gqa: bool, device: torch.device) -> list[bool]:
    cuda = torch.backends.cuda
    q, k, v = (x.to(device).requires_grad_() for x in made)
    given = cuda.SDPAParams(q, k, v, None, 0.0, True, gqa)
    asked = (cuda.can_use_flash_attention, cuda.can_use_cudnn_attention, cuda.can_use_efficient_attention)
    return [device.type == "cuda" and can_use(given) for can_use in asked]


def documents(device: torch.device, length: int) -> Table:
    table = Table("half: documents", ("attention within documents", "one kernel", "error", "own error"))
    made, grad = operands(length, 8, 2, 64, 64)
    ids = (torch.arange(length) * DOCUMENTS // length)[None, None, :]
    mask = (ids[..., :, None] == ids[..., None, :]) & torch.ones(length, length, dtype=torch.bool).tril()

    def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask.to(q.device), enable_gqa=True)

    def by_documents(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention_by_documents(q, k, v, mask.to(q.device), length // DOCUMENTS, None, True)

    truth = with_gradients(masked, made, grad, "cpu", torch.float64)
    own = of_tensors(with_gradients(masked, made, grad, device, torch.bfloat16), truth)
    found = of_tensors(with_gradients(by_documents, made, grad, device, torch.bfloat16), truth)
    table.add(f"{DOCUMENTS} documents, GQA", has_kernel(*(x.to(device) for x in made)), found, own)
    hold(table, "documents", found, own)
    return table
