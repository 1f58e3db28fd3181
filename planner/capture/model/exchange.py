"""For the time of one capture, the model's tensors have shapes but no memory, and then their values again.

    p ⇄ fake                         the Python object stays: its holders (a module, a closure, a partial) see the fake
    module._c.weight ⇄ the object    of torch.jit, in C++: after each exchange of the tensors that the object stands for
    module.forward                   of torch.jit: without ``__wrapped__``, which torch calls wrongly under a mode

So the user's model itself is exported, not a copy of it: weights held by a closure, a patched forward and a hook, which
a copy would lose, are captured like the rest. Exchanged are parameters, buffers, and plain tensor attributes that are
not on the CPU; a plain attribute with values stays, a constant of the graph.
"""

import random
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules import module as modules_of_torch
from torch.utils import _pytree as pytree

from passes.errors import PlanError
from passes.interceptors import installed

_CONTAINERS = (list, tuple, dict)
GLOBAL_HOOKS = [name for name in vars(modules_of_torch) if name.startswith("_global_") and name.endswith("hooks")]


def tensors_in_scripts(modules: list[nn.Module]) -> list[tuple[Any, str, Tensor]]:
    """Return (module in C++, name, tensor) of each parameter and buffer of a scripted or traced module."""
    return [
        (module._c, name, tensor)
        for module in modules
        if isinstance(module, torch.jit.ScriptModule)
        for held in (module._parameters, module._buffers)
        for name, tensor in held.items()
        if tensor is not None
    ]


def scripts_unwrapped(modules: list[nn.Module]) -> AbstractContextManager[None]:
    """Replace methods of scripted modules by those in C++, as in a module that was loaded from a file."""
    scripted = [(m, name) for m in modules for name, v in vars(m).items() if isinstance(v, torch.ScriptMethod)]
    return installed(*((m, name, m._c._get_method(name)) for m, name in scripted))  # pyright: ignore


def refuse_parameters(model: nn.Module) -> None:
    """Raise PlanError for parameters that are plain tensors, as torch.jit.load makes them: export takes none. And for
    complex ones: gradients, main parameters and updates are real.
    """
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, nn.Parameter):
            raise PlanError(
                f"the parameter {name} is no nn.Parameter: torch.jit.load makes plain tensors, and export takes none",
                where=name.rpartition(".")[0],
                fix="build the module from its Python class, and load the weights: "
                "`module.load_state_dict(loaded.state_dict())`",
            )
        if parameter.is_complex():
            raise PlanError(
                f"the parameter {name} is complex ({parameter.dtype}): only real parameters are trained",
                where=name,
                fix="store its real and imaginary parts as a real parameter [..., 2], and read it by "
                "`torch.view_as_complex`; if it is not trained, register it as a buffer",
            )


class Exchange:
    """Owns the pairs (object of the model, stand-in that holds its values meanwhile).

    ``classes``: by name, those of the model's parameters and buffers outside.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype | None, mode: FakeTensorMode) -> None:
        tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
        self._tensors = [t for t in tensors.values() if t.layout is torch.strided]  # a sparse one stays, a constant
        self._plain = [t for t in {id(t): t for t in plain_tensors(model)}.values() if t.device.type != "cpu"]
        self._modules = list(model.modules())
        self.classes = {n: type(t) for n, t in (*model.named_parameters(), *model.named_buffers())}
        self._in_scripts = tensors_in_scripts(self._modules)
        self._dtype, self._mode = dtype, mode
        self._pairs: list[tuple[Tensor, Tensor]] = []

    @contextmanager
    def made(self) -> Iterator[None]:
        """Exchange every tensor for its stand-in; afterwards each has its values again, also after an error."""
        with registry_kept(self._modules), scripts_unwrapped(self._modules):
            try:
                for tensor in self._tensors:
                    self._exchange(tensor, self._stand_in(tensor))
                self._exchange_in_scripts()
                for tensor in self._plain:
                    self._exchange(tensor, fake(tensor, None, self._mode) if tensor.is_meta else tensor.detach().cpu())
                yield
            finally:
                while self._pairs:
                    swap(*self._pairs[-1])
                    self._pairs.pop()
                self._exchange_in_scripts()

    def _stand_in(self, tensor: Tensor) -> Tensor:
        empty = fake(tensor, self._dtype, self._mode)
        return parameter_of(empty, tensor) if isinstance(tensor, nn.Parameter) else empty

    def _exchange(self, tensor: Tensor, stand_in: Tensor) -> None:
        swap(tensor, stand_in)
        self._pairs.append((tensor, stand_in))

    def _exchange_in_scripts(self) -> None:
        for module, name, tensor in self._in_scripts:
            module.setattr(name, tensor)

    def original(self, value: Tensor) -> Tensor | None:
        """While exchanged: return the model's tensor that has the memory of ``value``, or None."""
        memory = storage_of(value)
        for tensor, held in self._pairs:
            if memory in (storage_of(tensor), storage_of(held)):
                return tensor
        return None

    def values(self, tensor: Tensor) -> Tensor:
        """While exchanged: return the tensor with the values of ``tensor``; itself if it is not exchanged."""
        return next((held for own, held in self._pairs if own is tensor), tensor)


