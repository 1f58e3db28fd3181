"""An autocast region of the forward is planned with the casts that autocast makes."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from passes.errors import PlanError
from passes.program.program import Program
from planner.capture.export import capture
from tests.models.custom_functions import Rounded
from tests.models.one_body import OneBody, batch
from tests.tools.captured_ops import gradients

HALF = torch.bfloat16


def region(**options: Any) -> torch.autocast:
    return torch.autocast("cpu", **({"dtype": HALF} | options))


def up(model: OneBody, x: Tensor) -> Tensor:
    """Without a bias: canonical form adds it to a product that is rounded to bfloat16, which fused it is not."""
    return F.linear(x, model.up.weight)


def mlp(model: OneBody, x: Tensor) -> Tensor:
    with region():
        return up(model, F.gelu(up(model, x)))


def nested(model: OneBody, x: Tensor) -> Tensor:
    with region():
        y = up(model, x)
        with region(enabled=False):
            y = up(model, y.float()) @ model.up.weight
        return up(model, y)


def without_gradients_inside(model: OneBody, x: Tensor) -> Tensor:
    with region():
        y = up(model, x)
        with torch.no_grad():
            z = y @ model.up.weight
        return y * z


def without_gradients_in_a_disabled_region(model: OneBody, x: Tensor) -> Tensor:
    with region(enabled=False):
        with torch.no_grad():
            z = up(model, x)
        return up(model, x) * z


def within_no_grad(model: OneBody, x: Tensor) -> Tensor:
    with torch.no_grad(), region():
        z = up(model, x)
    return up(model, x) * z


@region()
def decorated(model: OneBody, x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*(up(model, x).unsqueeze(1) for _ in range(3))).squeeze(1)


def composites(model: OneBody, x: Tensor) -> Tensor:
    """Ops made of others, some of which autocast knows; promotion; ops that it takes back to float32."""
    with region():
        y = torch.einsum("bsw,vw->bsv", x, model.up.weight)
        y = F.layer_norm(torch.cat([y, x], -1)[..., :8], (8,), model.scale)
        return y + F.mse_loss(up(model, x), y) + torch.logsumexp(up(model, y), -1, keepdim=True)


def written_in_place(model: OneBody, x: Tensor) -> Tensor:
    with region():
        y = up(model, x)
        y += 1
        return y.mul_(2) + (x[0] @ model.up.weight).add_(model.scale)


class Cast(Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight.t(), torch.einsum("bsi,bsj->ij", x, grads[0])


class RoundedProduct(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return (x @ weight * 8).round() / 8

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grads[0].to(x.dtype) @ weight.t(), torch.einsum("bsi,bsj->ij", x, grads[0].to(x.dtype))


def derived_function(model: OneBody, x: Tensor) -> Tensor:
    with region():
        return Cast.apply(up(model, x), model.up.weight)


def own_function(model: OneBody, x: Tensor) -> Tensor:
    with region():
        return RoundedProduct.apply(x, model.up.weight) + Rounded.apply(up(model, x), 8)


BODIES = {
    body.__name__: body
    for body in (
        mlp, nested, without_gradients_inside, without_gradients_in_a_disabled_region, within_no_grad, decorated,
        composites, written_in_place, derived_function, own_function,
    )
}  # fmt: skip


def model_of(body: Any) -> OneBody:
    return OneBody(lambda model, x: body(model, x).float()).float()


def captured(body: Any) -> Program:
    return capture(model_of(body), batch())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", BODIES)
def test_the_graph_computes_as_the_region_does(name: str) -> None:
    model = model_of(BODIES[name])
    loss, found = gradients(model, batch())
    expected = model(**batch())
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    expected.backward()
    for parameter, tensor in model.named_parameters():
        truth = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
        given = found.get(parameter, torch.zeros_like(truth))
        assert given.dtype == torch.float32
        size = max(truth.norm().item(), 1e-3)  # in the backward, bfloat16 sums may stand in another order
        assert (given - truth).norm().item() <= 8e-3 * size, parameter


def test_values_in_the_region_are_of_its_precision_and_others_are_not() -> None:
    program = captured(nested)
    linears = [n for n in program.graph.graph.nodes if "linear" in str(n.target)]
    dtypes = [n.meta["val"].dtype for n in linears]
    assert dtypes == [HALF, torch.float32, HALF, torch.float32]


def test_the_plan_says_where_a_region_computes_in_another_precision() -> None:
    ((what, where),) = captured(mlp).rewrites
    assert "computes in bfloat16" in what
    assert (where.file, where.code) == (__file__, "with region():")
    assert captured(without_gradients_in_a_disabled_region).rewrites == []


def test_casts_within_a_kernel_are_refused_with_their_line() -> None:
    def bilinear(model: OneBody, x: Tensor) -> Tensor:
        with region():
            return F.bilinear(x, x, model.up.weight[None].expand(8, 8, 8))

    with pytest.raises(PlanError, match="autocast does more to aten") as caught:
        captured(bilinear)
    assert "self.body(self" in caught.value.where.code  # the line of the module's forward


def test_a_region_of_another_device_does_nothing_and_is_told() -> None:
    def on_cuda(model: OneBody, x: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=HALF):
            return up(model, x)

    program = captured(on_cuda)
    assert {n.meta["val"].dtype for n in program.graph.graph.nodes if "linear" in str(n.target)} == {torch.float32}
    (note,) = program.notes
    assert "autocast('cuda')" in note
    assert "test_autocast.py" in note


def test_nothing_of_the_watching_is_left_behind() -> None:
    before = [vars(torch.autocast)[name] for name in ("__init__", "__enter__", "__exit__")]
    captured(mlp)
    assert [vars(torch.autocast)[name] for name in ("__init__", "__enter__", "__exit__")] == before
    assert not torch.is_autocast_enabled("cpu")
