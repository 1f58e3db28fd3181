"""Dropout: one mask for all tp ranks outside the parallel regions, one for each inside, none depends on dp or pp.
With ``dropout: layout_invariant`` whole runs are those of one process of ours, on every layout.
"""

from typing import Any

import pytest
import torch

from passes.errors import PlanError
from tests.models import dropping
from tests.models.families import build
from tests.numeric.test_families import SEQUENCE_PARALLEL
from tests.tools import jobs
from tests.tools.comparison import compare
from tests.tools.laboratory import Case, Lab
from tests.tools.simulated_mesh import Ran, run_mesh

TRAIN = {"train": True}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh", [{"pp": 2}, {"dp": 2}, {"pp": 2, "dp": 2}], ids=str)
@pytest.mark.parametrize("model", ["gpt-dropout", "dropout-inside"])
def test_masks_do_not_depend_on_stages_or_replicas(lab: Lab, model: str, mesh: dict[str, int]) -> None:
    alone, spread = (lab.run(Case(model, m, TRAIN))[0] for m in ({"dp": 1}, mesh))
    assert compare(spread, alone).wrong == []


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", [{"tp": 2}, {"tp": 2, "pp": 2}], ids=str)
def test_masks_outside_parallel_regions_do_not_depend_on_tp(lab: Lab, mesh: dict[str, int]) -> None:
    alone, spread = (lab.run(Case("dropout-outside", m, TRAIN))[0] for m in ({"dp": 1}, mesh))
    assert compare(spread, alone).wrong == []


def test_masks_are_equal_on_tp_ranks_outside_and_different_inside(lab: Lab) -> None:
    first, second = lab.run(Case("dropout-inside", {"tp": 2}, TRAIN, job=jobs.dropout_masks))
    assert {inside for inside, _ in first.values()} == {True, False}
    for name, (inside, mask) in first.items():
        assert mask.equal(second[name][1]) == (not inside)
    masks = [mask for _, mask in first.values()]
    assert not any(a.equal(b) for i, a in enumerate(masks) for b in masks[:i])


@pytest.mark.thorough
def test_losses_repeat_with_the_seed_and_change_with_seed_and_step(lab: Lab) -> None:
    still = {"train": True, "optimizer": {"lr": 0.0, "weight_decay": 0.0}}
    first, again, other = (
        lab.run(Case("gpt-dropout", {"tp": 2, "dp": 2}, still | {"seed": seed}, job=jobs.losses_without_updates))[0]
        for seed in (1, 1, 2)
    )
    assert first == again
    assert not set(first) & set(other)
    assert len(set(first)) == 3


@pytest.mark.thorough
def test_evaluation_mode_captures_no_dropout(lab: Lab) -> None:
    assert lab.check(Case("gpt-dropout", {"tp": 2, "pp": 2})).wrong == []


# ---- ``dropout: layout_invariant``: whole runs with dropout on are those of one process of ours, on every layout


INVARIANT = {"train": True, "dropout": "layout_invariant"}
GRAPHS = {"cuda_graphs": {"impl": "emulate", "scope": ["attn", "mlp"], "warmup_steps": 1}}
ZERO_BUBBLE = {"schedule": "zero_bubble"}
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "tp2 pp2": ({"tp": 2, "pp": 2}, {}, 2),
    "dp2 tp2, along the sequence": ({"tp": 2, "dp": 2}, SEQUENCE_PARALLEL, 4),
    "cp2 dp2": ({"cp": 2, "dp": 2}, {"recompute": "full"}, 1),
    "pp2, graphs": ({"pp": 2}, GRAPHS, 2),
    "pp2, graphs, recompute": ({"pp": 2}, GRAPHS | {"recompute": "full"}, 2),
    "pp2, graphs, recompute, W": ({"pp": 2}, GRAPHS | {"recompute": "selective", "pipeline": ZERO_BUBBLE}, 2),
    "graphs of all": ({"dp": 2}, {"cuda_graphs": GRAPHS["cuda_graphs"] | {"scope": "full_iteration"}}, 2),
}


@pytest.mark.thorough
@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_with_dropout_are_those_of_one_process(lab: Lab, layout: str) -> None:
    mesh, rest, micro = LAYOUTS[layout]
    alone = lab.run(Case("dropping:drop_path", {"dp": 1}, INVARIANT))[0]
    spread = lab.run(Case("dropping:drop_path", mesh, INVARIANT | rest, micro=micro))[0]
    report = compare(spread, alone)
    assert report.wrong == []
    assert report.gradient < 1e-12


@pytest.mark.thorough
def test_they_are_not_those_without_dropout(lab: Lab) -> None:
    with_dropout, without = (
        lab.run(Case("dropping:drop_path", {"dp": 1}, rest))[0].losses for rest in (INVARIANT, {"train": False})
    )
    assert abs(with_dropout[0] - without[0]) > 1e-3


def _ran(name: str, mesh: dict[str, int], **more: Any) -> Ran:
    batch = build(name).batch(4, 0)
    torch.set_num_threads(1)
    return run_mesh(lambda: build(name).model.train(), batch, mesh, dropout="layout_invariant", **more)


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", sorted(dropping.MODELS.keys() - {"dropping:integers"}))
def test_masks_follow_elements_not_ranks(name: str) -> None:
    alone = _ran(name, {})
    mesh = {"tp": 2} if name == "dropping:noise" else {"tp": 2, "cp": 2}  # randn_like is not cut over cp
    spread = _ran(name, mesh, recompute="selective")
    torch.testing.assert_close(spread.loss, alone.loss, rtol=1e-12, atol=0)
    for parameter, gradient in alone.gradients.items():
        torch.testing.assert_close(spread.gradients[parameter], gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["dropping:weighted", "dropping:hidden", "dropping:kept", "dropping:drop_path"])
def test_masks_follow_sequences_and_so_do_counts_of_them(name: str) -> None:
    """A mean over weights that are drawn is over those of the global batch, and each microbatch draws its own."""
    alone, spread = _ran(name, {}), _ran(name, {"dp": 2})
    assert not [row.what for row in spread.plan.diagnostics if row.level == "warning"]
    torch.testing.assert_close(spread.loss, alone.loss, rtol=1e-12, atol=0)
    for parameter, gradient in alone.gradients.items():
        torch.testing.assert_close(spread.gradients[parameter], gradient, rtol=1e-10, atol=1e-12)


def test_what_has_no_number_for_each_element_is_refused_by_line() -> None:
    with pytest.raises(PlanError, match=r"aten\.randint.* draws without one number per element") as error:
        _ran("dropping:integers", {})
    assert "dropping.py" in str(error.value)
