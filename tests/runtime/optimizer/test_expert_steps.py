"""Steps over tp and dp, with axes of experts, on four gloo ranks, against torch's AdamW and clipping in one process:
parameters that are sharded, partial, fused or tied sum and count once.

Gradients are made up: of each element a rank has what its own microbatches and rows give, so that whole gradients are
the sums that the plan asks for, and no others.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from passes.moe.layers import ExpertPart
from passes.parameters import LocalParameter
from passes.types.types import I, Placement, R, Segment, V
from planner.mesh import Mesh
from planner.sharding.boxes import Part, part_of
from planner.sharding.buffers import BufferOptions, buffers_of_rank
from planner.spec.optimizer import OptimizerSpec
from runtime.distributed.opening import open_groups
from runtime.fuzz.forks import StoreHost
from runtime.optimizer.zero1 import DistributedOptimizer
from runtime.weights.shards import shard
from tests.tools.laboratory import session_lab
from tests.tools.limits import HANG_SECONDS
from tests.tools.ranks import Ranks

WORLD, STEPS, EXPERTS = 4, 3, 4
MESHES = {
    "tp2 dp2, ep2": Mesh(tp=2, dp=2, ep=2, etp=1),
    "dp4, ep2": Mesh(dp=4, ep=2),
    "dp4, etp2": Mesh(dp=4, etp=2),
    "tp2 dp2, etp1": Mesh(tp=2, dp=2, etp=1),
    "dp4, ep2 etp2": Mesh(dp=4, ep=2, etp=2),
    "dp4, ep4": Mesh(dp=4, ep=4),
}
CASES = [(name, zero, size, "none") for name in MESHES for zero in (0, 1) for size in (None, 12)]
CASES += [("tp2 dp2, etp1", zero, size, "nccl") for zero in (0, 1) for size in (None, 12)]
FORGOTTEN = {"edp": "dp4, ep2", "etp": "dp4, etp2"}  # the axis over which nothing is summed, on which mesh
FUSED = Placement("V", 2, (Segment(4), Segment(2, sharded=False)))
TIED = "tied"  # its copies are on ranks of tp, which stand for two stages

# name → its placement over its axis, what it is to experts, its global shape
PARAMETERS: dict[str, tuple[Placement, ExpertPart | None, tuple[int, ...]]] = {
    "norm": (I, None, (5,)),
    "scale": (R, None, (3,)),
    "dense": (V(0, 4), None, (4, 3)),
    "fused rows": (FUSED.moved(0), None, (6, 3)),
    "fused columns": (FUSED.moved(1), None, (3, 6)),
    TIED: (I, None, (3, 3)),
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
    if name == TIED and mesh.tp > 1:
        given |= {"partial_over": ("embedding",), "tied_stages": (0, 1)}
    return LocalParameter(name, part.local_shape(shape), torch.float64, placement, shape, **given)


def start(name: str) -> Tensor:
    return _random(PARAMETERS[name][2], sum(map(ord, name)))


def gradient(local: LocalParameter, mesh: Mesh, place: Mapping[str, int], step: int) -> Tensor:
    """What the rank computes: its own, but of a copy that all ranks of an axis compute alike."""
    _, _, shape = PARAMETERS[local.fqn]
    seed = 1000 * step + 100 * place[local.reduced_over] + sum(map(ord, local.fqn))
    full = _random(shape, seed + 10 * (0 if is_alike(local) else 1 + place[local.axis]))
    return shard(full, part_of(local, mesh, place))


def is_alike(local: LocalParameter) -> bool:
    """Whether all ranks of its axis compute the same gradient."""
    return local.placement.kind == "I" and local.fqn != TIED


def _random(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def settings(zero: int, bucket_size: int | None, alignment: str = "none") -> OptimizerSpec:
    given = {"zero": zero, "bucket_size": bucket_size, "alignment": alignment}
    return OptimizerSpec(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, clip_grad_norm=0.7, **given)


def on_ranks(host: StoreHost) -> list[dict[Any, list[dict[str, Any]]]]:
    return Ranks(WORLD, "forks", host).run(run_cases)


def run_cases() -> dict[Any, list[dict[str, Any]]]:
    """Every case on this rank, in one order."""
    found: dict[Any, list[dict[str, Any]]] = {}
    for name, mesh in MESHES.items():
        groups = open_groups(mesh, {}, [], timeout_seconds=HANG_SECONDS)
        axes = {axis: groups.over(axis) for axis in ("dp", "edp", "tp", "etp", "world")}
        axes |= {(0, 1): groups.over("tp")}
        for case in [case for case in CASES if case[0] == name]:
            found[case] = list(_steps(mesh, groups.place, settings(*case[1:]), axes))
        for axis in [axis for axis, on in FORGOTTEN.items() if on == name]:
            found[axis] = list(_steps(mesh, groups.place, settings(1, None), axes, forgotten=axis))
        groups.close()
    return found


def _steps(
    mesh: Mesh, place: Mapping[str, int], options: OptimizerSpec, axes: Mapping[Any, Any], forgotten: str = ""
) -> Iterator[dict[str, Any]]:
    locals_ = [
        replace(p, partial_over=tuple(axis for axis in p.partial_over if axis != forgotten))
        for p in local_parameters(mesh, place)
    ]
    axes = axes if forgotten != "edp" else {**axes, "edp": None}
    parameters = [(p, nn.Parameter(shard(start(p.fqn), part_of(p, mesh, place)).clone())) for p in locals_]
    sizes = {axis: dist.get_world_size(axes[axis]) if axes[axis] is not None else 1 for axis in ("dp", "edp")}
    planned = buffers_of_rank(0, locals_, BufferOptions(options, sizes))
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


pytestmark = pytest.mark.slow
PLACES = {name: [mesh.place(rank) for rank in range(WORLD)] for name, mesh in MESHES.items()}


def name_of(case: tuple[str, int, int | None, str]) -> str:
    on, zero, bucket_size, alignment = case
    aligned = "" if alignment == "none" else f", {alignment}"
    return f"{on}, zero {zero}, {'small buckets' if bucket_size else 'one bucket'}{aligned}"


@pytest.fixture(scope="module")
def results() -> list[dict[Any, list[dict[str, Any]]]]:
    """results[rank][case][step] of four forks."""
    return session_lab().call(on_ranks)


def whole_gradient(on: str, name: str, step: int) -> Tensor:
    """Each rank's part in its place, once for each set of ranks that compute alike."""
    mesh, total = MESHES[on], torch.zeros(PARAMETERS[name][2], dtype=torch.float64)
    seen = set()
    for place in PLACES[on]:
        local = next((p for p in local_parameters(mesh, place) if p.fqn == name), None)
        if local is None:
            continue
        part = part_of(local, mesh, place)
        stack = local.expert is not None and local.expert.dim >= 0
        at = (place[local.reduced_over], None if is_alike(local) else place[local.axis], place["ep"] if stack else None)
        if at in seen:
            continue
        seen.add(at)
        ranges, given = part.ranges, gradient(local, mesh, place, step)
        indices = torch.arange(total.numel()).view(total.shape)
        total.view(-1).index_add_(0, shard(indices, part).flatten(), given.flatten())
        assert bool(ranges) or given.shape == total.shape
    return total


