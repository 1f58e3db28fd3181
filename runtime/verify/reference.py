"""The truth: the unmodified model in one process, trained by plain torch on the full global batch.

No decision of the planner and no pass takes part, so a difference from the engine is a difference from the user's
model.

The model is trained itself, not a copy of it. A copy may be another model: tensors in a closure, a hook or a patched
forward stay those of the original, so that a copied reference would lose the same weights as a copied capture, and
agree with it. A second build from the same seed is equal only if every draw of the constructor follows torch's seed.
The object itself needs no such assumption, and ``Untouched`` checks that nothing has changed it before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from passes.errors import PlanError
from planner.capture.model.caches import caches_off
from planner.capture.model.compiled import in_eager_mode
from planner.capture.model.exchange import swap
from planner.capture.model.reference import load_model
from planner.capture.own_loss.with_loss import apply_loss
from planner.frozen_plan import Plan
from planner.sharding.parameters import ParameterPlan
from planner.spec.spec import Spec
from runtime.audit.own_module import loss_of
from runtime.distributed.fingerprint import fingerprint_of_model
from runtime.optimizer.lr import LearningRate
from runtime.verify.optimizers import optimizer_of
from runtime.weights.sources import weight_source

if TYPE_CHECKING:
    from runtime.verify.named_draws import NamedDraws  # it captures: a run of training does not


class Untouched:
    """Owns the fingerprints of a model's weights as they were when it was made."""

    def __init__(self, model: nn.Module) -> None:
        self._before = fingerprint_of_model(model)

    def check(self, model: nn.Module) -> None:
        """Raise PlanError if ``model`` has changed since: a reference that starts elsewhere would prove nothing."""
        now = fingerprint_of_model(model)
        names = [name for name in {**self._before, **now} if self._before.get(name) != now.get(name)]
        if names:
            raise PlanError(
                f"the plan or its engine has changed the model: {names[0]}, {len(names)} tensors in all",
                where=names[0].rpartition(".")[0],
                fix="this is a bug in meshwright: please report it with the model",
            )


def with_values(model: nn.Module, reference: str, plan: Plan, spec: Spec) -> nn.Module:
    """``model``, which was planned, if it holds values; else another with those of its directory or seed, in the same
    mode. One that its own code builds on the meta device has the values that engines draw for it.
    """
    if not _is_on_meta(model):
        return model
    found = load_model(reference, materialize=True, seed=spec.seed).train(model.training)
    if _is_on_meta(found):
        source = weight_source(plan, spec)
        for name, parameter in found.named_parameters():
            value = source.parameter(name, tuple(parameter.shape), parameter.dtype).clone()
            stand_in = nn.Parameter(value, parameter.requires_grad)
            stand_in.__dict__.update(vars(parameter))  # pyright: ignore[reportAttributeAccessIssue]
            swap(parameter, stand_in)
    return found


def _is_on_meta(model: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in model.parameters())


def _dtype_of(spec: Spec) -> torch.dtype | None:
    from planner.captured import dtype_of  # it captures: a run of training does not

    return dtype_of(spec)


def in_its_dtype(batch: Mapping[str, Tensor], spec: Spec) -> dict[str, Tensor]:
    """``batch`` as ranks read it: its floats in the dtype of the parameters, if a spec sets one."""
    dtype = _dtype_of(spec)
    return {name: v if dtype is None or not v.is_floating_point() else v.to(dtype) for name, v in batch.items()}


class OneProcess:
    """Trains ``model`` itself. Owns torch's optimizer over it, and the count of updates.

    Made after the engine that it is compared with, which takes its weights from the same model.
    ``draws``: the names of its draws, if dropout is on. ``parameters``: the plan's rows, if its optimizer has a rule of
    matrices.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: Spec,
        draws: NamedDraws | None = None,
        parameters: Iterable[ParameterPlan] = (),
    ) -> None:
        self.model, self.draws = model, draws
        if (dtype := _dtype_of(spec)) is not None:
            self.model.to(dtype)
        self.spec = spec
        self._module, self._wanted = apply_loss(model, spec.loss)
        self.rate = LearningRate(spec.optimizer)
        self.optimizer = optimizer_of(
            self.model, spec.optimizer, {p.name: p.matrices for p in parameters if p.matrices}
        )
        self.num_updates = 0

    def forward_backward(self, batch: Mapping[str, Tensor]) -> float:
        """The loss of the global batch; gradients are left in ``.grad``."""
        self.optimizer.zero_grad()
        draws = self.draws
        # caches are for generation: with one, some models mask otherwise
        rows = self.spec.in_rows(batch)
        drawn = nullcontext() if draws is None else draws.forward(self.num_updates, rows)
        with in_eager_mode(), caches_off(self.model), drawn:
            loss = loss_of(self._module(**in_its_dtype(batch, self.spec)), self._wanted)
        with in_eager_mode(), nullcontext() if draws is None else draws.backward():
            loss.backward()
        return loss.item()

    def update(self) -> float:
        """Clip, one AdamW step at this update's learning rate; returns the gradient norm before clipping."""
        o = self.spec.optimizer
        groups = self.optimizer.param_groups
        parameters = [p for group in groups for p in group["params"]]
        norm = nn.utils.clip_grad_norm_(parameters, o.clip_grad_norm or float("inf"))
        rate = self.rate.at(self.num_updates)
        for group in groups:
            group["lr"] = rate * group["factor"]
        self.optimizer.step()
        self.num_updates += 1
        return norm.item()

    def train_step(self, batch: Mapping[str, Tensor]) -> float:
        loss = self.forward_backward(batch)
        self.update()
        return loss
