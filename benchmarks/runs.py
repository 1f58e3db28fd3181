"""The measured runs: each builds a ``step(i) -> loss`` for this process, with torch alone or with meshwright.

A run's name gives its kind: ``torch_*`` is hand-written torch, ``ours_*`` is a plan and an Engine.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.experts_model import build_experts
from benchmarks.model import BATCH, LAYERS, LEARNING_RATE, LENGTH, VOCABULARY, batch, build, cross_entropy

FOLDER = "BENCHMARK_FOLDER"  # of the plan and the weights of a run in SAVED
Step = Callable[[int], Tensor | float | None]
MICROBATCHES = 4


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE)


def plain_step(compute: Callable[[int], Tensor], optimizer: torch.optim.Optimizer) -> Step:
    def step(i: int) -> Tensor:
        loss = compute(i)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def torch_one_process(rank: int, size: int) -> Step:
    model = build()
    return plain_step(lambda i: model(*batch(i)), optimizer_of(model.parameters()))


def torch_tp2_by_hand(rank: int, size: int) -> Step:
    return _by_hand(rank, size)


def torch_tp2_by_hand_compiled(rank: int, size: int) -> Step:
    """Each layer through torch.compile, which breaks its graph at the exchanges."""
    return _by_hand(rank, size, compiled=True)


def _by_hand(rank: int, size: int, *, compiled: bool = False) -> Step:
    from benchmarks import tensor_parallel_by_hand as by_hand

    model = by_hand.parallelize(build(), rank, size)
    for layer in model.layers if compiled else ():
        layer.compile()
    return plain_step(lambda i: by_hand.loss(model, *batch(i), rank, size), optimizer_of(model.parameters()))


def torch_tp2_dtensor(rank: int, size: int) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

    mesh, model = init_device_mesh("cpu", (size,)), build()
    column = ("attention.query", "attention.key", "attention.value", "up")
    styles = {
        **{name: ColwiseParallel() for name in column},
        "attention.out": RowwiseParallel(),
        "down": RowwiseParallel(),
    }
    for layer in model.layers:
        parallelize_module(layer, mesh, styles)
    ends = {
        "embedding.token": RowwiseParallel(input_layouts=Replicate()),
        "head.linear": ColwiseParallel(use_local_output=False),
    }
    parallelize_module(model, mesh, ends)
    optimizer = optimizer_of(model.parameters())

    def step(i: int) -> Tensor:
        tokens, targets = batch(i)
        with loss_parallel():
            loss = cross_entropy(model(tokens), targets)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach().full_tensor()

    return step


def torch_dp2_zero(rank: int, size: int) -> Step:
    return _data_parallel(build(), rank, size)


def torch_experts_dp2_zero(rank: int, size: int) -> Step:
    """Every rank has every expert."""
    return _data_parallel(build_experts(), rank, size)


def _data_parallel(whole: nn.Module, rank: int, size: int) -> Step:
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(whole)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, lr=LEARNING_RATE, parameters_as_bucket_view=True
    )
    return _step_of_rank(model, optimizer, rank, size)


def _step_of_rank(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, size: int) -> Step:
    """On this rank's rows of the batch; the loss is the mean over ranks."""
    inner = plain_step(lambda i: model(*(x.chunk(size)[rank] for x in batch(i))), optimizer)

    def step(i: int) -> Tensor:
        loss = inner(i)
        assert isinstance(loss, Tensor)
        dist.all_reduce(loss)
        return loss / size

    return step


def torch_dp2_fsdp2(rank: int, size: int) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh, model = init_device_mesh("cpu", (size,)), build()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = optimizer_of(model.parameters())
    return _step_of_rank(model, optimizer, rank, size)


