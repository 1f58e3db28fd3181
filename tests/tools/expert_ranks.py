"""What each of the four gloo ranks of test_expert_steps.py runs: steps of ZeRO-1 where experts have axes of their own.

Gradients are made up: of each element a rank has what its own microbatches and rows give, so that whole gradients are
the sums that the plan asks for, and no others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from passes.moe.layers import ExpertPart
from passes.parameters import LocalParameter
from passes.types.types import I, Placement, R, Segment, V
from planner.mesh import Mesh
from planner.sharding.boxes import Part, part_of
from planner.sharding.buffers import buffers_of_rank
from planner.spec.optimizer import OptimizerSpec
from runtime.distributed.opening import open_groups
from runtime.fuzz.forks import StoreHost
from runtime.optimizer.zero1 import DistributedOptimizer
from runtime.weights.shards import shard
from tests.tools.limits import HANG_SECONDS

WORLD, STEPS, EXPERTS = 4, 3, 4
MESHES = {
    "tp2 dp2, ep2": Mesh(tp=2, dp=2, ep=2, etp=1),
    "dp4, ep2": Mesh(dp=4, ep=2),
    "dp4, etp2": Mesh(dp=4, etp=2),
    "tp2 dp2, etp1": Mesh(tp=2, dp=2, etp=1),
    "dp4, ep2 etp2": Mesh(dp=4, ep=2, etp=2),
    "dp4, ep4": Mesh(dp=4, ep=4),
}
CASES = [(name, zero, size) for name in MESHES for zero in (0, 1) for size in (None, 12)]
FORGOTTEN = {"edp": "dp4, ep2", "etp": "dp4, etp2"}  # the axis over which nothing is summed, on which mesh
FUSED = Placement("V", 2, (Segment(4), Segment(2, sharded=False)))

# name → its placement over its axis, what it is to experts, its global shape
PARAMETERS: dict[str, tuple[Placement, ExpertPart | None, tuple[int, ...]]] = {
    "norm": (I, None, (5,)),
    "scale": (R, None, (3,)),
    "dense": (V(0, 4), None, (4, 3)),
    "stack": (V(2, 6), ExpertPart(EXPERTS, 0), (EXPERTS, 3, 6)),
    "inner": (V(0, 4), ExpertPart(EXPERTS, 1), (4, EXPERTS, 3)),
    "bias": (R, ExpertPart(EXPERTS, 0), (EXPERTS, 3)),
    "same": (I, ExpertPart(EXPERTS, 0), (EXPERTS, 2)),
    "fused": (FUSED, ExpertPart(EXPERTS, 0), (EXPERTS, 2, 6)),
    **{f"alone{e}": (V(0, 4), ExpertPart(EXPERTS, number=e), (4, 2)) for e in range(EXPERTS)},
}


def local_parameters(mesh: Mesh, place: Mapping[str, int]) -> list[LocalParameter]:
    """What the rank at ``place`` holds, in the model's order."""
    experts = {name: expert for name, (_, expert, _) in PARAMETERS.items()}
    held = [name for name, expert in experts.items() if expert is None or expert.is_held(mesh.ep, place["ep"])]
    return [_local(name, mesh, place) for name in held]


def _local(name: str, mesh: Mesh, place: Mapping[str, int]) -> LocalParameter:
    placement, expert, shape = PARAMETERS[name]
    axis = "tp" if expert is None else "etp"
    part = Part(placement, mesh.size(axis), place[axis], expert, mesh.ep, place["ep"])
    partial = mesh.size(axis) > 1 and (placement.kind == "R" or placement.has_whole_segment)
    counted = placement.is_sharded or place[axis] == 0
    given: dict[str, Any] = {"partial_over": (axis,) if partial else (), "counted": counted, "expert": expert}
    return LocalParameter(name, part.local_shape(shape), torch.float64, placement, shape, **given)


def start(name: str) -> Tensor:
    return _random(PARAMETERS[name][2], sum(map(ord, name)))


def gradient(local: LocalParameter, mesh: Mesh, place: Mapping[str, int], step: int) -> Tensor:
    """What the rank computes: its own, but of a copy that all ranks of an axis compute alike."""
    placement, _, shape = PARAMETERS[local.fqn]
    seed = 1000 * step + 100 * place[local.reduced_over] + sum(map(ord, local.fqn))
    full = _random(shape, seed + 10 * (0 if placement.kind == "I" else 1 + place[local.axis]))
    return shard(full, part_of(local, mesh, place))


def _random(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def settings(zero: int, bucket_size: int | None) -> OptimizerSpec:
    given = {"zero": zero, "bucket_size": bucket_size, "alignment": "none"}
    return OptimizerSpec(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, clip_grad_norm=0.7, **given)


def on_ranks(host: StoreHost) -> list[dict[Any, list[dict[str, Any]]]]:
    return host.run_ranks(WORLD, run_cases)


def run_cases() -> dict[Any, list[dict[str, Any]]]:
    """Every case on this rank, in one order."""
    found: dict[Any, list[dict[str, Any]]] = {}
    for name, mesh in MESHES.items():
        groups = open_groups(mesh, {}, [], timeout_seconds=HANG_SECONDS)
        axes = {axis: groups.over(axis) for axis in ("dp", "edp", "tp", "etp", "world")}
        for _, zero, size in [case for case in CASES if case[0] == name]:
            found[name, zero, size] = list(_steps(mesh, groups.place, settings(zero, size), axes))
        for axis in [axis for axis, on in FORGOTTEN.items() if on == name]:
            found[axis] = list(_steps(mesh, groups.place, settings(1, None), axes, forgotten=axis))
        groups.close()
    return found


def _steps(
    mesh: Mesh, place: Mapping[str, int], options: OptimizerSpec, axes: Mapping[str, Any], forgotten: str = ""
) -> Iterator[dict[str, Any]]:
    locals_ = [
        replace(p, partial_over=tuple(axis for axis in p.partial_over if axis != forgotten))
        for p in local_parameters(mesh, place)
    ]
    axes = axes if forgotten != "edp" else {**axes, "edp": None}
    parameters = [(p, nn.Parameter(shard(start(p.fqn), part_of(p, mesh, place)).clone())) for p in locals_]
    sizes = {axis: dist.get_world_size(axes[axis]) if axes[axis] is not None else 1 for axis in ("dp", "edp")}
    planned = buffers_of_rank(0, locals_, options, sizes)
    optimizer = DistributedOptimizer(parameters, planned, options, groups=axes)
    for step in range(STEPS):
        optimizer.begin_step()
        optimizer.wait_parameters()
        optimizer.buffers.last_microbatch = True
        torch.stack([(p * gradient(local, mesh, place, step)).sum() for local, p in parameters]).sum().backward()
        launches = [planned[b].reduced_over for b, _ in optimizer.buffers.launches]
        optimizer.reduce_gradients()
        gradients = optimizer.gather_gradients()
        norm = float(optimizer.step(1e-2 / (step + 1)).figures[0])
        optimizer.wait_parameters()
        yield {
            "gradients": gradients,
            "norm": norm,
            "parameters": {local.fqn: p.detach().clone() for local, p in parameters},
            "launches": launches,
            "shards": [(b.reduced_over, b.layout.num_ranks) for b in planned],
        }
