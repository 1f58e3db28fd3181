"""Unusual code: its canonical form computes the same, every op has a rule, and every admitted typing is right."""

import pytest
import torch

from planner.capture.export import capture
from tests.models.unusual_code import BODIES, Own, batch
from tests.tools.captured_ops import check_model, gradients
from tests.tools.without_rule import without_rule


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", BODIES)
def test_canonical_form_computes_what_the_model_computes(name):
    model = Own(BODIES[name])
    loss, found = gradients(model, batch())
    expected = model(**batch())
    used = [(n, p) for n, p in model.named_parameters() if n in found]
    torch.testing.assert_close(loss, expected)
    truth = torch.autograd.grad(expected, [p for _, p in used], materialize_grads=True)
    for (parameter, _), gradient in zip(used, truth, strict=True):
        torch.testing.assert_close(found[parameter], gradient, msg=lambda text, n=parameter: f"{n}: {text}")
    rest = [p for n, p in model.named_parameters() if n not in found]
    assert all(g is None for g in torch.autograd.grad(model(**batch()), rest, allow_unused=True)) if rest else True


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", BODIES)
def test_every_op_has_a_rule(name):
    assert not without_rule(capture(Own(BODIES[name]), batch()))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("tp", [2, 4])
def test_every_admitted_typing_is_right(name, tp):
    assert not check_model(Own(BODIES[name]), batch(), tp)
