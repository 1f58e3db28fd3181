"""Whatever reads a sequence: over cp it gives one process's loss and gradients, or is refused at its line."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from planner import PlanError
from tests.models.sequence_readers import FUSED, LOSSES, MIXING, POSITIONS, SCORES, Spelling, batch, build
from tests.tools.simulated_mesh import run_mesh

# which op stands in the way
REFUSED = {
    Spelling("linear"): "aten.cumsum",
    Spelling(mixing="shift by pad"): "aten.pad",
    Spelling(mixing="shift by cat"): "aten.slice",
    Spelling(mixing="convolution"): "aten.conv1d",
    Spelling(mixing="roll"): "aten.roll",
    Spelling(mixing="flip"): "aten.flip",
    Spelling(mixing="cumsum"): "aten.cumsum",
    Spelling(mixing="softmax over tokens"): "aten.softmax",
    Spelling(mixing="fft"): "aten.fft",
    Spelling(positions="prompt"): "aten.cat",
    Spelling(loss="differences"): "aten.slice",
}
ALL = [
    *(Spelling(attention) for attention in (*FUSED, *SCORES)),
    *(Spelling(mixing=mixing) for mixing in MIXING),
    *(Spelling(positions=positions) for positions in POSITIONS),
    *(Spelling(loss=loss) for loss in LOSSES),
]
EQUAL = [spelling for spelling in dict.fromkeys(ALL) if spelling not in REFUSED]
SEQUENCE_PARALLEL = {"tensor_parallel": {"sequence_parallel": True, "vocabulary_multiple": 8}}


def name_of(spelling: Spelling) -> str:
    return ", ".join([spelling.attention, spelling.mixing, spelling.positions, spelling.loss])


def check(spelling: Spelling, mesh: dict[str, int], **more: Any) -> None:
    ran, whole = run_mesh(lambda: build(spelling), batch(), mesh, **more), build(spelling)
    loss = whole(**batch())
    loss.backward()
    torch.testing.assert_close(ran.loss, loss.detach(), rtol=1e-10, atol=1e-12)
    expected = {n: p.grad if p.grad is not None else torch.zeros_like(p) for n, p in whole.named_parameters()}
    for name, gradient in ran.gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-8, atol=1e-11, msg=name)
    assert {n for n, g in expected.items() if g.any()} <= set(ran.gradients)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("spelling", EQUAL, ids=name_of)
def test_over_two_ranks_it_equals_one_process(spelling):
    check(spelling, {"cp": 2})


@pytest.mark.thorough
@pytest.mark.parametrize(("mesh", "more"), [({"cp": 4}, {}), ({"cp": 2, "tp": 2}, SEQUENCE_PARALLEL)], ids=["4", "tp"])
@pytest.mark.parametrize("attention", [*FUSED, *SCORES])
def test_over_more_ranks_and_beside_tp_too(attention, mesh, more):
    check(Spelling(attention), mesh, **more)


@pytest.mark.thorough
@pytest.mark.parametrize("loss", [loss for loss in LOSSES if loss not in ("differences", "deviation")])
def test_losses_are_those_of_the_whole_batch_beside_dp(loss):
    check(Spelling(loss=loss), {"cp": 2, "dp": 2})


@pytest.mark.sampled(2)
@pytest.mark.parametrize("spelling", REFUSED, ids=name_of)
def test_what_reads_the_whole_sequence_is_refused_with_its_op_and_line(spelling):
    with pytest.raises(PlanError, match=REFUSED[spelling]) as caught:
        check(spelling, {"cp": 2})
    assert "sequence_readers.py" in str(caught.value.where)
