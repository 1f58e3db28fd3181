"""Fresh values of a model on the meta device, drawn by the model's own methods, one call at a time.

Every module is initialized after its submodules, as ``Module.apply`` does:

    reset_parameters(), _reset_parameters()        if the module has one
    _init_weights(module)                          of the innermost module around it that has one
    _init_weights()                                if the method takes no module

First, all calls run on meta tensors, to record their writes. Then a parameter gets its value from exactly the calls
that write it, each with a generator of (seed, module, method), so that the value depends neither on the layout nor on
other weights of a rank.
"""

import hashlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from passes.errors import PlanError, Where
from passes.program.ops.aten import has_gradient
from planner.capture.model.exchange import python_generators_kept, seed_generators, storage_of
from planner.capture.model.meta_init import initialisers

_OF_MODULE = ("reset_parameters", "_reset_parameters")
_FOR_MODULES = "_init_weights"


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of a method. ``module``: name of the module that it initializes; ``written``: ids of parameters."""

    module: str
    method: str
    run: Callable[[], Any]
    written: frozenset[int] = frozenset()


class OwnMethods:
    """Values of a model's parameters by its own methods. Owns the calls, and the values of the last run."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        """Raises PlanError if a method cannot run without values."""
        self._model, self._seed = model, seed
        self._names = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
        self._calls = _calls_that_write(model)
        self._last: tuple[tuple[str, ...], dict[int, Tensor]] = ((), {})

    @torch.no_grad()
    def value(self, fqn: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the full tensor [shape], drawn in float32 for any dtype. Raises PlanError if no method writes all of
        it.
        """
        wanted = self._names[fqn]
        calls = [call for call in self._calls if wanted in call.written]
        key = tuple(f"{call.module}.{call.method}" for call in calls)
        if self._last[0] != key:
            self._last = (key, self._run(calls))
        value = self._last[1].get(wanted)
        if value is None or value.isnan().any():
            words = "is not initialized by any method of the model" if value is None else "is not fully initialized"
            what = f"parameter {fqn} on the meta device {words} (reset_parameters or _init_weights)"
            fix = "give its module a reset_parameters() that initializes it, or set initialization.method: normal"
            raise PlanError(what, where=Where(module=fqn.rpartition(".")[0] or type(self._model).__name__), fix=fix)
        return value.to(dtype).view(shape)

    def _run(self, calls: list[_Call]) -> dict[int, Tensor]:
        written = frozenset().union(*(call.written for call in calls))
        with _exchanged(self._model, lambda p: _unwritten(p) if id(p) in written else None) as held:
            for call in calls:
                with _seeded(f"{self._seed}/{call.module}/{call.method}"):
                    _ran(call)
        return {owner: value.detach() for owner, value in held.items()}


def _calls_that_write(model: nn.Module) -> list[_Call]:
    calls = [call for name, module in _inner_first(model) for call in _calls_for(model, name, module)]
    found = []
    with torch.no_grad(), _exchanged(model, lambda p: torch.empty_like(p, device="meta")) as held:
        owners = {id(value): owner for owner, value in held.items()}
        for call in calls:
            inside = [(p, storage_of(p)) for p in model.get_submodule(call.module).parameters() if id(p) in owners]
            with _Writes() as writes:
                _ran(call)
            touched = {owners[id(p)] for p, memory in inside if memory in writes.memories or memory != storage_of(p)}
            if touched:
                found.append(_Call(call.module, call.method, call.run, frozenset(touched)))
    return found


class _Writes(TorchDispatchMode):
    """Notes the storages to which ops write, also through ``.data``, which does not count versions."""

    def __init__(self) -> None:
        super().__init__()
        self.memories: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[place] if place < len(args) else given.get(argument.name)
                written = value if isinstance(value, (list, tuple)) else [value]
                self.memories.update(storage_of(tensor) for tensor in written if isinstance(tensor, Tensor))
        return func(*args, **given)


def _inner_first(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (dotted name, module) of all modules, each after its submodules."""

    def visit(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        for child, inner in module.named_children():
            yield from visit(f"{name}.{child}" if name else child, inner)
        yield name, module

    return visit("", model)


def _calls_for(model: nn.Module, name: str, module: nn.Module) -> Iterator[_Call]:
    for method in _OF_MODULE:
        if callable(own := getattr(module, method, None)):
            yield _Call(name, method, own)
            break
    own = getattr(module, _FOR_MODULES, None)
    if callable(own) and not _takes_module(own):
        yield _Call(name, _FOR_MODULES, own)
        return
    around = next((found for found in initialisers(model, name) if _takes_module(found)), None)
    if around is not None:
        yield _Call(name, _FOR_MODULES, lambda: around(module))


def _takes_module(method: Callable[..., Any]) -> bool:
    parameters = inspect.signature(method).parameters.values()
    return any(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


@contextmanager
def _exchanged(model: nn.Module, made: Callable[[nn.Parameter], Tensor | None]) -> Iterator[dict[int, Tensor]]:
    """Inside, ``made`` replaces parameters on meta, and buffers are copies; afterwards both are as before.

    Yields the replacements, by the id of the parameter.
    """
    held: dict[int, Tensor] = {}
    parameters = [(m, dict(m._parameters)) for m in model.modules()]
    buffers = [(m, dict(m._buffers)) for m in model.modules()]
    try:
        for module, own in parameters:
            for name, parameter in own.items():
                if parameter is None or not parameter.is_meta:
                    continue
                if id(parameter) not in held and (value := made(parameter)) is not None:
                    held[id(parameter)] = nn.Parameter(value, parameter.requires_grad)
                module._parameters[name] = held.get(id(parameter), parameter)  # pyright: ignore[reportArgumentType]
        for module, own in buffers:
            module._buffers.update({name: None if b is None else b.clone() for name, b in own.items()})
        yield held
    finally:
        for (module, own), (_, tensors) in zip(parameters, buffers, strict=True):
            module._parameters.update(own)
            module._buffers.update(tensors)


def _unwritten(parameter: Tensor) -> Tensor:
    """Return a value of NaN, in float32 for floating-point parameters."""
    dtype = torch.float32 if parameter.is_floating_point() else parameter.dtype
    value = torch.empty(parameter.shape, dtype=dtype)
    return value.fill_(float("nan")) if has_gradient(dtype) else value.zero_()


def _ran(call: _Call) -> None:
    try:
        call.run()
    except Exception as error:
        what = f"{call.method} of the model failed on the meta device: {type(error).__name__}: {error}"
        fix = "build the model with its values, or set initialization.method: normal"
        raise PlanError(what, where=Where(module=call.module or "the model"), fix=fix) from error


@contextmanager
def generators_as_before() -> Iterator[None]:
    """Restore the random states of Python, NumPy and torch (CPU) afterwards."""
    with python_generators_kept(), torch.random.fork_rng(devices=[]):
        yield


@contextmanager
def _seeded(key: str) -> Iterator[None]:
    """Seed the generators of torch, NumPy and Python from ``key``, and restore them afterwards."""
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little") >> 1
    with generators_as_before():
        seed_generators(seed)
        yield
