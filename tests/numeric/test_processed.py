"""Models of images, of frames, and of images and text with the batch of their processor: equal to one process."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from planner.capture.forms import given_by
from planner.spec.spec import Spec
from tests.models.pictures import PICTURES, made
from tests.models.processed import EQUAL, FAMILIES, Family
from tests.numeric.test_half_precision import FACTOR, alone, distance
from tests.tools.simulated_mesh import equals_one_process, run_mesh

CLOSE = 1e-6  # its logits are cast to float32
LAYOUTS = [
    pytest.param({"cp": 2, "tp": 2}, {}, id="cp2·tp2"),
    pytest.param({"tp": 2}, {"tensor_parallel": {"sequence_parallel": True}}, id="sequence parallel"),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("mesh", "more"), LAYOUTS)
@pytest.mark.parametrize("name", EQUAL)
def test_patches_of_all_images_and_tokens_at_other_places_in_each_sequence(
    name: str, mesh: dict[str, int], more: Any
) -> None:
    torch.manual_seed(1)
    family = FAMILIES[name]
    rows = family.batch()
    how = {"alone": lambda model: model(**as_given(family, rows)).loss, "inputs": family.inputs, **more}
    equals_one_process(family.model, rows, mesh, loss=CLOSE, gradient=CLOSE, **how)


def as_given(family: Family, rows: dict[str, Tensor]) -> dict[str, Tensor]:
    spec = {"mesh": {}, "batch": {"global": 2, "micro": 2}, "inputs": family.inputs}
    return given_by(Spec.load(spec).forms, rows)


@pytest.mark.sampled(1)
@pytest.mark.covering(pairs=1)
@pytest.mark.parametrize(("mesh", "more"), LAYOUTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_in_bfloat16_a_layout_rounds_no_more_than_one_process(name: str, mesh: dict[str, int], more: Any) -> None:
    torch.manual_seed(1)
    half, given = torch.bfloat16, FAMILIES[name].inputs
    family = replace(FAMILIES[name], inputs={n: _rounded(one) for n, one in given.items()})
    rows = family.batch()
    exact = {n: x.float() if x.is_floating_point() else x for n, x in rows.items()}
    truth = alone(family.model(half).float(), as_given(family, exact))
    allowed = distance(alone(family.model(half), as_given(family, rows)), truth)
    ran = run_mesh(lambda: family.model(half), rows, mesh, inputs=family.inputs, **more)
    assert ran.loss.isfinite()
    assert distance(ran.gradients, truth) <= FACTOR * allowed


def _rounded(given: dict[str, Any]) -> dict[str, Any]:
    return given | {"dtype": "bfloat16"} if given.get("dtype") == "float64" else given


# ---- families of transformers with patches or frames, cut over cp: equal to one process


CLOSE_PICTURES = {"llava": 1e-6}  # its logits are cast to float32


@pytest.mark.thorough
@pytest.mark.sampled(2)
@pytest.mark.parametrize("mesh", [{"cp": 2}, {"cp": 2, "tp": 2}], ids=["cp2", "cp2·tp2"])
@pytest.mark.parametrize("name", PICTURES)
def test_equal_to_one_process(name: str, mesh: dict[str, int]) -> None:
    most = CLOSE_PICTURES.get(name, 1e-10)
    equals_one_process(lambda: made(name)[0], made(name)[1], mesh, loss=most, gradient=most)
