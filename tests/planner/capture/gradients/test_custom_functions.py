"""A user's Function is its forward where its backward is the derivative of that, and one call where it is not."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from passes.errors import PlanError
from passes.program.ops.own_backward import Facts
from passes.program.source_lines import where_of
from planner.capture.export import capture
from planner.capture.gradients import custom_functions
from planner.capture.gradients.applications import Application
from tests.models.custom_functions import calls_in
from tests.models.one_body import WIDTH, Body, OneBody, assert_capture_equals, batch


class SquaredRelu(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.relu(x) ** 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] * 2 * F.relu(x)


class FusedNorm(Function):
    """In the style with setup_context."""

    @staticmethod
    def forward(x: Tensor, scale: Tensor, eps: float) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * scale

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.eps = inputs[2]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, scale = ctx.saved_tensors
        inverse = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + ctx.eps)
        normed, g = x * inverse, grads[0] * scale
        return (
            inverse * (g - normed * (g * normed).mean(-1, keepdim=True)),
            (grads[0] * normed).flatten(0, -2).sum(0),
            None,
        )


class InFloat32(Function):
    """Rounds to float32 on the way, as fused kernels do: not held to the precision of float64."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.float().softmax(-1)
        ctx.save_for_backward(y)
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        g = grads[0].float()
        return (y * (g - (g * y).sum(-1, keepdim=True))).to(grads[0].dtype)


class Doubled(Function):
    """Writes into its argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 2 * grads[0]


class Rounded(Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.round(x * 8) / 8

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class Scaled(Function):
    """The gradient times ``factor``: -1 reverses it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.factor * grads[0], None


class Clipped(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].clamp(-100, 100)


class BoundedRoot(Function):
    """Another backward only next to 0, where the derivative grows without bound."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sqrt()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] / torch.sqrt((4 * x).clip(min=1e-6))


class ComputedAgain(Function):
    """Recomputation by hand: runs a module without gradients, and again in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(x)
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.module(x).backward(grads[0])
        return x.grad, None


class NoValues(Function):
    """Cannot run by itself on tensors with values."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if not hasattr(x, "fake_mode"):
            raise RuntimeError("needs another device")
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 2


class Outer(Function):
    """Its derivative is that of the Function inside."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return Rounded.apply(x * 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class RegionInside(Function):
    """Leaves a region in which PyTorch records gradients, within code for which it does not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        with torch.enable_grad():
            halved = x / 2
        return halved.sin()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] * (x / 2).cos() / 2


class ReadsAWeight(Function):
    """Beside its arguments, none of which has a gradient: so the weight gets none here."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, module: nn.Linear) -> Tensor:
        with torch.enable_grad():
            return module.weight[ids]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        return None, None


BOUND_EARLY = SquaredRelu.apply

DERIVED: dict[str, Body] = {
    "squared relu": lambda model, x: x + SquaredRelu.apply(model.up(x)),
    "taken hold of early": lambda model, x: x + BOUND_EARLY(model.up(x)),
    "setup_context": lambda model, x: FusedNorm.apply(model.up(x), model.scale, 1e-6),
    "in float32": lambda model, x: x + InFloat32.apply(model.up(x)),
    "in place": lambda model, x: Doubled.apply(model.up(x)),
    "factor 1": lambda model, x: Scaled.apply(model.up(x), 1.0),
    "without gradients": lambda model, x: x + _stopped(Rounded, x),
    "of no gradient": lambda model, x: model.up(x) + ReadsAWeight.apply(torch.arange(x.shape[1]), model.up),
    "in no_grad": lambda model, x: model.up(x) + _stopped(ReadsAWeight, torch.arange(x.shape[1]), model.up),
    "a region inside": lambda model, x: _between_regions(model, x),
}

OWN: dict[str, tuple[Body, str]] = {
    "straight through": (lambda model, x: Rounded.apply(model.up(x)), "Rounded(_)"),
    "reversed": (lambda model, x: Scaled.apply(model.up(x), -1.0), "Scaled(_, -1.0)"),
    "only one of two": (lambda model, x: Scaled.apply(Scaled.apply(model.up(x), 1.0), 0.5), "Scaled(_, 0.5)"),
    "clipped": (lambda model, x: Clipped.apply(model.up(x)), "Clipped(_)"),
    "bounded": (lambda model, x: BoundedRoot.apply(model.up(x).relu()), "BoundedRoot(_)"),
    "inside another": (lambda model, x: Outer.apply(model.up(x)), "Rounded(_)"),
}


def _stopped(function: type[Function], *args: Any) -> Tensor:
    with torch.no_grad():
        return function.apply(*args)


def _between_regions(model: OneBody, x: Tensor) -> Tensor:
    y = model.up(RegionInside.apply(model.up(x)))
    with torch.no_grad():
        scale = x.abs().mean()
    return x + y * scale


