"""The model of a plan: the user's, held until an engine has copied its shards and then only referred to; or a skeleton.

A skeleton has the names of a planned model and none of its code: parameters without values, buffers with theirs.
"""

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from passes.errors import PlanError
from planner.capture.model.eager import uncompiled
from planner.capture.model.hub_format import HubFormat, hub_format


class Skeleton(nn.Module):
    """The model of a plan that was loaded: engines take its buffers, and make or load its parameters."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise PlanError("a loaded plan does not hold the code of your model", fix="plan the model itself")


def skeleton(
    parameters: Mapping[str, nn.Parameter], buffers: Mapping[str, Tensor], persistent: frozenset[str]
) -> Skeleton:
    """``parameters`` and ``buffers`` by dotted name; a tied parameter is one object under all its names."""
    root = Skeleton()
    for name, parameter in parameters.items():
        holder, leaf = _holder(root, name)
        holder.register_parameter(leaf, parameter)
    for name, buffer in buffers.items():
        holder, leaf = _holder(root, name)
        holder.register_buffer(leaf, buffer, persistent=name in persistent)
    return root


def _holder(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    *path, leaf = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root._modules[part]  # pyright: ignore[reportAssignmentType]
    return root, leaf


def difference(planned: nn.Module, model: nn.Module) -> str | None:
    """The first parameter or buffer of ``model`` that is not as in ``planned``: by name, shape, dtype, whether it is
    trained, under which names it is one tensor. None if all are. Values are not compared.
    """
    found, wanted = dict(_facts(model)), dict(_facts(planned))
    names = [name for name in {**wanted, **found} if found.get(name) != wanted.get(name)]
    if not names:
        return None if model.training == planned.training else "it is planned in another mode (train or eval)"
    name = names[0]
    return f"{name} is {found.get(name, 'absent')}, planned {wanted.get(name, 'none')}"


def _facts(model: nn.Module) -> Iterator[tuple[str, str]]:
    first: dict[int, str] = {}
    for name, held in model.named_parameters(remove_duplicate=False):
        tied = first.setdefault(id(held), name)
        words = [f"{list(held.shape)}", str(held.dtype), "trained" if held.requires_grad else "frozen"]
        yield name, " ".join([*words, *([f"one with {tied}"] if tied != name else [])])
    for name, held in model.named_buffers(remove_duplicate=False):
        yield name, f"a buffer {list(held.shape)} {held.dtype}"


class ModelOwner:
    """Owns the model of a plan. ``hub``: the format of its checkpoints, which are loaded and saved without it."""

    def __init__(self, model: nn.Module, hub: HubFormat | None = None) -> None:
        self.take(model, hub or hub_format(uncompiled(model)))

    def take(self, model: nn.Module, hub: HubFormat) -> None:
        """Hold ``model`` in place of the one that was planned."""
        self._model: nn.Module | None = model
        self._reference = weakref.ref(model)
        self.hub = hub

    @property
    def model(self) -> nn.Module | None:
        """Without wrappers of torch.compile; None when it is gone."""
        model = self._reference()
        return None if model is None else uncompiled(model)

    def release(self) -> None:
        """Keep only a weak reference: the full model must not outlive the copying of shards."""
        self._model = None
