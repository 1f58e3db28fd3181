"""The functions that each rank of the part ``nccl`` runs; the results are rank 0's."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.on_gpu.equal import exact_products, steps
from benchmarks.on_gpu.models import batch, miniature, planned
from benchmarks.on_gpu.rounding import of_tensors
from passes.ops.axis import all_gather_single, reduce_scatter_single
from planner.mesh import Mesh
from planner.pipeline.links import Link
from runtime import Engine
from runtime.distributed.groups import Groups, Name
from runtime.distributed.opening import open_groups, options_of

LIMIT, LIMIT_OF_CASE, EXCHANGE_LIMIT = 120.0, 15.0, 60.0  # seconds
FAULT = "raised on purpose"
REPEATS = 20
# sockets, since the ranks' memory and the GPU's links would be looked for on other hosts
OWN_HOST = {"NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket", "NCCL_MNNVL_ENABLE": "0"}
SYMMETRIC = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}


def begin(over: str) -> int:
    """This rank, in an environment of its own: a host id for NCCL, or none so that the ranks use gloo."""
    exact_products()
    rank = os.environ["RANK"]
    os.environ.update(SYMMETRIC | (OWN_HOST | {"NCCL_HOSTID": f"rank{rank}"} if over == "nccl" else {}))
    return int(rank)


@contextmanager
def opened(over: str, device: str) -> Iterator[Groups]:
    begin(over)
    groups = open_groups(Mesh(dp=int(os.environ["WORLD_SIZE"])), {}, (), device=device, timeout_seconds=EXCHANGE_LIMIT)
    yield groups
    groups.close()


def collectives(over: str, device: str) -> dict[str, str]:
    """Name → its error; empty if all values are right."""
    with opened(over, device) as groups:
        rank, size, world = groups.rank, groups.mesh.world_size, groups.world
        assert groups.backend == over, f"the ranks agreed on {groups.backend}"
        own = torch.arange(size, device=device) + 10.0 * rank  # of rank 1: 10, 11, …
        every = torch.arange(size, device=device) + 10.0 * torch.arange(size, device=device)[:, None]
        one, all_of = torch.empty(1, device=device), torch.empty(size * size, device=device)
        summed, swapped = own.clone(), torch.empty_like(own)

        def neighbours() -> Tensor:
            came = torch.empty_like(own)
            to, source = (rank + 1) % size, (rank - 1) % size
            work = [dist.P2POp(dist.isend, own, to, world), dist.P2POp(dist.irecv, came, source, world)]
            for each in dist.batch_isend_irecv(work):
                each.wait()
            return came

        calls: dict[str, tuple[Callable[[], Any], Tensor, Tensor]] = {
            "all_reduce": (lambda: dist.all_reduce(summed, group=world), summed, every.sum(0)),
            "all_gather": (lambda: all_gather_single(all_of, own, group=world), all_of, every.flatten()),
            "reduce_scatter": (lambda: reduce_scatter_single(one, own, group=world), one, every.sum(0)[rank, None]),
            "all_to_all": (lambda: dist.all_to_all_single(swapped, own, group=world), swapped, every[:, rank]),
        }
        found = {name: _checked(*call) for name, call in calls.items()}
        came = torch.empty_like(own)
        return found | {
            "send and receive": _checked(lambda: came.copy_(neighbours()), came, every[(rank - 1) % size]),
        }


def _checked(call: Callable[[], Any], result: Tensor, wanted: Tensor) -> str:
    try:
        call()
        return "" if torch.equal(result, wanted) else f"{result.tolist()}, not {wanted.tolist()}"
    except (RuntimeError, ValueError, NotImplementedError) as error:  # as gloo refuses tensors of a GPU
        return str(error).splitlines()[0][:120]


def cases(over: str, device: str, given: list[tuple[str, dict[str, int], dict[str, Any]]], files: list[str]) -> None:
    """Each case writes its file as it ends."""
    rank = begin(over)
    for (model, mesh, sections), file in zip(given, files, strict=True):
        start = time.perf_counter()
        found = steps(planned(miniature(model), mesh, **sections), device, timeout_seconds=EXCHANGE_LIMIT)
        if rank == 0:
            print(f"{mesh} {sections}: {time.perf_counter() - start:.1f} s", flush=True)
            torch.save(found, f"{file}.part")
            os.replace(f"{file}.part", file)


def fused(over: str, device: str, tiny: bool) -> dict[str, tuple[float, float, float, float]]:
    """Product → error beside float64, that of the separate calls, and seconds of both."""
    import torch.distributed._symmetric_memory as symmetric

    rows, inner, columns = (32, 16, 24) if tiny else (8192, 4096, 4096)
    on_gpu = device.startswith("cuda")
    with opened(over, device) as groups:
        world: Any = groups.world
        size, dtype = groups.mesh.world_size, torch.bfloat16
        draw = torch.Generator().manual_seed(groups.rank)
        x = torch.randn(rows, inner, generator=draw).to(device, dtype)
        w = torch.randn(inner, columns, generator=draw).to(device, dtype) / inner**0.5
        own = x.chunk(size)[groups.rank].contiguous()
        if on_gpu:
            gather = torch.ops.symm_mem.fused_all_gather_matmul.default
            scatter = torch.ops.symm_mem.fused_matmul_reduce_scatter.default
        else:  # without symmetric memory: torch's own separate calls
            gather = symmetric._fused_all_gather_matmul_fallback
            scatter = symmetric._fused_matmul_reduce_scatter_fallback

        def gathered(x: Tensor, w: Tensor) -> Tensor:
            whole = x.new_empty(size * len(x), x.shape[1])
            all_gather_single(whole.view(-1), x.view(-1), group=world)
            return whole @ w

        def scattered(x: Tensor, w: Tensor) -> Tensor:
            y = x @ w
            part = y.new_empty(len(y) // size, y.shape[1])
            reduce_scatter_single(part.view(-1), y.view(-1), group=world)
            return part

        name = world.group_name
        both = {
            "gather, product": (lambda: gather(own, [w], 0, name)[1][0], lambda: gathered(own, w), gathered, own),
            "product, scatter": (lambda: scatter(x, w, "sum", 0, name), lambda: scattered(x, w), scattered, x),
        }
        found = {}
        for what, (ours, separate, truth_of, operand) in both.items():
            truth = truth_of(operand.double(), w.double())
            errors = [of_tensors([call()], [truth]) for call in (ours, separate)]
            found[what] = (*errors, *(_seconds(call, on_gpu) for call in (ours, separate)))
        return found


def _seconds(call: Callable[[], Tensor], on_gpu: bool) -> float:
    repeats, start = REPEATS if on_gpu else 1, 0.0
    for _ in range(2):
        if on_gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        if on_gpu:
            torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats


def raising(over: str, device: str, limit: float) -> None:
    """Rank 1 raises between steps; the other waits for it in the next."""
    rank = begin(over)
    with Engine(planned(miniature("gpt2", 2), {"dp": 2}), device=device, timeout_seconds=limit) as engine:
        engine.train_step(batch(0))
        if rank == 1:
            raise ValueError(FAULT)
        engine.train_step(batch(1))


def saving(over: str, device: str, folder: str) -> list[str]:
    """A save beside the next step, and a second engine that continues it: the parameters that differ."""
    begin(over)
    decided = planned(miniature("gpt2", 2), {"dp": 2})
    with Engine(decided, device=device, timeout_seconds=EXCHANGE_LIMIT) as engine:
        engine.train_step(batch(0))
        engine.save(folder, wait=False)
        engine.train_step(batch(1))
        engine.wait_saves()
        wanted = engine.gather_parameters()
    with Engine(planned(miniature("gpt2", 2), {"dp": 2}), device=device, timeout_seconds=EXCHANGE_LIMIT) as engine:
        engine.load(folder)
        engine.train_step(batch(1))
        found = engine.gather_parameters()
    return [name for name, x in wanted.items() if not torch.equal(x, found[name])]


def communicators(over: str, device: str) -> dict[str, float | None]:
    """Kind → bytes of a rank: that the free memory of the GPU shrinks by, as ranks make one and use it once."""
    with opened(over, device) as groups:
        size, on_gpu = groups.mesh.world_size, device.startswith("cuda")

        def free() -> int:
            torch.cuda.synchronize()
            groups.barrier()
            num_bytes = torch.cuda.mem_get_info()[0]
            groups.barrier()
            return num_bytes

        kinds: dict[str, Name] = {"link": Link(0, 1, "F"), "tp, cp, ep": "tp", "dp": "dp"}
        found: dict[str, float | None] = {}
        for kind, name in kinds.items():
            before = free() if on_gpu else 0
            options = options_of(groups.backend, name)
            group: Any = dist.new_group(backend=groups.backend, pg_options=options)
            groups.made.append(group)
            dist.all_reduce(torch.ones(1 << 20, device=device), group=group)
            found[kind] = (before - free()) / size if on_gpu else None
        return found
