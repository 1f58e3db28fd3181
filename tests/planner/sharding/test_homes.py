"""Every element of every matrix goes to one home and comes back; work is even, also where shards cut matrices."""

from collections import Counter
from math import prod
from typing import Any

import pytest
import torch

from planner import Plan
from planner.sharding.homes import MatrixHomes, _of_all_ranks, combined_axes, exchanged_elements, homes_of
from tests.models import families
from tests.tools.captures import plan_again
from tests.tools.specs import entry_inputs

MESHES: dict[str, dict[str, int]] = {
    "one": {},
    "tp2": {"tp": 2},
    "dp4": {"dp": 4},
    "tp2·dp3": {"tp": 2, "dp": 3},
    "cp2·dp2": {"cp": 2, "dp": 2},
    "ep2·dp2·tp2": {"ep": 2, "dp": 2, "tp": 2, "etp": 2},
}


def planned(name: str, mesh: dict[str, int], **optimizer: Any) -> Plan:
    entry = families.build(name)
    inputs = entry_inputs(entry)
    size = 2 * mesh.get("dp", 1)
    spec = {"mesh": mesh, "batch": {"global": size, "micro": 2}, "inputs": inputs}
    spec |= {"optimizer": {"name": "muon", **optimizer}, "tensor_parallel": {"vocabulary_multiple": 8}}
    return plan_again(entry.model, spec)


def homes(made: Plan, ep_rank: int = 0) -> list[MatrixHomes]:
    decisions, shards = made.to_run()
    found = (homes_of(b, made.mesh, decisions.rules, ep_rank) for b in shards.buffers_of_rank(0, ep_rank))
    return [h for h in found if h is not None]


@pytest.mark.thorough
@pytest.mark.sampled(4)
@pytest.mark.parametrize("bucket", [None, 2000])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", ["gpt_neox", "mixtral"])
def test_each_element_of_a_matrix_comes_from_the_ranks_that_hold_it(name: str, mesh: str, bucket: int | None) -> None:
    if name != "mixtral" and "ep" in MESHES[mesh]:
        return
    made = planned(name, MESHES[mesh], bucket_size=bucket)
    seen: set[tuple[str, object]] = set()
    for ep_rank in range(made.mesh.ep):
        for found in homes(made, ep_rank):
            ranks = next(r for r in made.mesh.groups_over(found.axis) if 0 in r) if found.axis else [0]
            places = [{**made.mesh.place(rank), "ep": ep_rank} for rank in ranks]
            for number, bucket_ in enumerate(found.buckets):
                filled = [torch.zeros(homed.matrix.shape) for homed in bucket_]
                for place in places:
                    for sent in found.sent(number, made.mesh, place):
                        filled[sent.index][sent.place] += 1
                assert all(bool((x == 1).all()) for x in filled)
                seen |= {(homed.matrix.fqn, homed.matrix.boxes) for homed in bucket_}
    rows = {row.name: row for row in made.parameters if row.matrices is not None}
    counts = Counter(name for name, _ in seen)
    assert counts == {name: prod(row.shape[:-2]) * len(row.matrices.sizes) for name, row in rows.items()}


@pytest.mark.thorough
def test_work_is_even_over_the_ranks() -> None:
    for mesh in ({"dp": 2}, {"dp": 4}, {"tp": 2, "dp": 2}):
        (found,) = homes(planned("llama-8-layers", mesh))
        loads = Counter[int]()
        for homed in (each for bucket in found.buckets for each in bucket):
            loads[homed.home] += homed.matrix.work
        assert len(loads) == found.num_ranks
        assert max(loads.values()) * found.num_ranks <= 1.1 * loads.total()


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.parametrize("bucket", [None, 2000])
@pytest.mark.parametrize("mesh", ["dp4", "tp2·dp3", "ep2·dp2·tp2"])
def test_exchanges_are_counted_without_a_look_at_each_piece(mesh: str, bucket: int | None) -> None:
    made = planned("mixtral", MESHES[mesh], bucket_size=bucket)
    for found in homes(made):
        for number in range(len(found.buckets)):
            counted = exchanged_elements(found, number, made.mesh, 0)
            assert not found.axis or counted == _of_all_ranks(found, number, made.mesh, 0)


def test_groups_of_several_axes_are_those_of_the_plan() -> None:
    assert combined_axes(planned("gpt", {"tp": 2, "dp": 2}).optimizer) == ("tp-dp",)
    assert combined_axes(planned("gpt", {"tp": 2, "dp": 2}, zero=0).optimizer) == ()
    made = planned("mixtral", MESHES["ep2·dp2·tp2"])
    axes = [b.matrix_axis for b in made.optimizer.buffers if b.rule == "muon"]
    assert axes == ["tp-dp", "dp", "etp"]  # dp: of the router


def test_the_plan_names_the_home_of_each_matrix() -> None:
    made = planned("gpt", {"dp": 2})
    (found,) = homes(made)
    rows = [bucket.homes for buffer in made.optimizer.buffers for bucket in buffer.buckets if buffer.rule == "muon"]
    assert rows == [tuple(homed.home for homed in bucket) for bucket in found.buckets]
    assert {home for row in rows for home in row} == {0, 1}
    assert Plan.from_dict(made.to_dict()).optimizer == made.optimizer


def test_other_parameters_have_buffers_of_their_own() -> None:
    made = planned("gpt", {}, groups={"*.up.weight": {"name": "lion", "lr": 1e-4}})
    rules = {row.rule: {n for bucket in row.buckets for n in bucket.parameters} for row in made.optimizer.buffers}
    assert {n.rpartition("blocks.0.")[2] for n in rules["lion"]} >= {"mlp.up.weight"}
    assert {"tokens.weight", "positions.weight"} <= rules["adamw"]
    assert all(n.endswith("weight") for n in rules["muon"])
    assert {row.name: row.group for row in made.parameters}["tokens.weight"] == "rule adamw"
