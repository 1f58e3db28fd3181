"""Hooks on gradients are refused at the line of their function; hooks of the forward are part of the model."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn
from torch.nn.modules import module as torch_modules

from passes.errors import PlanError
from planner.capture.export import capture
from tests.models.one_body import OneBody, assert_capture_equals, batch


def hook(*given: Any) -> None:
    """Does nothing: that it is there is enough."""


class Hook:
    def __call__(self, *given: Any) -> None: ...


def model_with(register: Callable[[OneBody], Any]) -> OneBody:
    model = OneBody(lambda model, x: model.up(x))
    register(model)
    return model


REFUSED: dict[str, tuple[Callable[[OneBody], Any], str, str]] = {
    "full backward": (lambda m: m.up.register_full_backward_hook(hook), "module up", "up"),
    "full backward pre": (lambda m: m.up.register_full_backward_pre_hook(hook), "module up", "up"),
    "old backward": (lambda m: m.up.register_backward_hook(hook), "module up", "up"),
    "of the model": (lambda m: m.register_full_backward_hook(hook), "module OneBody", ""),
    "parameter": (lambda m: m.up.weight.register_hook(hook), "parameter up.weight", "up"),
    "after accumulation": (
        lambda m: m.up.weight.register_post_accumulate_grad_hook(hook),
        "parameter up.weight",
        "up",
    ),
    "partial": (lambda m: m.scale.register_hook(functools.partial(hook, 1)), "parameter scale", ""),
    "callable object": (lambda m: m.scale.register_hook(Hook()), "parameter scale", ""),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", REFUSED)
def test_a_hook_on_a_gradient_is_refused_at_the_line_of_its_function(name: str) -> None:
    register, what, module = REFUSED[name]
    with pytest.raises(PlanError, match=f"a hook on the gradients of {what} would be lost") as caught:
        capture(model_with(register), batch())
    assert caught.value.where.module == module
    assert caught.value.where.file == __file__
    assert caught.value.where.code.startswith("def ")
    assert "remove the hook" in caught.value.fix


def test_a_hook_on_every_module_is_refused() -> None:
    handle = torch_modules.register_module_full_backward_hook(hook)
    try:
        with pytest.raises(PlanError, match="a hook on the gradients of every module"):
            capture(OneBody(lambda model, x: model.up(x)), batch())
    finally:
        handle.remove()


def test_a_removed_hook_is_no_hook() -> None:
    model = model_with(lambda m: m.up.weight.register_hook(hook).remove())
    assert capture(model, batch()).notes == []


def test_forward_hooks_are_captured() -> None:
    def register(model: OneBody) -> None:
        model.up.register_forward_hook(lambda module, args, output: output * 0.5)
        model.up.register_forward_pre_hook(lambda module, args: (args[0] + 1,))

    assert_capture_equals(model_with(register))


def test_the_hooks_of_weight_norm_are_captured_also_after_a_forward() -> None:
    model = model_with(lambda m: nn.utils.weight_norm(m.up))
    assert_capture_equals(model)
    model(**batch())
    model.zero_grad()
    assert_capture_equals(model)
