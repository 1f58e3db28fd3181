"""Compiled pieces as a device would run them: as many kernels each way as Inductor makes, and the bytes that cross.

A forward reads its inputs and writes its outputs once, a backward reads inputs and gradients and writes gradients. The
kernels are those of Inductor's code for a CPU, which joins fewer loops than its code for a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

from passes.base import RankProgram
from passes.ops.region import CompiledCall
from runtime.compiled import functions
from runtime.compiled.functions import calls_of, signature_of
from tests.tools.kernels import Kernels


class PiecesOfAGpu:
    """Runs the pieces of a program op by op, and counts each way in ``seen`` as Inductor's code would be counted."""

    def __init__(self, program: RankProgram) -> None:
        self.seen: Kernels | None = None
        self._kernels: dict[Any, tuple[int, int]] = {}
        for call in calls_of(program):
            call.run = self._run

    def _run(self, call: CompiledCall, inputs: Sequence[Any]) -> Sequence[Any]:
        if not torch.is_grad_enabled():
            return call.module(*inputs)
        key = call.structure, signature_of(inputs)
        if key not in self._kernels:
            with _disable_current_modes():
                self._kernels[key] = _counted(call.module, key[1])
        return _Piece.apply(self, call.module, self._kernels[key], *inputs)  # pyright: ignore

    def count(self, kernels: int, *crossing: Sequence[Tensor | None]) -> None:
        if self.seen is not None:
            self.seen.num_kernels += kernels
            self.seen.num_bytes += sum(x.nbytes for values in crossing for x in values if x is not None)


class _Piece(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, owner: PiecesOfAGpu, module: fx.GraphModule, kernels: tuple[int, int], *inputs: Tensor
    ) -> Any:
        ctx.owner, ctx.module, ctx.kernels = owner, module, kernels[1]
        ctx.flags = [x.requires_grad for x in inputs]
        ctx.save_for_backward(*inputs)
        with _disable_current_modes():
            outputs = tuple(y.detach().clone() for y in module(*inputs))
        owner.count(kernels[0], inputs, outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        inputs = ctx.saved_tensors
        with _disable_current_modes(), torch.enable_grad():
            leaves = [x.detach().requires_grad_(flag) for x, flag in zip(inputs, ctx.flags, strict=True)]
            pairs = [(y, g) for y, g in zip(ctx.module(*leaves), grads, strict=True) if y.requires_grad]
            wanted = [x for x in leaves if x.requires_grad]
            found = torch.autograd.grad([y for y, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
        ctx.owner.count(ctx.kernels, inputs, grads, found)
        of = iter(found)
        return None, None, None, *(next(of) if flag else None for flag in ctx.flags)


def _counted(module: fx.GraphModule, signature: Any) -> tuple[int, int]:
    """Kernels of the forward, and of the backward."""
    from torch._inductor import compile as compile_by_inductor
    from torch._inductor import metrics

    own = fx.GraphModule(nn.Module(), fx.Graph())
    own.graph.output(own.graph.graph_copy(module.graph, {}))
    own.recompile()
    examples = [functions._example(*argument) for argument in signature]
    counts = [metrics.generated_kernel_count]
    with torch.enable_grad(), saved_tensors_hooks(lambda x: x, lambda x: x):
        function: Any = compile_by_inductor(own, list(examples), functions._OPTIONS)
        outputs = [x for x in function(*examples) if x.requires_grad]
        counts.append(metrics.generated_kernel_count)
        wanted = [x for x in examples if x.requires_grad]
        torch.autograd.grad(outputs, wanted, list(map(torch.zeros_like, outputs)), allow_unused=True)
    return counts[1] - counts[0], metrics.generated_kernel_count - counts[1]
