"""The user's loss functions, of the outputs of one model or of several models, as one module.

    with_loss:   loss(model(**inputs), batch)      inputs: those that the model's forward accepts; batch: all of them
                 model(**batch)                    without a loss: the batch, given in rows, in the forms of a processor
    combine(loss=function, frozen=["reference"], policy=…, reference=…)     parameters: policy.…, reference.…
                 function(policy=…, reference=…, batch={…})                 calls each model as often as it likes

The module of ``with_loss`` is an object of a subclass that has the ``__dict__`` of the model: parameters, buffers,
submodules and attributes are the model's, under their own names. Its forward stands around the model's call, which runs
the hooks.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from passes.errors import PlanError
from passes.program.source_lines import where_of_definition, where_of_frame
from planner.capture.forms import Forms, given_by, require_unchanged
from planner.files.named_code import NamedCode, is_named

Loss = Callable[[Any, dict[str, Tensor]], Any] | None
_MODEL, _PARTS = "_meshwright_model", "_meshwright_parts"
_OF_THE_CALL = {"_forward_hooks": {}, "_forward_pre_hooks": {}, "_compiled_call_impl": None}  # the model's, in its call
FIX = "write `def loss(outputs, batch)`: the model's outputs and the dict of all inputs; it returns a scalar tensor"
_AT = "combine(…)"


def with_loss(model: nn.Module, loss: Callable[..., Any], name: str = "") -> nn.Module:
    """Return ``model`` with its loss: it takes every input by name, and returns ``loss(outputs, batch)``.

    It shares all tensors with ``model``, under the same names. ``loss`` gets the model's outputs as the model returns
    them, and the dict of all inputs; it returns a scalar, or a mapping with one under "loss". ``name``: as the spec has
    it. Raises PlanError if it takes other arguments.
    """
    name = name or name_of(loss)
    check_arguments(loss, "outputs", "batch", name=name, fix=FIX)
    return _made(model, loss, name, ())


def _made(model: nn.Module, loss: Loss, name: str, forms: Forms) -> nn.Module:
    made = object.__new__(_kind_of(type(model), loss, name, forms))
    object.__setattr__(made, "__dict__", model.__dict__)
    object.__setattr__(made, _MODEL, model)
    return made


def apply_loss(model: nn.Module, loss: str, forms: Forms = ()) -> tuple[nn.Module, str]:
    """Return the module that a step runs, and the name of its output that is the loss, by ``loss`` of the spec.

    ``forms``: of inputs that the module takes in rows, and the model in other forms. Raises PlanError if ``loss`` names
    a function that cannot be loaded, or takes other arguments.
    """
    function = loss_function(loss)
    if function is not None:
        check_arguments(function, "outputs", "batch", name=loss, fix=FIX)
    elif not forms:
        return model, loss
    return _made(model, function, loss, forms), loss if function is None else "auto"


def model_of(module: nn.Module) -> nn.Module:
    """Return the model inside a module with a loss; other modules unchanged."""
    return module if parts_of(type(module)) is None else getattr(module, _MODEL)


def parts_of(kind: type) -> tuple[type, Loss, Forms] | None:
    """Return (class of the model, loss, forms) for the class of a module with a loss; None for all others."""
    return vars(kind).get(_PARTS)


def accepted(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the inputs that the forward of ``model`` accepts. Raises PlanError if it needs others."""
    signature = inspect.signature(model.forward)
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values())
    found = {name: value for name, value in batch.items() if takes_all or name in signature.parameters}
    try:
        signature.bind(**found)
    except TypeError as error:
        raise other_inputs(error) from None
    return found


def other_inputs(error: TypeError) -> PlanError:
    """Return the refusal of inputs that do not fit the arguments of the model's forward."""
    return PlanError(
        f"the model does not accept these inputs: {error}",
        where="inputs",
        fix="name the keys under `inputs` as the arguments of the model's forward",
    )


class _Forward(property):
    """The forward of a module with a loss. A property precedes a forward that the model itself has as an attribute.

    ``__wrapped__``: the model's forward, for source lines in errors.
    """

    def __init__(self, base: Any, loss: Loss, name: str, forms: Forms) -> None:
        super().__init__(lambda module: functools.partial(_run, module, loss, name, forms))
        self.__wrapped__ = base.forward


