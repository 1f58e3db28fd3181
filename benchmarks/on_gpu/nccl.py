"""Ranks that share one GPU and communicate over NCCL: NCCL_HOSTID makes each a host of its own, with sockets between.

collectives     each one beside the values that it must give
layouts         training in float32 beside one process: every axis, the schedules, CUDA graphs, then close
cp              bfloat16, beside plain PyTorch's own error
fused           products fused with a gather or a scatter (symmetric memory), beside the separate calls
faults          a rank that raises ends the others; a save in the background
communicators   bytes of each kind

If NCCL refuses such ranks, the table of collectives has its words, and all the rest runs over gloo on CUDA tensors.
"""

import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.on_gpu import nccl_ranks as ranks
from benchmarks.on_gpu.equal import Run, compare, exact_products, steps
from benchmarks.on_gpu.models import batch, miniature, planned
from benchmarks.on_gpu.rounding import error, hold, plainly
from benchmarks.on_gpu.table import Table
from passes.errors import PlanError
from runtime.distributed.launch import RankError, launch

SEQUENCE = {"tensor_parallel": {"sequence_parallel": True}}
BFLOAT16 = {"precision": {"parameters": "bfloat16"}}
COLUMNS = ("case", "loss", "gradients", "worst gradient", "parameters", "worst parameter")
ERRORS = (PlanError, RankError)
FAULT_SECONDS = 30.0  # of a rank's limit for exchanges, by far not to be reached


@dataclass(frozen=True)
class Case:
    """``scope``: of CUDA graphs, None for none."""

    size: int
    model: str
    mesh: dict[str, int]
    sections: dict[str, Any] = field(default_factory=dict)
    scope: tuple[str, ...] | None = None

    def spec(self, device: str) -> dict[str, Any]:
        if self.scope is None:
            return self.sections
        impl = "local" if device.startswith("cuda") else "emulate"
        return self.sections | {"cuda_graphs": {"impl": impl, "scope": list(self.scope), "warmup_steps": 1}}


def _zero(stage: int) -> dict[str, Any]:
    return {"optimizer": {"clip_grad_norm": 1.0, "lr": 1e-3, "zero": stage}}


def _schedule(name: str) -> dict[str, Any]:
    return {"pipeline": {"schedule": name}}


CASES = {
    "tp 2, sequence parallel": Case(2, "llama", {"tp": 2}, SEQUENCE),
    "dp 2, zero 1": Case(2, "gpt2", {"dp": 2}, _zero(1)),
    "dp 2, zero 2": Case(2, "gpt2", {"dp": 2}, _zero(2)),
    "dp 2, zero 3": Case(2, "gpt2", {"dp": 2}, _zero(3)),
    "pp 2, 1f1b": Case(2, "gpt2", {"pp": 2}, _schedule("1f1b")),
    "pp 2, interleaved": Case(2, "gpt2", {"pp": 2, "vpp": 2}, _schedule("interleaved_1f1b")),
    "pp 2, zero bubble": Case(2, "gpt2", {"pp": 2}, _schedule("zero_bubble")),
    "pp 2, zero bubble V": Case(2, "gpt2", {"pp": 2, "vpp": 2}, _schedule("zero_bubble_v")),
    "ep 2": Case(2, "mixtral", {"dp": 2, "ep": 2}),
    "cp 2": Case(2, "llama", {"cp": 2}, BFLOAT16),
    "tp 2, graphs of attention": Case(2, "llama", {"tp": 2}, SEQUENCE, ("attn",)),
    "tp 2, graphs of layers": Case(2, "llama", {"tp": 2}, SEQUENCE, ()),
    "tp 2, one graph": Case(2, "llama", {"tp": 2}, SEQUENCE, ("full_iteration",)),
    "pp 2, graphs of attention": Case(2, "gpt2", {"pp": 2}, {}, ("attn",)),
    "pp 2, graphs of layers": Case(2, "gpt2", {"pp": 2}, {}, ()),
    "pp 2, one graph": Case(2, "gpt2", {"pp": 2}, {}, ("full_iteration",)),
    "tp 2 dp 2, zero 3": Case(4, "llama", {"tp": 2, "dp": 2}, SEQUENCE | _zero(3)),
    "tp 2 pp 2, interleaved": Case(4, "llama", {"tp": 2, "pp": 2, "vpp": 2}, _schedule("interleaved_1f1b")),
    "pp 4, zero bubble": Case(4, "gpt2", {"pp": 4}, _schedule("zero_bubble")),
    "dp 4, ep 2": Case(4, "mixtral", {"dp": 4, "ep": 2}),
    "cp 2 dp 2": Case(4, "llama", {"cp": 2, "dp": 2}, BFLOAT16),
}
TINY = ("pp 2, interleaved", "cp 2")


def run(device: torch.device, *, tiny: bool = False) -> Iterator[Table]:
    exact_products()
    on_gpu = device.type == "cuda"
    table, over = collectives(2, "nccl" if on_gpu else "gloo", device)
    yield table
    if on_gpu and over == "gloo":
        yield collectives(2, "gloo", device)[0]
    for size in (2,) if tiny else (2, 4):
        if size == 4:
            yield collectives(4, over, device)[0]
        yield layouts([name for name, case in CASES.items() if case.size == size], over, device, tiny=tiny)
    yield fused(over, device, tiny=tiny)
    yield faults(over, device)
    yield communicators(over, device)


