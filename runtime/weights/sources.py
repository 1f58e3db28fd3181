"""Sources of full tensors: the user's model, or fresh values if it is on the meta device.

With ``initialization.method: normal`` these; with ``model`` the draws of the model's own methods. A model that was
built with ``values_later`` has the values of its construction, whatever the method.

N(0, std)                                  matrices
N(0, std / sqrt(number of residual writes))    matrices that write into the residual
1, 0                                       scales of norms, biases
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor, nn

from passes.errors import PlanError
from planner.capture.model.meta_init import buffer_value
from planner.capture.model.recorded import RecordedValues, recorded_values
from planner.frozen_plan import Plan
from planner.spec.spec import Spec
from planner.stored.skeleton import Skeleton
from runtime.weights.fresh import normal
from runtime.weights.own_methods import OwnMethods


class WeightSource(Protocol):
    """A source of full tensors, by the user's dotted names.

    ``is_fresh``: this parameter has no values of its own, ``parameter`` would make some; ``rows`` makes those of some
    rows alone.
    """

    def is_fresh(self, fqn: str) -> bool: ...

    def release(self) -> None: ...

    def parameter(self, fqn: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor: ...

    def rows(self, fqn: str, shape: tuple[int, ...], dtype: torch.dtype, rows: tuple[int, int]) -> Tensor: ...

    def buffer(self, fqn: str) -> Tensor: ...


class ModelWeights:
    """The values that the user's module holds now. Raises PlanError for a tensor on meta that cannot be recreated."""

    def __init__(self, model: nn.Module) -> None:
        self._model: nn.Module | None = model
        self._parameters = dict(model.named_parameters(remove_duplicate=False))

    def is_fresh(self, fqn: str) -> bool:
        return False

    def release(self) -> None:
        """Release the user's model: full weights must not outlive the copying of shards."""
        self._model, self._parameters = None, {}

    def parameter(self, fqn: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return _real(self._parameters[fqn].detach(), f"parameter {fqn}")

    def rows(self, fqn: str, shape: tuple[int, ...], dtype: torch.dtype, rows: tuple[int, int]) -> Tensor:
        return self.parameter(fqn, shape, dtype)[rows[0] : rows[1]]

    def buffer(self, fqn: str) -> Tensor:
        assert self._model is not None, "the model was released"
        return buffer_value(self._model, fqn)


class OwnWeights(ModelWeights):
    """Fresh weights for parameters on the meta device by the model's own methods; real tensors are used unchanged."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        super().__init__(model)
        self._own = OwnMethods(model, seed)

    def is_fresh(self, fqn: str) -> bool:
        return self._parameters[fqn].is_meta

    def release(self) -> None:
        """The model stays: its methods run when fresh values are needed."""

    def parameter(self, fqn: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if not self._parameters[fqn].is_meta:
            return self._parameters[fqn].detach()
        return self._own.value(fqn, shape, dtype)


class RecordedWeights(ModelWeights):
    """The values that the model's construction would have drawn, made one parameter at a time."""

    def __init__(self, model: nn.Module, recorded: RecordedValues) -> None:
        super().__init__(model)
        self._recorded = recorded

    def is_fresh(self, fqn: str) -> bool:
        return self._parameters[fqn].is_meta

    def parameter(self, fqn: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        held = self._parameters.get(fqn)
        return self._recorded.value(fqn) if held is None or held.is_meta else held.detach()

    def is_of_base(self, fqn: str) -> bool:
        """Whether it is a tensor of the wrapped base, unchanged: its files hold it."""
        return fqn in self._recorded and self._recorded.is_of_base(fqn)

    def waits_for_base(self, fqn: str) -> bool:
        return fqn in self._recorded and self._recorded.waits_for_base(fqn)

    def reading(self, read: Callable[[str], Tensor]) -> AbstractContextManager[None]:
        """Inside, values that come of the base's are made; ``read`` gives those by their names in the base."""
        return self._recorded.reading(read)


class WeightsToLoad(ModelWeights):
    """No values: those of a plan that was loaded without its model, until an engine loads some."""

    def is_fresh(self, fqn: str) -> bool:
        return self._parameters[fqn].is_meta

    def parameter(self, fqn: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        raise PlanError(
            f"parameter {fqn} has no values: a loaded plan does not hold the code that draws those of your model",
            where="initialization.method",
            fix="set method: normal, load weights (MODEL hf:DIR, or load_pretrained), or resume a save",
        )


class InitialWeights(ModelWeights):
    """Fresh weights for parameters on the meta device; real tensors of the model are used unchanged.

    N(0, std) for matrices, divided by sqrt(number of residual writes) for those that write into the residual; 1 for
    the scales of norms and 0 for biases. Seeded by (seed, fqn): the values do not depend on the layout.
    """

    def __init__(
        self, model: nn.Module, roles: Mapping[str, str], *, seed: int, std: float, residual_scale: bool
    ) -> None:
        super().__init__(model)
        num_residual = sum(role == "residual" for role in roles.values())
        self._roles = roles
        self._seed = seed
        self._std = {"": std, "residual": std / math.sqrt(num_residual) if num_residual and residual_scale else std}

    def is_fresh(self, fqn: str) -> bool:
        return self._parameters[fqn].is_meta

    def parameter(self, fqn: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        held = self._parameters.get(fqn)
        if held is not None and not held.is_meta:
            return held.detach()
        return self.rows(fqn, shape, dtype, None)

    def rows(self, fqn: str, shape: tuple[int, ...], dtype: torch.dtype, rows: tuple[int, int] | None) -> Tensor:
        role = self._roles.get(fqn, "")
        if role in ("scale", "bias"):
            size = shape if rows is None else (rows[1] - rows[0], *shape[1:])
            return torch.full(size, 1.0 if role == "scale" else 0.0, dtype=dtype)
        return normal(fqn, shape, dtype, seed=self._seed, std=self._std[role], rows=rows)


def weight_source(plan: Plan, spec: Spec) -> WeightSource:
    """The weights of the model that was planned, fresh ones if it is on meta. Raises PlanError if it is gone."""
    decisions, model = plan.to_run()[0], plan.model
    if model is None:
        raise PlanError(
            "the planned model is gone: the first Engine took its weights",
            fix="plan the model again, or keep a reference while several engines take weights from it",
        )
    if not any(parameter.is_meta for parameter in model.parameters()):
        return ModelWeights(model)
    if (recorded := recorded_values(model)) is not None:
        return RecordedWeights(model, recorded)
    initial = spec.initialization
    if initial.method == "model" and isinstance(model, Skeleton):
        return WeightsToLoad(model)
    if initial.method == "model":
        return OwnWeights(model, spec.seed)
    return InitialWeights(
        model, decisions.roles, seed=spec.seed, std=initial.std, residual_scale=initial.residual_scale
    )


def _real(tensor: Tensor, what: str) -> Tensor:
    if tensor.is_meta:
        raise PlanError(
            f"{what} has no values: the model was built on the meta device",
            fix="build buffers on a real device (parameters may stay on meta), or load weights with "
            "load_pretrained(dir)",
        )
    return tensor
