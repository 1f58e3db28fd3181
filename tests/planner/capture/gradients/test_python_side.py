"""What a forward says about gradients in Python reaches the captured graph, or is refused with the user's line."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import graph as saved_graph
from torch.autograd.function import _SingleLevelFunction
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from passes.errors import PlanError
from planner.capture.export import capture
from tests.models.one_body import Body, OneBody, assert_capture_equals, batch
from tests.tools.captured_ops import gradients


def by_inference_mode(model: OneBody, x: Tensor) -> Tensor:
    with torch.inference_mode():
        size = model.up(x).abs().mean(-1, keepdim=True)
    return model.up(x) / size.clone()


def by_data(model: OneBody, x: Tensor) -> Tensor:
    y = model.up(x)
    return y * y.data


def gradient_as_constant(model: OneBody, x: Tensor) -> Tensor:
    y = model.up(x)
    (g,) = torch.autograd.grad(y.pow(3).sum(), y, retain_graph=True)
    return x + y * g


def gradient_with_graph(model: OneBody, x: Tensor) -> Tensor:
    y = model.up(x)
    (g,) = torch.autograd.grad(y.pow(3).sum(), y, create_graph=True)
    return x + y * g


def backward_of_a_detached_part(model: OneBody, x: Tensor) -> Tensor:
    y = model.up(x).detach().requires_grad_()
    y.pow(3).sum().backward()
    return model.up(x) * y.grad


def frozen_meanwhile(model: OneBody, x: Tensor) -> Tensor:
    model.scale.requires_grad_(False)
    y = model.up(x)
    model.scale.requires_grad_(True)
    return y * model.scale


def by_vmap(model: OneBody, x: Tensor) -> Tensor:
    places = torch.arange(x.shape[-1])
    far = torch.vmap(torch.vmap(lambda i, j: i >= j, (None, 0)), (0, None))(places, places)
    return torch.vmap(lambda row: model.up(row) * row.sum())(x * far.sum(0))


KEPT: dict[str, Body] = {
    "reentrant": lambda model, x: checkpoint(model.up, x, use_reentrant=True),
    "non-reentrant": lambda model, x: checkpoint(model.up, x, use_reentrant=False),
    "reentrant in sequence": lambda model, x: checkpoint_sequential([model.up, nn.GELU()], 2, x, use_reentrant=True),
    "reentrant without a gradient": lambda model, x: model.up(x) + checkpoint(model.up, x.detach(), use_reentrant=True),
    "data": by_data,
    "vmap": by_vmap,
    "gradient as constant": gradient_as_constant,
    "gradient with graph": gradient_with_graph,
    "backward of a detached part": backward_of_a_detached_part,
    "retain_grad": lambda model, x: _with_retained_gradient(model.up(x)),
    "save_on_cpu": lambda model, x: _on_cpu(model.up, x),
}


def _with_retained_gradient(y: Tensor) -> Tensor:
    if y.requires_grad:
        y.retain_grad()
    return y * 2


def _on_cpu(layer: nn.Module, x: Tensor) -> Tensor:
    with saved_graph.save_on_cpu():
        return layer(x).pow(2)


@pytest.mark.thorough
@pytest.mark.parametrize("name", KEPT)
def test_it_is_captured_as_it_runs(name: str) -> None:
    assert_capture_equals(OneBody(KEPT[name]))


@pytest.mark.thorough
def test_inference_mode_is_captured_as_a_region_without_gradients() -> None:
    def by_no_grad(model: OneBody, x: Tensor) -> Tensor:
        with torch.no_grad():
            size = model.up(x).abs().mean(-1, keepdim=True)
        return model.up(x) / size.clone()

    kinds = [
        [node.target for node in capture(OneBody(body), batch()).graph.graph.nodes if node.op == "call_function"]
        for body in (by_inference_mode, by_no_grad)
    ]
    assert torch.ops.aten.detach.default in kinds[0]
    assert kinds[0] == kinds[1]


def test_a_parameter_that_is_frozen_while_nothing_reads_it_is_trained() -> None:
    model = OneBody(frozen_meanwhile)
    assert_capture_equals(model)
    assert model.scale.requires_grad


def test_the_base_of_a_model_with_a_disabled_adapter_is_captured() -> None:
    peft = pytest.importorskip("peft")

    def against_the_base(model: OneBody, x: Tensor) -> Tensor:
        with torch.no_grad(), adapted.disable_adapter():
            base = model.up(x)
        return model.up(x) - base + x

    model = OneBody(against_the_base)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["up"], init_lora_weights=False))
    model.double()
    loss, found = gradients(model, batch())
    expected = model(**batch())
    torch.testing.assert_close(loss, expected)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert sorted(trained) == ["up.lora_A.default.weight", "up.lora_B.default.weight"]
    for name, truth in zip(trained, torch.autograd.grad(expected, list(trained.values())), strict=True):
        torch.testing.assert_close(found[name], truth)


def test_a_checkpoint_that_is_given_no_gradient_is_told() -> None:
    (note,) = capture(OneBody(KEPT["reentrant without a gradient"]), batch()).notes
    assert "nothing inside it gets a gradient" in note
    assert capture(OneBody(KEPT["reentrant"]), batch()).notes == []


@pytest.mark.sampled(1)
@pytest.mark.parametrize("keeps", [True, False])
def test_forces_that_read_weights_and_results_which_autograd_kept_are_captured(keeps: bool) -> None:
    def forces(model: OneBody, x: Tensor) -> Tensor:
        place = x.detach().requires_grad_()
        energy = model.up(place).tanh().softmax(-1).pow(2).mean()
        (force,) = torch.autograd.grad(energy, place, create_graph=keeps)
        return model.up(x) + force

    assert_capture_equals(OneBody(forces))
    assert not capture(OneBody(forces), batch()).constants


def test_a_gradient_that_export_cannot_follow_is_refused_as_that() -> None:
    def forces(model: OneBody, x: Tensor) -> Tensor:  # the mean and the deviation are no results of the graph
        place = x.detach().requires_grad_()
        energy = nn.functional.layer_norm(model.up(place), x.shape[-1:]).pow(3).sum()
        (force,) = torch.autograd.grad(energy, place, create_graph=True)  # here
        return x + force

    with pytest.raises(PlanError, match="a gradient inside the forward") as caught:
        capture(OneBody(forces), batch())
    assert "# here" in str(caught.value)


def test_a_branch_by_values_is_refused_with_where_as_the_fix() -> None:
    def branches(model: OneBody, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda y: model.up(y) + 1, lambda y: y * 2, (x,))

    with pytest.raises(PlanError, match="the model uses cond, which cannot be planned") as caught:
        capture(OneBody(branches), batch())
    assert "torch.where(condition, a, b)" in caught.value.fix


def hook_of_the_node(model: OneBody, x: Tensor) -> Tensor:
    y = model.up(x)
    if y.grad_fn is not None:
        y.grad_fn.register_hook(lambda inputs, outputs: (inputs[0] * 0.5,))  # refused
    return y


def hook_of_the_tensor(model: OneBody, x: Tensor) -> Tensor:
    y = model.up(x)
    y.register_hook(lambda gradient: gradient * 0.5)  # refused
    return y


def hook_of_several(model: OneBody, x: Tensor) -> Tensor:
    y = model.up(x)
    saved_graph.register_multi_grad_hook([y], lambda gradients: None)  # refused
    return y


def detached_in_place(model: OneBody, x: Tensor) -> Tensor:
    y = model.up(x)
    y.detach_()  # refused
    return x + y


def data_assigned(model: OneBody, x: Tensor) -> Tensor:
    model.up.weight.data = model.up.weight.data * 0.5  # refused
    return model.up(x)


def gradient_read(model: OneBody, x: Tensor) -> Tensor:
    return x if model.up.weight.grad is None else model.up(x)  # refused


def frozen_by_method(model: OneBody, x: Tensor) -> Tensor:
    model.up.bias.requires_grad_(False)  # refused
    return model.up(x)


def frozen_by_attribute(model: OneBody, x: Tensor) -> Tensor:
    model.up.bias.requires_grad = False  # refused
    return model.up(x)


def frozen_while_it_is_read(model: OneBody, x: Tensor) -> Tensor:
    model.scale.requires_grad_(False)  # refused
    y = model.up(x) * model.scale
    model.scale.requires_grad_(True)
    return y


def frozen_by_module(model: OneBody, x: Tensor) -> Tensor:
    model.up.requires_grad_(False)  # refused
    return model.up(x)


def compressed(model: OneBody, x: Tensor) -> Tensor:
    with saved_graph.saved_tensors_hooks(lambda t: t.half(), lambda t: t.double()):  # refused
        return model.up(x).pow(2)


def backward_of_the_model(model: OneBody, x: Tensor) -> Tensor:
    y = model.up(x)
    y.sum().backward(retain_graph=True)  # refused
    return y


def by_grad(model: OneBody, x: Tensor) -> Tensor:
    return torch.func.vmap(torch.func.grad(lambda row: row.pow(3).sum()))(model.up(x))  # refused


def by_jvp(model: OneBody, x: Tensor) -> Tensor:
    return torch.func.jvp(lambda y: y**3, (model.up(x),), (torch.ones_like(x),))[1]  # refused


REFUSED: dict[Body, str] = {
    hook_of_the_node: "a hook on a gradient would be lost",
    hook_of_the_tensor: "a hook on a gradient would be lost",
    hook_of_several: "a hook on a gradient would be lost",
    detached_in_place: "detach_",
    data_assigned: "writes into a tensor",
    gradient_read: "reads the gradient of a parameter",
    frozen_by_method: "changes requires_grad of a parameter",
    frozen_by_attribute: "changes requires_grad of a parameter",
    frozen_while_it_is_read: "changes requires_grad of a parameter",
    frozen_by_module: "changes requires_grad of a parameter",
    compressed: "saved_tensors_hooks would be lost",
    backward_of_the_model: "adds to the gradients of parameters",
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("body", REFUSED, ids=lambda body: body.__name__)
def test_it_is_refused_at_its_line(body: Callable[..., Any]) -> None:
    with pytest.raises(PlanError, match=REFUSED[body]) as caught:
        capture(OneBody(body), batch())
    assert caught.value.where.file == __file__
    assert caught.value.where.code.endswith("# refused")
    assert caught.value.fix
    assert_nothing_is_left()


@pytest.mark.parametrize("body", [by_grad, by_jvp], ids=lambda body: body.__name__)
def test_torch_func_is_refused(body: Body) -> None:
    with pytest.raises(PlanError, match=r"a transform of torch\.func") as caught:
        capture(OneBody(body), batch())
    assert caught.value.where.code.endswith("# refused")
    assert_nothing_is_left()


def test_nothing_of_pytorch_stays_replaced() -> None:
    capture(OneBody(KEPT["data"]), batch())
    assert_nothing_is_left()


def assert_nothing_is_left() -> None:
    assert not {"data", "grad", "requires_grad", "grad_fn"} & set(vars(Tensor))
    assert "apply" not in vars(_SingleLevelFunction)
    owners = (
        Tensor.register_hook,
        saved_graph.register_multi_grad_hook,
        torch.inference_mode.__enter__,
        saved_graph.saved_tensors_hooks.__enter__,
        torch.autograd._engine_run_backward,
    )
    assert all(function.__module__.startswith("torch") for function in owners)
    weight = nn.Parameter(torch.ones(2))
    handle = weight.register_hook(lambda gradient: gradient * 3)
    (weight.data * weight).sum().backward()
    handle.remove()
    assert weight.grad is not None
    assert weight.grad.tolist() == [3.0, 3.0]
