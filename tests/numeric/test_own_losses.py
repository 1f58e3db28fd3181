"""A loss over the logits of a model, DPO, distillation and losses between blocks equal one process on every axis."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from planner import Plan
from tests.models.families import build
from tests.models.further_tokens import IGNORED, VOCABULARY, FurtherTokens
from tests.models.preferences import MODELS
from tests.tools.captures import plan_again
from tests.tools.laboratory import Case, Lab
from tests.tools.simulated_mesh import equals_one_process, spec_of

LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "tp2 sp": ({"tp": 2}, {"tensor_parallel": {"sequence_parallel": True, "vocabulary_multiple": 8}}),
    "cp2": ({"cp": 2}, {}),
    "dp2 tp2": ({"dp": 2, "tp": 2}, {}),
}
FROZEN = {"dpo": "reference", "distillation": "teacher", "dpo-module": "reference", "distillation-module": "teacher"}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_every_gradient_equal_one_process(name: str, layout: str) -> None:
    mesh, more = LAYOUTS[layout]
    batch = build(name).batch(4, seed=1)
    equals_one_process(lambda: build(name).model, batch, mesh, each=(1e-9, 1e-12), **more)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"pp": 2}, {"pp": 2, "tp": 2}, {"pp": 2, "dp": 2}], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_training_in_a_pipeline_equals_one_process(lab: Lab, name: str, mesh: dict[str, int]) -> None:
    assert lab.check(Case(name, mesh)).wrong == []


def planned(name: str, mesh: dict[str, int]) -> Plan:
    entry = build(name)
    return plan_again(entry.model, spec_of(entry.batch(4, seed=1), mesh))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", FROZEN)
def test_a_frozen_model_has_no_gradients_no_optimizer_state_and_no_backward(name: str) -> None:
    made = planned(name, {"tp": 2})
    frozen = f"{FROZEN[name]}."
    rows = [p.name for p in made.parameters if p.name.startswith(frozen)]
    held = {name for b in made.optimizer.buffers for bucket in b.buckets for name in bucket.parameters}
    assert rows
    assert held
    assert not held & set(rows)
    phases = {row.where.startswith(frozen): set() for row in made.collectives if row.axis == "tp"}
    for row in made.collectives:
        if row.axis == "tp":
            phases[row.where.startswith(frozen)].add(row.phase)
    assert phases == {True: {"forward"}, False: {"forward", "backward"}}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", FROZEN)
def test_a_frozen_model_is_sharded_like_the_trained_one(name: str) -> None:
    made = planned(name, {"tp": 2})
    styles: dict[bool, dict[str, str]] = {True: {}, False: {}}
    for row in made.parameters:
        model, _, rest = row.name.partition(".")
        if rest.startswith("blocks."):
            styles[model == FROZEN[name]][rest] = row.style
    assert styles[True].items() >= styles[False].items()
    assert {"column", "row"} <= set(styles[True].values())


def test_stages_are_balanced_by_forward_and_backward_and_a_frozen_model_has_no_backward() -> None:
    """Two trained blocks with three times the work of two others."""
    made = planned("dpo-joined", {"pp": 2})
    assert [len(stage.blocks) for stage in made.stages] == [1, 3]


# ---- losses between blocks, of further tokens: they equal one process over cp and tp, whatever blocks are recomputed


SEQUENCE_PARALLEL = {"sequence_parallel": True, "vocabulary_multiple": 8}
CP2_TP2 = {"cp": 2, "tp": 2}
CASES: dict[str, tuple[dict[str, int], Any]] = {
    "cp2 tp2, none": (CP2_TP2, "none"),
    "cp2 tp2, full": (CP2_TP2, "full"),
    "cp2 tp2, all but the first": (CP2_TP2, {"*": "full", "*0": "none"}),
    "cp2 tp2, selective": (CP2_TP2, "selective"),
    "tp2 dp2, full": ({"tp": 2, "dp": 2}, "full"),
}
QUICK = ("cp2 tp2, full", True)
REST = [case for case in product(CASES, (False, True)) if case != QUICK]


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids, labels = (torch.randint(VOCABULARY, (4, 8), generator=generator) for _ in range(2))
    return {"ids": ids, "labels": labels.masked_fill(labels % 5 == 0, IGNORED)}


@pytest.mark.parametrize(
    ("name", "own_heads"), [QUICK, *(pytest.param(*case, marks=pytest.mark.thorough) for case in REST)]
)
def test_losses_between_blocks_of_further_tokens_equal_one_process(name: str, own_heads: bool):
    mesh, recompute = CASES[name]
    options = {"recompute": recompute, "tensor_parallel": SEQUENCE_PARALLEL}
    make = lambda: FurtherTokens(own_heads=own_heads)  # noqa: E731
    ran = equals_one_process(make, batch(), mesh, each=(1e-9, 1e-12), **options)
    assert bool(ran.plan.recompute) == (recompute != "none")
