"""bfloat16 on the GPU beside float64 on the CPU: errors of at most 1.5 times those of plain PyTorch on the same device.

experts     products of all experts in one call, matrices of both orders, experts without rows
attention   over cp by flash and by cuDNN, merged; the kernels that MLA and GQA get; documents in one call
norms       aten.rms_norm beside separate ops
steps       a Llama: fused norms, compiled, CUDA graphs and recomputation, together too
ep          DeepSeek-V3, GPT-OSS and Qwen3-MoE on simulated ranks
"""

from collections.abc import Iterator, Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.on_gpu.half_attention import documents, kernels, over_cp
from benchmarks.on_gpu.models import batch, miniature, planned
from benchmarks.on_gpu.plain import timed
from benchmarks.on_gpu.rounding import error, hold, of_tensors, plainly
from benchmarks.on_gpu.table import Table
from passes.ops.meeting import grouped_linear, has_kernel
from runtime import Engine

COUNTS = ([0, 7, 9, 3], [8, 0, 0, 8], [0, 19, 0, 0])
FAMILIES = ("deepseek_v3", "gpt_oss", "qwen3_moe")
SCOPES: dict[str, list[str] | None] = {"no graphs": None, "graphs of layers": [], "one graph": ["full_iteration"]}
NO_UPDATE = 1e-30  # a learning rate: steps run, and the weights stay


def run(device: torch.device, *, tiny: bool = False) -> Iterator[Table]:
    exact = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    try:
        yield experts(device, (16, 24) if tiny else (2048, 1024))
        yield over_cp(device, 32 if tiny else 4096)
        yield kernels(device, 32 if tiny else 4096)
        yield documents(device, 64 if tiny else 4096)
        yield norms(device, (32, 64) if tiny else (16384, 4096))
        yield steps(device, tiny=tiny)
        yield over_ep(device, FAMILIES[:1] if tiny else FAMILIES)
    finally:
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = exact


def experts(device: torch.device, widths: tuple[int, int]) -> Table:
    table = Table("half: experts", ("rows of experts", "matrices", "one call", "error", "own error"))
    for counts, transposed in product(COUNTS, (False, True)):
        here: Any = SimpleNamespace(sizes=counts, counts=torch.tensor(counts, device=device))
        rows, stack, grad = drawn(counts, widths, transposed)
        x, w = (y.to(device, torch.bfloat16).requires_grad_() for y in (rows, stack))
        y = grouped_linear(x, w, here, transposed, None)
        ours = [y, *torch.autograd.grad(y, (x, w), grad.to(device, torch.bfloat16))]
        own = by_loop(rows, stack, grad, counts, transposed, device, torch.bfloat16)
        truth = by_loop(rows, stack, grad, counts, transposed, torch.device("cpu"), torch.float64)
        found, limit = of_tensors(ours, truth), of_tensors(own, truth)
        name, order = f"{counts}", "[E, o, i]" if transposed else "[E, i, o]"
        table.add(name, order, has_kernel(x, w.transpose(1, 2) if transposed else w), found, limit)
        hold(table, f"{name} {order}", found, limit)
        if ours[2][here.counts == 0].any():
            table.failed.append(f"{name} {order}: the gradient of an expert without rows is not 0")
    return table


