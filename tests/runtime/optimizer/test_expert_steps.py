"""Steps of experts with axes of their own, on four gloo ranks, against torch's AdamW and clipping in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from planner.sharding.boxes import part_of
from runtime.weights.shards import shard
from tests.tools import expert_ranks as ranks
from tests.tools.laboratory import session_lab

pytestmark = pytest.mark.slow
PLACES = {name: [mesh.place(rank) for rank in range(ranks.WORLD)] for name, mesh in ranks.MESHES.items()}


def name_of(case: tuple[str, int, int | None]) -> str:
    on, zero, bucket_size = case
    return f"{on}, zero {zero}, {'small buckets' if bucket_size else 'one bucket'}"


@pytest.fixture(scope="module")
def results() -> list[dict[Any, list[dict[str, Any]]]]:
    """results[rank][case][step] of four forks."""
    return session_lab().call(ranks.on_ranks)


def whole_gradient(on: str, name: str, step: int) -> Tensor:
    """Each rank's part in its place, once for each set of ranks that compute alike."""
    mesh, total = ranks.MESHES[on], torch.zeros(ranks.PARAMETERS[name][2], dtype=torch.float64)
    seen = set()
    for place in PLACES[on]:
        local = next((p for p in ranks.local_parameters(mesh, place) if p.fqn == name), None)
        if local is None:
            continue
        part = part_of(local, mesh, place)
        alike = local.placement.kind == "I"
        stack = local.expert is not None and local.expert.dim >= 0
        at = (place[local.reduced_over], None if alike else place[local.axis], place["ep"] if stack else None)
        if at in seen:
            continue
        seen.add(at)
        ranges, given = part.ranges, ranks.gradient(local, mesh, place, step)
        indices = torch.arange(total.numel()).view(total.shape)
        total.view(-1).index_add_(0, shard(indices, part).flatten(), given.flatten())
        assert bool(ranges) or given.shape == total.shape
    return total


def one_process(on: str) -> list[tuple[dict[str, Tensor], float, dict[str, Tensor]]]:
    mains = {name: ranks.start(name) for name in ranks.PARAMETERS}
    optimizer = torch.optim.AdamW(mains.values(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    steps = []
    for step in range(ranks.STEPS):
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
    mesh, wrong = ranks.MESHES[on], []
    for step, (gradients, norm, parameters) in enumerate(one_process(on)):
        for rank, place in enumerate(PLACES[on]):
            actual = found[rank][step]
            if actual["norm"] != pytest.approx(norm, rel=1e-12):
                wrong.append(f"norm of step {step}")
            for local in ranks.local_parameters(mesh, place):
                part = part_of(local, mesh, place)
                for kind, whole in (("gradients", gradients), ("parameters", parameters)):
                    mine = shard(whole[local.fqn], part)
                    if not torch.allclose(actual[kind][local.fqn], mine, rtol=1e-11, atol=1e-12):
                        wrong.append(f"{kind} of {local.fqn}, step {step}, rank {rank}")
    return wrong


@pytest.mark.sampled(8)
@pytest.mark.parametrize("case", ranks.CASES, ids=name_of)
def test_every_rank_equals_one_process(results, case):
    assert differences(case[0], [of_rank[case] for of_rank in results]) == []


@pytest.mark.parametrize(("axis", "on"), ranks.FORGOTTEN.items())
def test_a_sum_left_out_is_seen(results, axis, on):
    wrong = differences(on, [of_rank[axis] for of_rank in results])
    of_experts = {"edp": "gradients of stack, step 0, rank 0", "etp": "gradients of bias, step 0, rank 0"}[axis]
    assert of_experts in wrong
    assert "norm of step 0" in wrong
    assert not [w for w in wrong if w.startswith("gradients of norm")], "what is not of experts is as it was"


@pytest.mark.parametrize("case", ranks.CASES, ids=name_of)
def test_buckets_start_in_one_order_on_all_ranks(results, case):
    of_ranks = [of_rank[case][step]["launches"] for of_rank in results for step in range(ranks.STEPS)]
    assert all(launches == of_ranks[0] for launches in of_ranks)
    assert {"dp", "edp"} == set(of_ranks[0])


@pytest.mark.parametrize("case", ranks.CASES, ids=name_of)
def test_a_buffer_has_a_shard_for_each_rank_that_shares_it(results, case):
    mesh, zero = ranks.MESHES[case[0]], case[1]
    for over, num_shards in results[0][case][0]["shards"]:
        assert num_shards == (mesh.size(over) if zero else 1)