@pytest.mark.thorough
@pytest.mark.parametrize("name", DERIVED)
def test_a_function_with_the_derivative_of_its_forward_is_kept(name: str) -> None:
    model = OneBody(DERIVED[name])
    assert capture(model, batch()).notes == []
    if name != "in float32":  # which the graph computes in another order
        assert_capture_equals(model)


@pytest.mark.thorough
@pytest.mark.parametrize("name", OWN)
def test_a_function_with_another_backward_is_one_call(name: str) -> None:
    body, label = OWN[name]
    program = capture(OneBody(body), batch())
    assert [str(node.target) for node in calls_in(program.graph.graph)] == [label]
    assert program.notes == []
    assert_capture_equals(OneBody(body))


def test_a_module_that_is_run_without_gradients_is_refused_with_its_line() -> None:
    with pytest.raises(PlanError, match=r"ComputedAgain has .* reads up\.weight") as caught:
        capture(OneBody(lambda model, x: x + ComputedAgain.apply(x, model.up)), batch())
    assert caught.value.where.file == __file__
    assert "ComputedAgain.apply" in caught.value.where.code
    assert "as an argument of apply" in caught.value.fix


class Act(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Rounded.apply(x)


def test_the_module_that_applies_a_function_is_named() -> None:
    model = OneBody(lambda model, x: model.up(x))
    model.up = nn.Sequential(nn.Linear(WIDTH, WIDTH), Act()).double()  # pyright: ignore[reportAttributeAccessIssue]
    (call,) = calls_in(capture(model, batch()).graph.graph)
    assert where_of(call).module == "up.1"


def test_a_function_that_cannot_be_tried_keeps_its_own_backward_and_is_told() -> None:
    program = capture(OneBody(lambda model, x: NoValues.apply(model.up(x))), batch())
    (note,) = program.notes
    assert "NoValues at" in note
    assert "its backward could not be tested" in note
    (call,) = calls_in(program.graph.graph)
    assert (call.target.facts.linear, call.target.facts.cuts) == (False, ())


class FusedLoss(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        logits = (x @ weight.t()).float()
        ctx.save_for_backward(x, weight, labels, logits)
        return (logits.logsumexp(-1) - logits.gather(-1, labels[:, None]).squeeze(-1)).mean()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, weight, labels, logits = ctx.saved_tensors
        p = logits.softmax(-1) - F.one_hot(labels, logits.shape[-1])
        p = (p * grads[0] / len(labels)).to(x.dtype)
        return p @ weight, p.t() @ x, None


class Large(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50_000, 256, device="meta")

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return FusedLoss.apply(self.embed(ids).flatten(0, 1), self.embed.weight, labels.flatten())


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_function_on_huge_shapes_is_tried_on_small_ones(dtype: torch.dtype | None) -> None:
    ids = torch.empty(8, 1024, dtype=torch.int64, device="meta")
    assert capture(Large(), {"ids": ids, "labels": ids}, dtype=dtype).notes == []


@torch.library.custom_op("meshwright_tests::cube", mutates_args=())
def cube(x: Tensor) -> Tensor:
    return x**3


cube.register_fake(torch.empty_like)
cube.register_autograd(lambda ctx, grad: 0.5 * grad)


def test_an_op_with_a_registered_backward_keeps_it() -> None:
    model = OneBody(lambda model, x: cube(model.up(x)))
    assert capture(model, batch()).notes == []
    assert_capture_equals(model)


# ---- a Function is tried once for a model, also where the forward is called again


class Bounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sqrt()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad / torch.sqrt(torch.clip(4.0 * x, min=1e-6))


class Remembers(nn.Module):
    """Leaves its last state behind and reads none of an earlier call: recorded twice, to see that."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.state = nn.Linear(4, 4), None

    def forward(self, x: Tensor) -> Tensor:
        y = Bounded.apply(self.linear(x).exp())
        self.state = y.detach()
        return y.square().mean()


def test_recorded_calls_take_over_what_the_export_has_tried(monkeypatch: pytest.MonkeyPatch):
    tried: list[str] = []
    exports: list[object] = []
    facts_of, export = custom_functions.facts_of, torch.export.export

    def counted(use: Application) -> Facts:
        tried.append(use.name)
        return facts_of(use)

    def exported(model: nn.Module, *args: object, **kwargs: object) -> object:
        exports.append(model)
        return export(model, *args, **kwargs)  # pyright: ignore

    monkeypatch.setattr(custom_functions, "facts_of", counted)
    monkeypatch.setattr(torch.export, "export", exported)
    capture(Remembers(), {"x": torch.ones(2, 4)})
    assert len(exports) == 1
    assert len(tried) == 1
