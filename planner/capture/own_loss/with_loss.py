"""A model and a loss function of the user's, as one module with the names of the model.

    loss(model(**inputs), batch)       inputs: those of the batch that the model's forward accepts; batch: all of them

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

Loss = Callable[[Any, dict[str, Tensor]], Any]
_MODEL, _PARTS = "_meshwright_model", "_meshwright_parts"
_OF_THE_CALL = {"_forward_hooks": {}, "_forward_pre_hooks": {}, "_compiled_call_impl": None}  # the model's, in its call


def with_loss(model: nn.Module, loss: Loss, name: str = "") -> nn.Module:
    """``model`` with its loss: it takes every input by name, and returns ``loss(outputs, batch)``.

    It shares all tensors with ``model``, under the same names. ``loss`` gets the model's outputs as the model returns
    them, and the dict of all inputs; it returns a scalar, or a mapping with one under "loss". ``name``: as the spec has
    it. Raises PlanError if it takes other arguments.
    """
    name = name or name_of(loss)
    check_arguments(loss, "outputs", "batch", name=name, fix=FIX)
    made = object.__new__(_kind_of(type(model), loss, name))
    object.__setattr__(made, "__dict__", model.__dict__)
    object.__setattr__(made, _MODEL, model)
    return made


def apply_loss(model: nn.Module, loss: str) -> tuple[nn.Module, str]:
    """The module that a step runs, and the name of its output that is the loss, by ``loss`` of the spec.

    Raises PlanError if that names a function which cannot be loaded, or takes other arguments.
    """
    function = loss_function(loss)
    return (model, loss) if function is None else (with_loss(model, function, loss), "auto")


def model_of(module: nn.Module) -> nn.Module:
    """The model inside of a module with a loss; other modules themselves."""
    return module if parts_of(type(module)) is None else getattr(module, _MODEL)


def parts_of(kind: type) -> tuple[type, Loss] | None:
    """The class of the model and the loss, for the class of a module with a loss; None for all others."""
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

    def __init__(self, base: Any, loss: Loss, name: str) -> None:
        super().__init__(lambda module: functools.partial(_run, module, loss, name))
        self.__wrapped__ = base.forward


def _run(module: nn.Module, loss: Loss, name: str, /, **batch: Tensor) -> Any:
    model = model_of(module)
    outputs = model(**accepted(model, batch))
    return checked(loss(outputs, Batch(batch)), loss, name)


def _call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return nn.Module.__call__(module, *args, **kwargs)


def _kind_of(base: type, loss: Loss, name: str) -> type:
    make = _kind if type(loss).__hash__ is not None else _kind.__wrapped__
    try:
        return make(base, loss, name)
    except TypeError as error:
        what = f"{base.__name__} cannot get a loss of its own: {error}"
        fix = "hold the model in an nn.Module with a forward that returns the loss"
        raise PlanError(what, where="loss", fix=fix) from error


@functools.lru_cache(32)
def _kind(base: type, loss: Loss, name: str) -> type:
    """The class of modules of ``base`` with this loss: one, so that equal modules have equal classes."""
    content = {
        "__slots__": (_MODEL,),
        "__module__": getattr(loss, "__module__", None) or base.__module__,
        "__qualname__": base.__qualname__,
        "__call__": _call,
        "forward": _Forward(base, loss, name),
        _PARTS: (base, loss),
        **{name: property(lambda _, value=value: value) for name, value in _OF_THE_CALL.items()},
    }
    return type(base)(base.__name__, (base,), content)