def collectives(size: int, over: str, device: torch.device) -> tuple[Table, str]:
    """Also how ranks can communicate: ``over``, or gloo if NCCL refuses."""
    table = Table(f"nccl: collectives of {size} ranks over {over}", ("collective", "values"))
    try:
        found = launch(ranks.collectives, size, over, str(device), timeout_seconds=ranks.LIMIT)[0]
    except ERRORS as refused:
        table.add("opening the group", _short(refused))
        table.failed.append("NCCL refuses ranks of one GPU: all else in this part runs over gloo on CUDA tensors")
        return table, "gloo"
    for name, told in found.items():
        table.add(name, told or "right")
        if told and (over == "nccl" or device.type == "cpu"):
            table.failed.append(f"{name}: {told}")
    return table, over


def layouts(names: list[str], over: str, device: torch.device, *, tiny: bool) -> Table:
    """Each case beside one process; of bfloat16 the error beside plain PyTorch's."""
    names = [name for name in names if name in TINY or not tiny]
    size = CASES[names[0]].size
    table = Table(f"nccl: {size} ranks over {over}", COLUMNS)
    truths: dict[str, Run] = {}
    for name, found in of_ranks(names, size, over, str(device)).items():
        case = CASES[name]
        if isinstance(found, str):
            table.add(name, found, *("-",) * 4)
            if not (over == "gloo" and "gloo" in found):  # without NCCL no pipeline shares a GPU
                table.failed.append(f"{name}: {found}")
        elif "precision" in case.sections:
            in_half(table, name, found, miniature(case.model), device)
        else:
            if case.model not in truths:
                truths[case.model] = steps(planned(miniature(case.model)), device)
            compare(table, name, found, truths[case.model])
    return table


def in_half(table: Table, name: str, found: Run, model: torch.nn.Module, device: torch.device) -> None:
    truth = plainly(model, batch(0), "cpu", torch.float64)
    ours, own = error(found.gradients, truth), error(plainly(model, batch(0), device, torch.bfloat16), truth)
    table.add(name, None, ours, f"plain bfloat16: {own:.4g}", None, None)
    hold(table, name, ours, own)


def of_ranks(names: list[str], size: int, over: str, device: str) -> dict[str, Run | str]:
    """The run of each case, or its error. After an error the cases behind it get new ranks."""
    found: dict[str, Run | str] = {}
    left = list(names)
    with tempfile.TemporaryDirectory() as folder:
        while left:
            cases = [(CASES[name].model, CASES[name].mesh, CASES[name].spec(device)) for name in left]
            files = [f"{folder}/{len(left)}-{number}.pt" for number in range(len(left))]
            limit, told = ranks.LIMIT + ranks.LIMIT_OF_CASE * len(left), "a rank ended"
            try:
                launch(ranks.cases, size, over, device, cases, files, timeout_seconds=limit)
            except ERRORS as broken:
                told = _short(broken)
            done = [file for file in files if Path(file).exists()]
            found |= {n: torch.load(f, weights_only=False) for n, f in zip(left[: len(done)], done, strict=True)}
            left = left[len(done) :]
            if left:
                found[left.pop(0)] = told
    return found


def fused(over: str, device: torch.device, *, tiny: bool) -> Table:
    table = Table("nccl: fused products of 2 ranks", ("product", "error", "own error", "ms fused", "ms separate"))
    try:
        found = launch(ranks.fused, 2, over, str(device), tiny, timeout_seconds=ranks.LIMIT)[0]
    except ERRORS as broken:  # no plan uses them yet: noted, and no failure
        table.add(_short(broken), *("-",) * 4)
        return table
    for name, (ours, own, *seconds) in found.items():
        table.add(name, ours, own, *(x * 1e3 for x in seconds))
        hold(table, name, ours, own)
    return table


def faults(over: str, device: torch.device) -> Table:
    table = Table("nccl: faults and saves", ("case", "outcome", "s"))
    start = time.perf_counter()
    try:
        launch(ranks.raising, 2, over, str(device), FAULT_SECONDS, timeout_seconds=ranks.LIMIT)
        told = "no error"
    except ERRORS as raised:
        told = _short(raised)
    table.add("rank 1 raises", told, time.perf_counter() - start)
    if ranks.FAULT not in told:
        table.failed.append(f"rank 1 raises: {told}")
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        try:
            wrong = launch(ranks.saving, 2, over, str(device), folder, timeout_seconds=ranks.LIMIT)[0]
        except ERRORS as raised:
            wrong = [_short(raised)]
    table.add("a save in the background", ", ".join(wrong) or "bitwise", time.perf_counter() - start)
    table.failed += [f"a save in the background: {name}" for name in wrong]
    return table


def communicators(over: str, device: torch.device) -> Table:
    table = Table("nccl: communicators of 2 ranks", ("kind", "MiB of a rank"))
    try:
        found = launch(ranks.communicators, 2, over, str(device), timeout_seconds=ranks.LIMIT)[0]
    except ERRORS as broken:
        table.add(_short(broken), None)
        return table
    for kind, num_bytes in found.items():
        table.add(kind, None if num_bytes is None else num_bytes / 2**20)
    return table


def _short(error: Exception) -> str:
    return " ".join(str(error).replace("|", "/").split())[:300]
