"""Every key of the reference spec is drawn, follows from a choice, or is left out with a reason."""

from __future__ import annotations

import pytest

from planner.spec.spec import Spec
from runtime.fuzz.specs import FIELDS, NOT_KEYS, Facts, continued_on, split_of
from tests.fuzz.drawing import case_with, drawn_case
from tests.fuzz.not_drawn import EXCLUDED, FOLLOWS
from tests.test_spec_keys import leaves


def test_every_key_of_the_spec_is_drawn_or_left_out_with_a_reason():
    drawn = set(FIELDS) - NOT_KEYS
    assert sorted([*drawn, *FOLLOWS, *EXCLUDED]) == sorted(leaves(Spec))
    assert all(len(values) > 1 for values in FIELDS.values())
    assert all(EXCLUDED.values())


@pytest.mark.parametrize("name", sorted(set(FIELDS) - NOT_KEYS - {"mesh.etp", "mesh.order"}))
def test_an_option_of_a_key_reaches_the_spec(name: str):
    """etp and order have a test of the mesh alone."""
    model = {"layers": 4, "experts": "stacked"}
    needs = {
        "mesh.ep": {"mesh.tp": 1, "mesh.dp": 2},
        "optimizer.schedule": {"optimizer.schedule.kind": "cosine"},
        "pipeline": {"mesh.pp": 2, "microbatches": 4},
        "pipeline.group_size": {"mesh.pp": 2, "microbatches": 4, "pipeline.schedule": "interleaved_1f1b"},
        "mesh.vpp": {"mesh.pp": 2, "microbatches": 4},
        "cuda_graphs": {"cuda_graphs.impl": "emulate"},
        "optimizer.momentum": {"optimizer.name": "sgd"},
        "optimizer.reshard": {"optimizer.zero": 3},
        "optimizer.shard_group": {"mesh.dp": 4},
        "optimizer.nesterov": {"optimizer.name": "sgd", "optimizer.momentum": 0.9},
        "audit": {"audit.every": 1},
        "tensor_parallel": {"tensor_parallel.sequence_parallel": True},
        "precision.gradients": {"precision.parameters": "float32"},
    }
    given = needs.get(name, needs.get(name.rpartition(".")[0], {}))
    simple = case_with(model, given | {name: FIELDS[name][0]}).sensible(8)
    other = case_with(model, given | {name: FIELDS[name][1]}).sensible(8)
    assert Spec.load(simple.to_spec()) != Spec.load(other.to_spec())


@pytest.mark.parametrize(
    ("kind", "split"),
    [("auto", "auto"), ("uneven", [3, 1]), ("ends", {"embedding": True, "loss": True}), ("layout", "Ettt|tL")],
)
def test_splits_name_every_block(kind: str, split: object):
    assert split_of({"mesh.pp": 2, "mesh.vpp": 1, "pipeline.split": kind}, Facts(4, False)) == split


@pytest.mark.parametrize(
    ("recompute", "blocks", "written"),
    [
        ("full", "all", "full"),
        ("full", "even", {"*[02468]": "full"}),
        ("selective", "odd", {"*[13579]": "selective"}),
        ("none", "odd", "none"),
        ("first full", "odd", {"*0": "full"}),
    ],
)
def test_some_blocks_are_recomputed(recompute: str, blocks: str, written: object):
    case = case_with({}, {"recompute": recompute, "blocks recomputed": blocks}).sensible(4)
    assert case.to_spec()["recompute"] == written


@pytest.mark.parametrize("axis", ["one", "tp", "pp", "dp", "cp"])
def test_the_layout_that_goes_on_has_the_same_batch(axis: str):
    case = drawn_case(3, 4)
    spec = Spec.load(continued_on(case.to_spec(), axis))
    assert spec.batch.global_size == Spec.load(case.to_spec()).batch.global_size
    assert spec.mesh.to_mesh().world_size <= 2
