"""Models of any size without memory: parameters on the meta device, and values for buffers that went there with them.

with meta_parameters():            parameters on meta, buffers real: the way to build
    model = Model(config)

with torch.device("meta"):         buffers on meta too: tables such as rotary frequencies have lost their values;
    model = Model(config)          they come back only if the model itself can initialise a module

Freed memory is returned to the system (``give_back_freed``): glibc keeps pages between those in use for the process,
and a step allocates large pieces, which fit into few of these gaps.
"""

import copy
import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from passes.errors import PlanError, Where
from passes.interceptors import Interceptor, installed

HUGE = 1 << 31  # bytes
_FACTORIES = {torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn}


@contextmanager
def meta_parameters() -> Iterator[None]:
    """Move every parameter that is registered inside to the meta device; buffers and plain tensors stay real.

    Storage that a constructor allocated and never wrote costs address space only; an allocation of more than ``HUGE``
    bytes, as for a stack of experts, is on meta from the start. So a model of any size builds.
    """
    try:
        with installed(on_registering(_on_meta)), _HugeOnMeta():
            yield
    finally:
        give_back_freed()  # of tensors that constructors wrote: 400 MiB for a model of 671 B parameters


def on_registering(changed: Callable[[nn.Parameter], nn.Parameter]) -> Interceptor:
    """Return an interceptor with which a module registers ``changed(parameter)`` in place of each parameter."""
    original = nn.Module.register_parameter

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        original(self, name, None if param is None else changed(param))

    return nn.Module, "register_parameter", register


def _on_meta(parameter: nn.Parameter) -> nn.Parameter:
    if parameter.device.type == "meta":
        return parameter
    moved = type(parameter)(parameter.data.to("meta"), requires_grad=parameter.requires_grad)
    vars(moved).update(vars(parameter))
    return moved


def copied(module: nn.Module, buffer_of: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return a copy with parameters on meta, and results of ``buffer_of`` as buffers; ties are kept."""
    memo: dict[int, Any] = {id(buffer): buffer_of(buffer) for buffer in module.buffers()}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    return copy.deepcopy(module, memo)


class _HugeOnMeta(TorchFunctionMode):
    """Sends tensors of factories that are larger than the memory of a machine to the meta device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if func in _FACTORIES and given.get("device") is None and _bytes(args, given) > HUGE:
            given["device"] = "meta"
        return func(*args, **given)


def _bytes(args: tuple[Any, ...], given: dict[str, Any]) -> int:
    size = given.get("size", args[0] if args and isinstance(args[0], (tuple, list)) else args)
    each = torch.empty(0, dtype=given.get("dtype")).itemsize  # the dtype may be one of Python's: bool, float
    return prod(n for n in size if isinstance(n, int)) * each


def buffer_value(model: nn.Module, fqn: str) -> Tensor:
    """Return the value of a buffer; of one on meta if the model can recreate it. ``model`` is not changed.

    Raises PlanError, with the buffer and a fix, if it cannot.
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
    """Yield ``_init_weights`` of the modules around ``path``, the innermost first, as transformers applies them."""
    parts = path.split(".") if path else []
    for length in range(len(parts), -1, -1):
        found = getattr(model.get_submodule(".".join(parts[:length])), "_init_weights", None)
        if callable(found):
            yield found


def _made_by(initialise: Callable[[nn.Module], Any], owner: nn.Module, name: str, fill: int) -> Tensor:
    """Return buffer ``name`` after ``initialise`` ran on a copy of its module: buffers real, parameters on meta."""
    twin = copied(owner, lambda b: torch.full_like(b, fill, device="cpu") if b.is_meta else b.detach().clone())
    with torch.no_grad():
        initialise(twin)
    value = twin._buffers[name]
    assert value is not None, name
    return value


def give_back_freed() -> None:
    """Return freed pages to the system, in a few milliseconds; does nothing if the C library is not glibc."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # of macOS, musl, Windows
        return
    trim(0)