@contextmanager
def content_kept(tables: Iterable[dict[Any, Any]]) -> Iterator[None]:
    """Restore the content of ``tables`` afterwards."""
    kept = [(table, dict(table)) for table in tables]
    try:
        yield
    finally:
        for table, before in kept:
            table.clear()
            table.update(before)


def seed_generators(seed: int) -> None:
    """Seed the generators of PyTorch, Python and NumPy: a constructor may draw from any of them."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % (1 << 32))


@contextmanager
def python_generators_kept() -> Iterator[None]:
    """Restore the states of the random generators of Python and NumPy afterwards."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


def registry_kept(modules: Iterable[nn.Module]) -> AbstractContextManager[None]:
    """Restore registered parameters and buffers afterwards: a forward may register a buffer, to keep a table."""
    # those of a scripted module, in C++, are fixed
    return content_kept(d for m in modules for d in (m._buffers, m._parameters) if isinstance(d, dict))


def global_hooks_kept() -> AbstractContextManager[None]:
    """Restore global hooks afterwards: torch.export of torch 2.11 leaves one of its own if a forward raises."""
    return content_kept(vars(modules_of_torch)[name] for name in GLOBAL_HOOKS)


def fake(tensor: Tensor, dtype: torch.dtype | None, mode: FakeTensorMode) -> Tensor:
    """Return a fake tensor with this shape, strides and offset. It is on the CPU, not on meta: constants of a forward
    keep their values.
    """
    cast = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    start = int(tensor.storage_offset())
    with mode:
        if not start:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=cast, device="cpu")
        last = start + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        memory = torch.empty(max(last, start) + 1, dtype=cast, device="cpu")
        return memory.as_strided(tensor.shape, tensor.stride(), start)


def parameter_of(content: Tensor, like: nn.Parameter) -> nn.Parameter:
    """Return a parameter of ``content`` with the attributes of ``like``."""
    made = nn.Parameter(content, like.requires_grad)
    vars(made).update(vars(like))
    return made


def swap(a: Tensor, b: Tensor) -> None:
    """Exchange the content of two Python objects: class, attributes and tensor.

    Unlike torch.utils.swap_tensors, it accepts tensors with weak references or in a graph of autograd: here both are
    restored before they are read.
    """
    classes, attributes = (a.__class__, b.__class__), (a.__dict__, b.__dict__)
    torch._C._swap_tensor_impl(a, b)
    b.__class__, a.__class__ = classes
    b.__dict__, a.__dict__ = attributes  # pyright: ignore[reportAttributeAccessIssue]


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in tuples, lists, dicts and registered classes."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def has_values(value: Any) -> TypeGuard[Tensor]:
    """Return whether it is a dense tensor with memory."""
    is_real = isinstance(value, Tensor) and not isinstance(value, FakeTensor) and not value.is_meta
    return is_real and value.layout is torch.strided


def storage_of(tensor: Tensor) -> int:
    """Return a number that is equal for tensors that share memory; a sparse tensor shares none."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def plain_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Yield tensors that are attributes of modules, or in lists and dicts there: no parameters or buffers."""
    for module in model.modules():
        for name, value in vars(module).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                yield from _tensors_in(value, 3)


def _tensors_in(value: Any, depth: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, _CONTAINERS) and depth:
        for inner in list(value.values() if isinstance(value, dict) else value):
            yield from _tensors_in(inner, depth - 1)


def refuse_shared_memory(model: nn.Module) -> None:
    """Raise PlanError if two trainable parameters share memory: an update of one would change both."""
    spans: dict[int, list[tuple[int, int, str]]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.numel() and type(parameter) is nn.Parameter:
            start = int(parameter.storage_offset())
            last = sum((n - 1) * s for n, s in zip(parameter.shape, parameter.stride(), strict=True))
            spans.setdefault(storage_of(parameter), []).append((start, start + last, name))
    for held in spans.values():
        held.sort()
        for (_, stop, first), (start, _, second) in pairwise(held):
            if start <= stop:
                raise PlanError(
                    f"the parameters {first} and {second} are separate parameters that share memory: an update of "
                    "one changes both",
                    where=second.rpartition(".")[0],
                    fix="tie them as one parameter (`b.weight = a.weight`), or give each its own memory",
                )
