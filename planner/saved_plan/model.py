"""The model of a plan: the user's module, kept until an engine has copied its shards, or a skeleton.

A skeleton has the parameters (without values) and buffers (with values) of a planned model, but none of its code.
"""

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from passes.errors import PlanError
from planner.capture.model.eager import uncompiled
from planner.capture.model.hub_format import HubFormat, hub_format


class Skeleton(nn.Module):
    """The model of a loaded plan: engines use its buffers, and initialize or load its parameters."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise PlanError("a loaded plan does not hold the code of your model", fix="plan the model itself")


def skeleton(
    parameters: Mapping[str, nn.Parameter], buffers: Mapping[str, Tensor], persistent: frozenset[str]
) -> Skeleton:
    """Build a skeleton from parameters and buffers by dotted name; a tied parameter is one object under all names."""
    root = Skeleton()
    for name, parameter in parameters.items():
        module, leaf = _module_of(root, name)
        module.register_parameter(leaf, parameter)
    for name, buffer in buffers.items():
        module, leaf = _module_of(root, name)
        module.register_buffer(leaf, buffer, persistent=name in persistent)
    return root


def _module_of(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    *path, leaf = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root._modules[part]  # pyright: ignore[reportAssignmentType]
    return root, leaf


def difference(planned: nn.Module, model: nn.Module) -> str | None:
    """Describe the first parameter or buffer of ``model`` that differs from ``planned`` in name, shape, dtype,
    requires_grad or ties; None if there is none. Values are not compared.
    """
    facts, wanted = dict(_facts(model)), dict(_facts(planned))
    names = [name for name in {**wanted, **facts} if facts.get(name) != wanted.get(name)]
    if not names:
        return None if model.training == planned.training else "it is planned in another mode (train or eval)"
    name = names[0]
    return f"{name} is {facts.get(name, 'absent')}, planned {wanted.get(name, 'none')}"


def _facts(model: nn.Module) -> Iterator[tuple[str, str]]:
    first: dict[int, str] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        tied = first.setdefault(id(tensor), name)
        words = [f"{list(tensor.shape)}", str(tensor.dtype), "trained" if tensor.requires_grad else "frozen"]
        yield name, " ".join([*words, *([f"one with {tied}"] if tied != name else [])])
    for name, tensor in model.named_buffers(remove_duplicate=False):
        yield name, f"a buffer {list(tensor.shape)} {tensor.dtype}"


class ModelOwner:
    """The owner of a plan's model. ``hub``: the format of its checkpoints, kept after the model is released."""

    def __init__(self, model: nn.Module, hub: HubFormat | None = None) -> None:
        self.take(model, hub or hub_format(uncompiled(model)))

    def take(self, model: nn.Module, hub: HubFormat) -> None:
        """Use ``model`` in place of the planned one."""
        self._model: nn.Module | None = model
        self._reference = weakref.ref(model)
        self.hub = hub

    @property
    def model(self) -> nn.Module | None:
        """The model without wrappers of torch.compile; None after it was garbage-collected."""
        model = self._reference()
        return None if model is None else uncompiled(model)

    def release(self) -> None:
        """Keep only a weak reference: the full model must not outlive the copying of shards."""
        self._model = None