def one_process(on: str) -> list[tuple[dict[str, Tensor], float, dict[str, Tensor]]]:
    mains = {name: start(name) for name in PARAMETERS}
    optimizer = torch.optim.AdamW(mains.values(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    steps = []
    for step in range(STEPS):
        for name, main in mains.items():
            main.grad = whole_gradient(on, name, step)
        gradients = {name: main.grad.clone() for name, main in mains.items() if main.grad is not None}
        norm = nn.utils.clip_grad_norm_(mains.values(), 0.7).item()
        optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
        optimizer.step()
        steps.append((gradients, norm, {name: main.clone() for name, main in mains.items()}))
    return steps


def differences(on: str, found: list[list[dict[str, Any]]]) -> list[str]:
    """What of any rank's steps is not as in one process."""
    mesh, wrong = MESHES[on], []
    for step, (gradients, norm, parameters) in enumerate(one_process(on)):
        for rank, place in enumerate(PLACES[on]):
            actual = found[rank][step]
            if actual["norm"] != pytest.approx(norm, rel=1e-12):
                wrong.append(f"norm of step {step}")
            for local in local_parameters(mesh, place):
                part = part_of(local, mesh, place)
                for kind, whole in (("gradients", gradients), ("parameters", parameters)):
                    mine = shard(whole[local.fqn], part)
                    if not torch.allclose(actual[kind][local.fqn], mine, rtol=1e-11, atol=1e-12):
                        wrong.append(f"{kind} of {local.fqn}, step {step}, rank {rank}")
    return wrong


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_every_rank_equals_one_process(results, case):
    """Buckets start in one order on all ranks, and a buffer has a shard for each rank that shares it."""
    assert differences(case[0], [of_rank[case] for of_rank in results]) == []
    first, *others = (of_rank[case][step]["launches"] for of_rank in results for step in range(STEPS))
    assert all(launches == first for launches in others)
    assert set(first) == {"dp", "edp"}
    mesh, zero = MESHES[case[0]], case[1]
    for over, num_shards in results[0][case][0]["shards"]:
        assert num_shards == (mesh.size(over) if zero else 1)


@pytest.mark.parametrize(("axis", "on"), FORGOTTEN.items())
def test_a_sum_left_out_is_seen(results, axis, on):
    wrong = differences(on, [of_rank[axis] for of_rank in results])
    of_experts = {"edp": "gradients of stack, step 0, rank 0", "etp": "gradients of bias, step 0, rank 0"}[axis]
    assert of_experts in wrong
    assert "norm of step 0" in wrong
    assert not [w for w in wrong if w.startswith("gradients of norm")], "what is not of experts is as it was"