def drawn(counts: list[int], widths: tuple[int, int], transposed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, a stack of matrices and a gradient, in values of bfloat16."""
    torch.manual_seed(0)
    shape = (len(counts), *(reversed(widths) if transposed else widths))
    made = torch.randn(sum(counts), widths[0]), torch.randn(shape) / widths[0] ** 0.5
    return *(x.bfloat16() for x in made), torch.randn(sum(counts), widths[1]).bfloat16()  # pyright: ignore


def by_loop(
    rows: Tensor,
    stack: Tensor,
    grad: Tensor,
    counts: list[int],
    transposed: bool,
    device: torch.device,
    dtype: torch.dtype,
) -> list[Tensor]:
    """The results of the rows and both gradients, expert by expert."""
    x, w = (y.to(device, dtype).requires_grad_() for y in (rows, stack))
    matrices = w.transpose(1, 2) if transposed else w
    y = torch.cat([part @ matrix for part, matrix in zip(x.split(counts), matrices, strict=True)])
    return [y.detach(), *torch.autograd.grad(y, (x, w), grad.to(device, dtype))]


def norms(device: torch.device, shape: tuple[int, int]) -> Table:
    """Forward and backward."""
    table = Table("half: norms", ("RMS norm", "error", "own error", "ms"))
    torch.manual_seed(0)
    x, weight, grad = torch.randn(shape).bfloat16(), torch.randn(shape[1]).bfloat16(), torch.randn(shape).bfloat16()

    def separate(x: Tensor, weight: Tensor) -> Tensor:
        wide = x.double() if x.dtype is torch.float64 else x.float()
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    def fused(x: Tensor, weight: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, (shape[1],), weight, 1e-6)

    def both(call: Any, place: torch.device, dtype: torch.dtype) -> list[Tensor]:
        leaves = [y.to(place, dtype).requires_grad_() for y in (x, weight)]
        y = call(*leaves)
        return [y.detach(), *torch.autograd.grad(y, leaves, grad.to(place, dtype))]

    truth = both(separate, torch.device("cpu"), torch.float64)
    own = of_tensors(both(separate, device, torch.bfloat16), truth)
    for name, call in {"separate ops": separate, "aten.rms_norm": fused}.items():
        found = of_tensors(both(call, device, torch.bfloat16), truth)
        seconds = timed(lambda call=call: both(call, device, torch.bfloat16), 1 if device.type == "cpu" else 10, device)
        table.add(name, found, own, seconds * 1e3)
        hold(table, name, found, own)
    return table


def steps(device: torch.device, *, tiny: bool, names: Sequence[str] | None = None) -> Table:
    """``names``: of the ways that run; None for those of ``tiny`` or all."""
    table = Table("half: steps of a Llama", ("way", "error", "own error"))
    layers = 2 if tiny else 4
    truth = plainly(miniature("llama", layers), batch(0), "cpu", torch.float64)
    own = error(plainly(miniature("llama", layers), batch(0), device, torch.bfloat16), truth)
    for name in ways(device, tiny=tiny) if names is None else names:
        sections = ways(device, tiny=False)[name]
        try:
            found = error(gradients(sections, layers, device), truth)
        except Exception as broken:  # the other ways still run
            told = " ".join(str(broken).replace("|", "/").split())[:200]
            table.add(name, told, own)
            table.failed.append(f"{name}: {told}")
            continue
        table.add(name, found, own)
        hold(table, name, found, own)
    return table


def ways(device: torch.device, *, tiny: bool) -> dict[str, dict[str, Any]]:
    """Sections of the spec; ``tiny``: fused norms, and graphs of layers with recomputation."""
    found: dict[str, dict[str, Any]] = {"fused norms": {"fuse_norms": True}}
    impl = "local" if device.type == "cuda" else "emulate"
    for compiled, scope, recompute in product((False, True), SCOPES, ("none", "full")):
        graphs = {"cuda_graphs": {"impl": impl, "scope": SCOPES[scope], "warmup_steps": 1}}
        name = f"{'compiled' if compiled else 'eager'}, {scope}, recompute: {recompute}"
        if not tiny or (not compiled and scope == "graphs of layers" and recompute == "full"):
            found[name] = {"compile": compiled, "recompute": recompute} | (graphs if SCOPES[scope] is not None else {})
    return found


def gradients(sections: dict[str, Any], layers: int, device: torch.device) -> dict[str, Tensor]:
    """Of the third step, which replays graphs."""
    given = {"precision": {"parameters": "bfloat16"}, "optimizer": {"lr": NO_UPDATE}} | sections
    with Engine(planned(miniature("llama", layers), **given), device=device) as engine:
        for step in range(2):
            engine.train_step(batch(step))
        engine.forward_backward(batch(0))
        return engine.gather_gradients()


def over_ep(device: torch.device, families: tuple[str, ...]) -> Table:
    """Ranks are threads (tests/tools/simulated_mesh.py)."""
    from tests.models import hugging_face
    from tests.tools.simulated_mesh import run_mesh

    table = Table("half: experts over ep 2", ("family", "error", "own error"))
    for name in families:
        given = hugging_face.batch(name)
        given = {key: torch.cat([x, x.roll(1, 1)]) for key, x in given.items()}

        def make(name: str = name) -> nn.Module:
            torch.manual_seed(3)
            return hugging_face.build(name)

        truth = plainly(make(), given, "cpu", torch.float64)
        own = error(plainly(make(), given, device, torch.bfloat16), truth)
        precision = {"precision": {"parameters": "bfloat16"}}
        found = error(run_mesh(make, given, {"dp": 2, "ep": 2}, device=device, **precision).gradients, truth)
        table.add(name, found, own)
        hold(table, name, found, own)
    return table
