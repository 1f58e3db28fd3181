"""Models of any size without memory: parameters on the meta device, and values for buffers that went there with them.

with meta_parameters():            parameters on meta, buffers real: the way to build
    model = Model(config)

with torch.device("meta"):         buffers on meta too: tables such as rotary frequencies have lost their values;
    model = Model(config)          they come back only if the model itself can initialise a module
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from passes.errors import PlanError, Where
from planner.freed import give_back_freed

HUGE = 1 << 31  # bytes
_FACTORIES = {torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn}


@contextmanager
def meta_parameters() -> Iterator[None]:
    """Every parameter registered inside goes to the meta device at once; buffers and plain tensors stay real.

    Storage that a constructor allocated and never wrote costs address space only; an allocation of more than ``HUGE``
    bytes, as for a stack of experts, is on meta from the start. So a model of any size builds.
    """
    original = nn.Module.register_parameter

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.device.type != "meta":
            attributes = dict(vars(param))
            moved = type(param)(param.data.to("meta"), requires_grad=param.requires_grad)
            vars(moved).update(attributes)
            param = moved
        original(self, name, param)

    nn.Module.register_parameter = register
    try:
        with _HugeOnMeta():
            yield
    finally:
        nn.Module.register_parameter = original
        give_back_freed()  # of tensors that constructors wrote: 400 MiB for a model of 671 B parameters


class _HugeOnMeta(TorchFunctionMode):
    """Factories of tensors that no machine would give memory for at once."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func in _FACTORIES and given.get("device") is None and _bytes(args, given) > HUGE:
            given["device"] = "meta"
        return func(*args, **given)


def _bytes(args: tuple[Any, ...], given: dict[str, Any]) -> int:
    size = given.get("size", args[0] if args and isinstance(args[0], (tuple, list)) else args)
    dtype = given.get("dtype") or torch.get_default_dtype()
    return prod(n for n in size if isinstance(n, int)) * dtype.itemsize


def buffer_value(model: nn.Module, fqn: str) -> Tensor:
    """The value of a buffer, also of one on meta if the model can recreate it; ``model`` is not changed.

    Raises PlanError, naming the buffer and a fix, if it cannot.
    """
    path, _, name = fqn.rpartition(".")
    owner = model.get_submodule(path)
    value = owner._buffers[name]
    assert value is not None, fqn
    if not value.is_meta:
        return value.detach()
    initialise = next(initialisers(model, path), None)
    made = [_made_by(initialise, owner, name, fill) for fill in (0, 1)] if initialise else []
    # Equal from different starts: the initialiser has written all of it.
    if made and torch.equal(*made):
        return made[0]
    raise PlanError(
        f"buffer {fqn} has no values: the model was built on the meta device",
        where=Where(module=path or type(model).__name__),
        fix="build the model inside `with meshwright.meta_parameters():`, which keeps buffers real",
    )


def initialisers(model: nn.Module, path: str) -> Iterator[Callable[..., Any]]:
    """``_init_weights`` of the modules around ``path`` that have one, the innermost first, as in transformers."""
    parts = path.split(".") if path else []
    for length in range(len(parts), -1, -1):
        found = getattr(model.get_submodule(".".join(parts[:length])), "_init_weights", None)
        if callable(found):
            yield found


def _made_by(initialise: Callable[[nn.Module], Any], owner: nn.Module, name: str, fill: int) -> Tensor:
    """Buffer ``name`` after ``initialise`` ran on a copy of its module: buffers real, parameters on meta."""
    memo: dict[int, Any] = {}
    for parameter in owner.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    for buffer in owner.buffers():
        real = torch.full_like(buffer, fill, device="cpu") if buffer.is_meta else buffer.detach().clone()
        memo[id(buffer)] = real
    twin = copy.deepcopy(owner, memo)
    with torch.no_grad():
        initialise(twin)
    value = twin._buffers[name]
    assert value is not None, name
    return value
