"""In bfloat16 and float16 a layout is no further from the exact numbers than one process, but for a factor.

The exact numbers are those of the same rounded weights in float64, or float32 for families, as grouped products have no
float64. Sums over ranks are rounded once more: the error of all gradients together is at most ``FACTOR`` times that of
one process.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tests.models import families, hugging_face, stacked_experts
from tests.models.hugging_face import MOE
from tests.numeric.test_expert_layouts import FOLDINGS, OPENED, batch_of, built, layer_of
from tests.tools.simulated_mesh import loss_of, one_process, run_mesh

FACTOR = 2.0
DTYPES = (torch.bfloat16, torch.float16)
WAYS = (*OPENED, *stacked_experts.WAYS)
DENSE = {"tp 2": {"tp": 2}, "tp 2, dp 2": {"tp": 2, "dp": 2}}


def check(
    make: Callable[[], nn.Module], batches: Iterable[Mapping[str, Tensor]], mesh: dict[str, int], *dtypes: torch.dtype
) -> None:
    """``dtypes``: that of the layout, and that of the exact numbers.

    One of ``batches`` is enough: a value near 0 that is rounded to the other side of a ReLU, or a token that goes to
    another expert, is a large difference of one batch, and no mistake, which would be in all of them.
    """
    assert any(is_near(make, batch, mesh, *dtypes) for batch in batches)


def is_near(
    make: Callable[[], nn.Module], batch: Mapping[str, Tensor], mesh: dict[str, int], *dtypes: torch.dtype
) -> bool:
    half, exact = dtypes
    truth, plain = (alone(model, batch) for model in (make().to(half).to(exact), make().to(half)))
    ran = run_mesh(lambda: make().to(half), dict(batch), mesh)
    assert ran.loss.isfinite()
    norm, allowed = torch.stack([x.norm() for x in truth.values()]).norm(), distance(plain, truth)
    return bool(distance(ran.gradients, truth) <= FACTOR * allowed + 1e-6 * norm)


def alone(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n: g.double() for n, g in one_process(model, loss_of(model(**batch))).gradients.items()}


def distance(found: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> Tensor:
    wrong = [(found[name].double() - x if name in found else x).norm() for name, x in truth.items()]
    return torch.stack(wrong).norm()


@pytest.mark.sampled(1)
@pytest.mark.covering(pairs=2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("folding", FOLDINGS)
@pytest.mark.parametrize("way", WAYS, ids=lambda w: w.__name__)
def test_experts_of_every_spelling(way: Callable[..., Tensor], folding: str, dtype: torch.dtype) -> None:
    mesh = FOLDINGS[folding]
    check(lambda: built(partial(layer_of, way)), [batch_of(2 * mesh.get("dp", 1))], mesh, dtype, torch.float64)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MOE)
def test_families_with_experts(name: str, dtype: torch.dtype) -> None:
    batch = hugging_face.batch("mixtral")
    check(lambda: hugging_face.made(MOE[name]), [batch], {"dp": 2, "ep": 2}, dtype, torch.float32)


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.covering(pairs=2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", DENSE)
@pytest.mark.parametrize("name", sorted(families.FAMILIES))
def test_families(name: str, layout: str, dtype: torch.dtype) -> None:
    entry, mesh = families.build(name), DENSE[layout]
    batches = (entry.batch(2 * mesh.get("dp", 1), seed) for seed in range(2))  # microbatches alike: one capture of both
    check(lambda: families.build(name).model, batches, mesh, dtype, torch.float32)
