"""Kernels that a layer of a Llama launches in bfloat16, forward and backward, and bytes that they read and write.

Compiled pieces are run as a device would: as many kernels each way as Inductor makes; a forward reads its inputs and
writes its outputs once, a backward reads inputs and gradients and writes gradients. The kernels are those of Inductor's
code for a CPU, which joins fewer loops than its code for a GPU.
"""

from collections.abc import Sequence
from functools import cache
from math import inf
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from passes.base import RankProgram
from passes.ops.region import CompiledCall
from planner import plan
from runtime import Engine
from runtime.compiled import functions
from runtime.compiled.functions import calls_of, signature_of
from runtime.optimizer import unmixed

_NOTHING = ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided")  # no kernel writes there


class Kernels(TorchDispatchMode):
    """Counts the calls below autograd that write something: no views, no fresh memory."""

    def __init__(self) -> None:
        super().__init__()
        self.num_kernels = self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        memory = {x.untyped_storage()._cdata for x in given}
        is_view = all(x.untyped_storage()._cdata in memory for x in made) and not func._schema.is_mutable
        if not is_view and func._schema.name.removeprefix("aten::") not in _NOTHING:
            self.num_kernels += 1
            self.num_bytes += sum(x.numel() * x.element_size() for x in (*given, *made))
        return result


@torch.library.custom_op("of_a_gpu::rms_norm", mutates_args=())
def _rms_norm(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = x.float()
    root = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * root).to(x.dtype), root


@torch.library.custom_op("of_a_gpu::rms_norm_backward", mutates_args=())
def _rms_norm_backward(gradient: Tensor, x: Tensor, root: Tensor) -> Tensor:
    normed, wide = x.float() * root, gradient.float()
    return (root * (wide - normed * (wide * normed).mean(-1, keepdim=True))).to(x.dtype)


def norm_of_a_gpu(x: Tensor, eps: float) -> Tensor:
    """``aten.rms_norm`` without a weight as PyTorch's build for CUDA has it: one kernel each way; it keeps x and a
    root for each row. On a CPU it is written out."""
    return _Norm.apply(x, eps)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        result, root = _rms_norm(x, eps)
        ctx.save_for_backward(x, root)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _rms_norm_backward(grads[0].contiguous(), *ctx.saved_tensors), None


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


transformers = pytest.importorskip("transformers")
HIDDEN, LENGTH = 128, 64
BAR = 0.7
SPEC = {
    "mesh": {},
    "batch": {"global": 1, "micro": 1},
    "inputs": {"input_ids": {"shape": [LENGTH], "dtype": "int64", "high": 64}, "labels": {"like": "input_ids"}},
    "precision": {"parameters": "bfloat16"},
}


class Launched(NamedTuple):
    kernels: int
    bytes: int


def engine_of(num_layers: int, **more: Any) -> Engine:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        num_hidden_layers=num_layers, hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64, max_position_embeddings=LENGTH, use_cache=False,
    )  # fmt: skip
    return Engine(plan(transformers.LlamaForCausalLM(config), {**SPEC, **more}))


def as_on_a_gpu(engine: Engine) -> int:
    """Norms are one kernel each way; how many there are."""
    count = 0
    for stage in engine.program.stages:
        for node in stage.module.graph.find_nodes(op="call_function", target=torch.ops.aten.rms_norm.default):
            x, _, _, eps = node.args
            node.target, node.args = norm_of_a_gpu, (x, eps)
            count += 1
        stage.module.recompile()
    return count


CASES: dict[str, dict[str, Any]] = {
    "spelled": {},
    "fused": {"fuse_norms": True},
    "compiled": {"compile": True},
    "again": {"recompute": "selective"},
    "again, compiled": {"recompute": "selective", "compile": True},
    "again, compiled, in graphs": {
        "recompute": "selective", "compile": True, "cuda_graphs": {"impl": "emulate", "scope": []},
    },
}  # fmt: skip


@cache
def step(num_layers: int, case: str) -> tuple[Launched, float]:
    ids, more = torch.arange(LENGTH).view(1, LENGTH) * 7 % 64, CASES[case]
    with engine_of(num_layers, **more) as engine, pytest.MonkeyPatch.context() as patch:
        # compiled, the first norm is alone: no other piece equals it
        assert as_on_a_gpu(engine) == {"fused": 2 * num_layers + 1, "compiled": 1}.get(case, 0)
        pieces = PiecesOfAGpu(engine.program)
        patch.setattr(unmixed, "largest_on_cpu", lambda tensors: torch._foreach_norm(list(tensors), inf))
        engine.forward_backward({"input_ids": ids, "labels": ids})
        with Kernels() as seen:
            pieces.seen = seen
            loss = engine.forward_backward({"input_ids": ids, "labels": ids})
    return Launched(seen.num_kernels, seen.num_bytes), loss


def of_a_layer(case: str) -> Launched:
    two, one = step(2, case)[0], step(1, case)[0]
    return Launched(two.kernels - one.kernels, two.bytes - one.bytes)


@pytest.mark.thorough
def test_a_layer_with_norms_of_one_op_launches_fewer_kernels_and_moves_fewer_bytes():
    spelled, fused = of_a_layer("spelled"), of_a_layer("fused")
    assert spelled.kernels - fused.kernels >= 2 * 16  # two norms: seven forward and eleven or more backward become two
    assert fused.kernels <= 84
    assert fused.bytes <= 0.78 * spelled.bytes


@pytest.mark.thorough
def test_a_layer_with_compiled_norms_rotary_and_swiglu_launches_fewer_kernels_and_moves_fewer_bytes():
    spelled, compiled = of_a_layer("spelled"), of_a_layer("compiled")
    assert compiled.kernels <= 80
    assert compiled.bytes <= BAR * spelled.bytes


@pytest.mark.thorough
@pytest.mark.parametrize("case", ["again, compiled", "again, compiled, in graphs"])
def test_a_layer_that_runs_again_does_so_in_compiled_pieces(case: str):
    spelled, compiled = of_a_layer("again"), of_a_layer(case)
    assert compiled.kernels <= spelled.kernels - 40
    assert compiled.bytes <= BAR * spelled.bytes


@pytest.mark.thorough
def test_the_kernel_of_a_norm_computes_what_is_spelled_out():
    assert step(2, "fused")[1] == pytest.approx(step(2, "spelled")[1], rel=1e-3)
