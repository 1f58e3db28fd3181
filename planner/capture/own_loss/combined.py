"""Several models and one loss over them, as one module: DPO with its reference, distillation with its teacher.

combine(loss=function, frozen=["reference"], policy=…, reference=…)       parameters: policy.…, reference.…
function(policy=…, reference=…, batch={…})                                calls each model as often as it likes
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from passes.errors import PlanError
from planner.capture.own_loss.functions import Batch, check_arguments, checked, name_of

_AT = "combine(…)"


def combine(*, loss: Callable[..., Any], frozen: Collection[str] = (), **models: nn.Module) -> Combined:
    """One module of ``models``, which keep their weights. Its forward takes every input by name.

    ``loss`` gets each model under its name and the dict of all inputs as ``batch``, all by keyword; it returns a
    scalar, or a mapping with one under "loss". ``frozen``: names of models that are not trained: their parameters no
    longer require gradients, they stay in ``eval()``, and their calls run under ``torch.no_grad()``.
    Raises PlanError for other models, names or arguments.
    """
    fix = f"write `def loss({', '.join((*models, 'batch'))})`"
    _check(models, frozen)
    check_arguments(loss, name=name_of(loss), fix=fix, **dict.fromkeys((*models, "batch"), ""))
    return Combined(models, loss, frozenset(frozen))


class Combined(nn.Module):
    """Owns the models, as submodules by their names."""

    def __init__(self, models: Mapping[str, nn.Module], loss: Callable[..., Any], frozen: frozenset[str]) -> None:
        super().__init__()
        self.loss_function, self._frozen = loss, frozen
        for name, model in models.items():
            self.add_module(name, model)
        for name in sorted(frozen):
            models[name].requires_grad_(False)
        self.train(any(model.training for name, model in models.items() if name not in frozen))

    def train(self, mode: bool = True) -> Combined:
        """Frozen models stay as they are evaluated: without dropout."""
        super().train(mode)
        for name in sorted(self._frozen):
            self.get_submodule(name).eval()
        return self

    def forward(self, **batch: Tensor) -> Any:
        models = {name: _Frozen(m) if name in self._frozen else m for name, m in self.named_children()}
        result = self.loss_function(**models, batch=Batch(batch))
        return checked(result, self.loss_function, name_of(self.loss_function))


class _Frozen:
    """Calls a model without gradients; has its attributes."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return self._model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _check(models: Mapping[str, nn.Module], frozen: Collection[str]) -> None:
    for name, model in models.items():
        if not isinstance(model, nn.Module):
            what = f"the model {name} is a {type(model).__name__}, not a torch.nn.Module"
            raise PlanError(what, where=_AT, fix="pass models by name: policy=…, reference=…")
        if name in ("batch", "loss_function") or hasattr(nn.Module, name):
            raise PlanError(f"no model can have the name {name}", where=_AT, fix="choose another name")
    unknown = [name for name in frozen if name not in models]
    if unknown or not models or isinstance(frozen, str):
        what = f"frozen names no model: {', '.join(unknown) or frozen}" if models else "combine() got no models"
        raise PlanError(what, where=_AT, fix=f"name some of: {', '.join(models) or 'policy=…, reference=…'}, in a list")
    of_frozen = {id(p): name for name in frozen for p in models[name].parameters()}
    for name, model in models.items():
        shared = next((of_frozen[id(p)] for p in model.parameters() if name not in frozen and id(p) in of_frozen), None)
        if shared is not None:
            what = f"{name} would be frozen too: it shares parameters with {shared}"
            raise PlanError(what, where=_AT, fix=f"copy one of them: {shared}=copy.deepcopy({name})")
