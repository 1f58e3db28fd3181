"""A model and a loss function of the user's, as one module with the names of the model.

    loss(model(**inputs), batch)       inputs: those of the batch that the model's forward accepts; batch: all of them
    model(**batch)                     without a loss: the batch, given in rows, in the forms of a processor

The module is an object of a subclass that has the ``__dict__`` of the model: parameters, buffers, submodules and
attributes are the model's, under their own names. Its forward stands around the model's call, which runs the hooks.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from passes.errors import PlanError
from planner.capture.own_loss.functions import FIX, Batch, check_arguments, checked, loss_function, name_of
from planner.forms import Forms, given_by, require_unchanged

Loss = Callable[[Any, dict[str, Tensor]], Any] | None
_MODEL, _PARTS = "_meshwright_model", "_meshwright_parts"
_OF_THE_CALL = {"_forward_hooks": {}, "_forward_pre_hooks": {}, "_compiled_call_impl": None}  # the model's, in its call


def with_loss(model: nn.Module, loss: Callable[..., Any], name: str = "") -> nn.Module:
    """``model`` with its loss: it takes every input by name, and returns ``loss(outputs, batch)``.

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
    """The module that a step runs, and the name of its output that is the loss, by ``loss`` of the spec.

    ``forms``: of inputs that the module takes in rows, and the model in other forms. Raises PlanError if ``loss`` names
    a function which cannot be loaded, or takes other arguments.
    """
    function = loss_function(loss)
    if function is not None:
        check_arguments(function, "outputs", "batch", name=loss, fix=FIX)
    elif not forms:
        return model, loss
    return _made(model, function, loss, forms), loss if function is None else "auto"


def model_of(module: nn.Module) -> nn.Module:
    """The model inside of a module with a loss; other modules themselves."""
    return module if parts_of(type(module)) is None else getattr(module, _MODEL)


def parts_of(kind: type) -> tuple[type, Loss, Forms] | None:
    """The class of the model, the loss and the forms, for the class of a module with a loss; None for all others."""
    return vars(kind).get(_PARTS)


def accepted(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inputs that the forward of ``model`` accepts. Raises PlanError if it needs others."""
    signature = inspect.signature(model.forward)
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values())
    found = {name: value for name, value in batch.items() if takes_all or name in signature.parameters}
    try:
        signature.bind(**found)
    except TypeError as error:
        raise PlanError(
            f"the model does not accept these inputs: {error}",
            where="inputs",
            fix="name the keys under `inputs` as the arguments of the model's forward",
        ) from None
    return found


class _Forward(property):
    """The forward of a module with a loss. A property precedes a forward that the model itself has as an attribute.

    ``__wrapped__``: the model's, for the source lines in errors.
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
    """The class of modules of ``base`` with this loss: one, so that equal modules have equal classes."""
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
