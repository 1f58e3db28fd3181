"""Lower a plan for every rank of a mesh without pipeline, run them as threads, one microbatch a dp rank, and hold loss
and gradients against the model alone. Gradients are added up here as the plan says that they are to be.

The model is built twice by the same function and seed: what is planned and what is compared with share nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from passes.base import RankProgram
from passes.parameters import LocalParameter
from planner import Plan
from planner.lower import lower
from planner.mesh import Mesh
from runtime.optimizer.main_shards import whole_elements
from runtime.weights.shards import fill, senders_of
from runtime.weights.sources import ModelWeights
from tests.tools.captures import plan_again
from tests.tools.shards import assemble
from tests.tools.simulated_ranks import on_threads

Batch = dict[str, Tensor]
CPU = torch.device("cpu")
AXES = {
    "tp": ("dense", "tp"),
    "cp": ("dense", "cp"),
    "dp": ("dense", "dp"),
    "dp-cp": ("dense", "dp-cp"),
    "etp": ("expert", "tp"),
    "ep": ("expert", "ep"),
}


@dataclass
class Ran:
    """What the ranks found: loss and whole gradients, and of each rank its program."""

    plan: Plan
    loss: Tensor
    gradients: dict[str, Tensor]
    programs: list[RankProgram]


def spec_of(batch: Batch, mesh: Mapping[str, int], **more: Any) -> dict[str, Any]:
    """``batch`` is the global one, of one microbatch for each dp rank."""
    rows = len(next(iter(batch.values())))
    inputs = {n: {"shape": list(x.shape[1:]), "dtype": str(x.dtype).removeprefix("torch.")} for n, x in batch.items()}
    return {
        "mesh": dict(mesh),
        "batch": {"global": rows, "micro": rows // mesh.get("dp", 1)},
        "inputs": inputs,
        "tensor_parallel": {"vocabulary_multiple": 8},
    } | more


def run_mesh(
    make: Callable[[], nn.Module],
    batch: Batch,
    mesh: Mapping[str, int],
    *,
    change: Callable[[RankProgram], None] = lambda _: None,
    device: torch.device = CPU,
    **more: Any,
) -> Ran:
    """``change``: what is done to each rank's program before it runs. All ranks compute on ``device``."""
    model, spec = make(), spec_of(batch, mesh, **more)
    made = plan_again(model, spec)
    ranks = range(made.mesh.world_size)
    # Ops are tried at the shapes of the first and of the last rank: between them only places differ, not sizes.
    programs = [lower(made, rank, device, thorough=rank in (ranks[0], ranks[-1])) for rank in ranks]
    for rank, program in enumerate(programs):
        fill(program.stages, ModelWeights(model), made.mesh, made.mesh.place(rank), device)
        change(program)
    shares = {n: x.to(device).chunk(made.mesh.dp) for n, x in batch.items()}
    totals = totals_of(programs[0], shares, made.mesh.dp)

    def run(rank: int) -> tuple[Tensor, dict[str, Tensor]]:
        bind(programs[rank], made.mesh, rank)
        programs[rank].load.begin(device)
        programs[rank].random.begin(0, made.mesh.place(rank)["dp"])  # a microbatch each
        return run_step(programs[rank], {n: x[made.mesh.place(rank)["dp"]] for n, x in shares.items()}, totals)

    ran = [to_cpu(found) for found in on_threads(made.mesh.world_size, run)]
    loss = torch.stack([ran[rank][0] for rank in ranks if made.mesh.place(rank)["tp"] == 0]).sum()
    return Ran(made, loss, _whole(made, programs, [found for _, found in ran]), programs)


def to_cpu(found: tuple[Tensor, dict[str, Tensor]]) -> tuple[Tensor, dict[str, Tensor]]:
    loss, gradients = found
    return loss.cpu(), {name: x.cpu() for name, x in gradients.items()}


def totals_of(program: RankProgram, shares: Mapping[str, tuple[Tensor, ...]], dp: int) -> list[Tensor]:
    module = program.count_module
    if module is None:
        return []
    counts = [module(*(shares[n][i] for n in program.count_inputs)) for i in range(dp)]
    return [torch.stack([torch.as_tensor(c) for c in column]).sum() for column in zip(*counts, strict=True)]


def bind(program: RankProgram, mesh: Mesh, rank: int) -> None:
    """The same groups on every thread, each made by all, in one order."""
    for name, (kind, token) in AXES.items():
        for ranks in getattr(mesh, kind).groups(token):
            group = dist.new_group(ranks)
            if rank in ranks and name in program.axes:
                program.axes[name].group = group


def run_step(program: RankProgram, batch: Batch, totals: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of one microbatch on a rank without pipeline."""
    (stage,) = program.stages
    given = [batch[name] for name in stage.inputs] + [totals[i].double() for i in stage.denominators]
    *_, loss = stage.module(*given)
    loss.backward()
    found = {}
    for p in stage.parameters:
        leaf = stage.parameter(p.fqn)
        found[p.fqn] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    dist.barrier()
    return loss.detach(), found


def _whole(made: Plan, programs: list[RankProgram], grads: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    held: dict[str, dict[int, LocalParameter]] = {}
    for rank, program in enumerate(programs):
        for p in program.stages[0].parameters:
            held.setdefault(p.fqn, {})[rank] = p
    found = {}
    for row in made.parameters:
        if row.name in held:
            senders = senders_of(row, made.mesh)
            sums = [_summed(made.mesh, held[row.name], grads, row.name, rank) for rank in senders]
            found[row.name] = assemble(list(senders.values()), sums, row.shape)
    return found


def _summed(
    mesh: Mesh, held: Mapping[int, LocalParameter], grads: list[dict[str, Tensor]], name: str, rank: int
) -> Tensor:
    """Over the ranks that run other microbatches, and those with partial gradients, as the parameter says."""
    local, here = held[rank], mesh.place(rank)
    own = ("tp", "cp", "dp") if local.expert is None else ("etp", "ep", "edp")
    free = {*local.reduced_over.split("-"), *(a for a in local.partial_over if a in own)}
    fixed = [axis for axis in own if axis not in free]
    sharers = [r for r in held if all(mesh.place(r)[a] == here[a] for a in fixed)]
    summed = torch.stack([grads[r][name] for r in sharers]).sum(0)
    if not local.has_whole_segment:
        return summed
    same = [grads[r][name] for r in sharers if mesh.place(r)[local.axis] == here[local.axis]]
    mask = whole_elements(local, mesh.size(local.axis)).view(local.shape)
    return torch.where(mask, summed, torch.stack(same).sum(0))  # what is cut beside them is this rank's own


def counted(program: RankProgram) -> Counter[tuple[str, str, str]]:
    """(axis, kind, phase) → how often, of what a rank exchanged."""
    return Counter({(axis.name, *key): n for axis in program.axes.values() for key, n in axis.counts.items() if n})