def torch_1f1b(rank: int, size: int) -> Step:
    """The layers cut evenly by hand."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    model, each = build(), LAYERS // size
    layers = list(model.layers)[rank * each : (rank + 1) * each]
    first, last = [model.embedding] * (rank == 0), [model.head] * (rank == size - 1)
    module = nn.Sequential(*first, *layers, *last)
    stage = PipelineStage(module, rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=cross_entropy)
    optimizer = optimizer_of(module.parameters())

    def step(i: int) -> Tensor | None:
        tokens, targets = batch(i)
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(tokens)
        elif rank < size - 1:
            schedule.step()
        else:
            schedule.step(target=targets, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean().detach() if losses else None

    return step


def ours(
    mesh: dict[str, int], micro: int, model: Callable[[], nn.Module] = build, **more: Any
) -> Callable[[int, int], Step]:
    """``more``: of the spec."""

    def make(rank: int, size: int) -> Step:
        from planner import plan
        from runtime import Engine

        engine = Engine(plan(model(), {**spec(mesh, micro), **more}))

        def step(i: int) -> float:
            tokens, targets = batch(i)
            return engine.train_step({"tokens": tokens, "targets": targets}).loss

        return step

    return make


def ours_saved(rank: int, size: int) -> Step:
    """The plan and the weights that ``prepare`` wrote: ranks load no planner."""
    from planner.frozen_plan import Plan
    from runtime import Engine

    folder = Path(os.environ[FOLDER])
    engine = Engine(Plan.load(folder / "plan.pt"))
    engine.load_pretrained(folder / "weights")

    def step(i: int) -> float:
        tokens, targets = batch(i)
        return engine.train_step({"tokens": tokens, "targets": targets}).loss

    return step


def prepare(mesh: dict[str, int], micro: int, folder: Path) -> None:
    """In a process of its own, before the ranks start."""
    from planner import plan
    from runtime import Engine

    with Engine(plan(build(), spec({}, micro))) as engine:
        engine.save_pretrained(folder / "weights")
    plan(build(), spec(mesh, micro)).save(folder / "plan.pt")


def sharded(zero: int) -> dict[str, Any]:
    """The spec's section of the optimizer with another ``zero``."""
    return {"optimizer": {**spec({}, 1)["optimizer"], "zero": zero}}


def spec(mesh: dict[str, int], micro: int) -> dict[str, Any]:
    return {
        "mesh": mesh,
        "batch": {"global": BATCH, "micro": micro},
        "inputs": {
            "tokens": {"shape": [LENGTH], "dtype": "int64", "high": VOCABULARY},
            "targets": {"like": "tokens"},
        },
        "optimizer": {
            "name": "adamw", "lr": LEARNING_RATE, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01,
            "zero": 1, "clip_grad_norm": None,
        },
    }  # fmt: skip


SAVED: dict[str, dict[str, int]] = {"ours_tp2_saved": {"tp": 2}}
RUNS: dict[str, tuple[int, Callable[[int, int], Step]]] = {
    "torch_one_process": (1, torch_one_process),
    "ours_one_process": (1, ours({}, BATCH)),
    "torch_tp2_by_hand": (2, torch_tp2_by_hand),
    "ours_tp2": (2, ours({"tp": 2, "pp": 1, "dp": 1}, BATCH)),
    "ours_tp2_saved": (2, ours_saved),
    "torch_tp2_by_hand_compiled": (2, torch_tp2_by_hand_compiled),
    "ours_tp2_compiled": (2, ours({"tp": 2, "pp": 1, "dp": 1}, BATCH, compile=True)),
    "torch_tp2_dtensor": (2, torch_tp2_dtensor),
    "torch_dp2_zero": (2, torch_dp2_zero),
    "ours_dp2_zero1": (2, ours({"tp": 1, "pp": 1, "dp": 2}, BATCH // 2)),
    "torch_dp2_fsdp2": (2, torch_dp2_fsdp2),
    "ours_dp2_zero2": (2, ours({"dp": 2}, BATCH // 2, **sharded(2))),
    "ours_dp2_zero3": (2, ours({"dp": 2}, BATCH // 2, **sharded(3))),
    "torch_pp2_1f1b": (2, torch_1f1b),
    "ours_pp2": (2, ours({"tp": 1, "pp": 2, "dp": 1}, BATCH // MICROBATCHES)),
    "ours_pp2_zero_bubble": (2, ours({"pp": 2}, BATCH // MICROBATCHES, pipeline={"schedule": "zero_bubble"})),
    "torch_pp4_1f1b": (4, torch_1f1b),
    "ours_pp4": (4, ours({"pp": 4}, BATCH // MICROBATCHES)),
    "ours_pp4_zero_bubble": (4, ours({"pp": 4}, BATCH // MICROBATCHES, pipeline={"schedule": "zero_bubble"})),
    "torch_experts_dp2_zero": (2, torch_experts_dp2_zero),
    "ours_experts_dp2": (2, ours({"dp": 2}, BATCH // 2, build_experts)),
    "ours_experts_ep2": (2, ours({"dp": 2, "ep": 2}, BATCH // 2, build_experts)),
}