def _run(module: nn.Module, loss: Loss, name: str, forms: Forms, /, **rows: Tensor) -> Any:
    model, batch = model_of(module), given_by(forms, rows)
    versions = {name: value._version for name, value in batch.items()}
    outputs = model(**(batch if loss is None else accepted(model, batch)))
    require_unchanged(forms, batch, versions)
    return outputs if loss is None else checked(loss(outputs, Batch(batch)), loss, name)


def _call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return nn.Module.__call__(module, *args, **kwargs)


def _kind_of(base: type, loss: Loss, name: str, forms: Forms) -> type:
    make = _kind if type(loss).__hash__ is not None else _kind.__wrapped__
    try:
        return make(base, loss, name, forms)
    except TypeError as error:
        what = f"{base.__name__} cannot get a loss of its own: {error}"
        fix = "hold the model in an nn.Module with a forward that returns the loss"
        raise PlanError(what, where="loss", fix=fix) from error


@functools.lru_cache(32)
def _kind(base: type, loss: Loss, name: str, forms: Forms) -> type:
    """Return the class of modules of ``base`` with this loss: one, so that equal modules have equal classes."""
    content = {
        "__slots__": (_MODEL,),
        "__module__": getattr(loss, "__module__", None) or base.__module__,
        "__qualname__": base.__qualname__,
        "__call__": _call,
        "forward": _Forward(base, loss, name, forms),
        _PARTS: (base, loss, forms),
        **{name: property(lambda _, value=value: value) for name, value in _OF_THE_CALL.items()},
    }
    return type(base)(base.__name__, (base,), content)


class Batch(dict[str, Tensor]):
    """The inputs of a loss function, by name."""

    def __missing__(self, name: str) -> Tensor:
        frame = sys._getframe(1)
        raise PlanError(
            f"the loss function reads batch[{name!r}], which is no input (inputs: {', '.join(self)})",
            where=where_of_frame(frame.f_code, frame.f_lineno),
            fix=f"add {name} to `inputs` of the spec, or read another one",
        )


def loss_function(loss: str) -> Callable[..., Any] | None:
    """Return the function that ``loss`` of a spec names; None if it names none. Raises PlanError."""
    if not is_named(loss):
        return None
    function = NamedCode(loss, "loss").load()
    if not callable(function):
        raise PlanError(f"loss: {loss} is a {type(function).__name__}, not a function", where="loss", fix=FIX)
    return function


def name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


def check_arguments(function: Callable[..., Any], *args: str, name: str, fix: str, **kwargs: str) -> None:
    """Raise PlanError unless ``function`` can be called with these arguments."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of C
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        what = f"the loss function {name} takes {signature}, not ({', '.join((*args, *kwargs))})"
        raise PlanError(what, where=where_of_definition(function) or "loss", fix=fix) from None


def checked(result: Any, function: Callable[..., Any], name: str) -> Any:
    """Return the result of a loss function. Raises PlanError unless it is, or has, a scalar with a gradient."""
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if isinstance(loss, Tensor) and loss.numel() == 1 and (loss.requires_grad or not torch.is_grad_enabled()):
        return result
    found = f"a tensor {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
    if isinstance(loss, Tensor) and loss.numel() == 1:
        found = "a scalar without a gradient"
    if isinstance(result, Mapping):
        found = f'a mapping with {found} under "loss"' if "loss" in result else 'a mapping without "loss"'
    raise PlanError(
        f"the loss function {name} returns {found}",
        where=where_of_definition(function) or "loss",
        fix='return a scalar tensor that depends on the model\'s outputs, or a dict with one under "loss"',
    )


def combine(*, loss: Callable[..., Any], frozen: Collection[str] = (), **models: nn.Module) -> Combined:
    """Return one module of ``models``, which keep their weights. Its forward takes every input by name.

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
    """Several models as submodules, with a loss over them."""

    def __init__(self, models: Mapping[str, nn.Module], loss: Callable[..., Any], frozen: frozenset[str]) -> None:
        super().__init__()
        self.loss_function, self._frozen = loss, frozen
        for name, model in models.items():
            self.add_module(name, model)
        for name in sorted(frozen):
            models[name].requires_grad_(False)
        self.train(any(model.training for name, model in models.items() if name not in frozen))

    def train(self, mode: bool = True) -> Combined:
        """Set the mode of all models but frozen ones, which stay in ``eval()``: without dropout."""
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
