"""A model built without memory for its parameters; their values are exactly those of building it with memory.

    constructor                runs unchanged; a parameter is a fake tensor that reports the CPU as its device, so that
                               code which reads its device takes the same path as with values
    ops on parameters          are written down (init_log.py), also draws: the generator does not move
    another draw               first the draws before it are repeated into memory that is freed at once
    a question about values    is answered with the value, made for that question alone
    afterwards                 parameters stand on the meta device; buffers are real
    a base on meta             that the construction wraps or changes: its values are read later, from files

A construction that cannot be recorded is no error: the model is then built with memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from passes.interceptors import installed
from passes.program.ops.aten import written_by
from planner.capture.model.exchange import fake, parameter_of, plain_tensors, swap, tensors_in
from planner.capture.model.init_log import EMPTY, BaseValue, Entry, InitLog, Window
from planner.capture.model.meta_init import HUGE, on_registering
from planner.capture.own_loss import model_of

_ASKS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
_recorded: WeakKeyDictionary[nn.Module, RecordedValues] = WeakKeyDictionary()


class CannotRecord(Exception):
    """The construction does something that the log cannot record."""


class RecordedValues:
    """The values that a model's construction gave its parameters, by dotted name; one at a time, in new memory."""

    def __init__(self, log: InitLog, windows: dict[str, Window]) -> None:
        self._log, self._windows = log, windows

    def __contains__(self, fqn: str) -> bool:
        return fqn in self._windows

    def value(self, fqn: str) -> Tensor:
        """The full tensor. The first call repeats all draws of the construction. What comes of the base's values is
        zero outside of ``reading``."""
        return self._log.value(self._windows[fqn])

    def waits_for_base(self, fqn: str) -> bool:
        """Return whether the value depends on the base's, which must be read first."""
        return self._log.base is None and any(isinstance(entry.op, BaseValue) for entry in self._sources(fqn))

    def is_of_base(self, fqn: str) -> bool:
        """Return whether it is an unchanged tensor of the base."""
        return [type(entry.op) for entry in self._sources(fqn)] == [BaseValue]

    def reading(self, read: Callable[[str], Tensor]) -> AbstractContextManager[None]:
        """Read full tensors of the base by ``read``, which gets their names there."""
        return installed((self._log, "base", read))

    def _sources(self, fqn: str) -> list[Entry]:
        return [self._log.entries[number] for number in self._log.sources(self._windows[fqn].storage)]


def recorded_values(model: nn.Module) -> RecordedValues | None:
    return _recorded.get(model_of(model))


def build_recorded(build: Callable[[], nn.Module], base: nn.Module | None = None) -> nn.Module:
    """Return the model of ``build`` with parameters on the meta device; its values are in ``recorded_values``.

    ``base``: a module with parameters on meta that ``build`` takes; their values are read later, from elsewhere. Raises
    CannotRecord, or any error of ``build``.
    """
    recorder = _Recorder()
    if base is not None:
        recorder.take(base)
    with recorder.registering(), recorder:
        model = build()
    named = dict(model.named_parameters(remove_duplicate=False))
    if not all(isinstance(parameter, FakeTensor) for parameter in named.values()):
        raise CannotRecord("a parameter that was not registered in the usual way")
    windows = {name: recorder.window(parameter) for name, parameter in named.items()}
    recorder.log.keep_only({window.storage for window in windows.values()})
    for parameter in {id(p): p for p in named.values()}.values():
        _to_meta(parameter)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if isinstance(buffer, FakeTensor):
                module._buffers[name] = recorder.log.value(recorder.window(buffer))
    if any(isinstance(held, FakeTensor) for held in plain_tensors(model)):
        raise CannotRecord("a tensor computed from a parameter that is not a buffer")
    recorder.log.base = None
    _recorded[model] = RecordedValues(recorder.log, windows)
    return model


class _Recorder(TorchDispatchMode):
    """Runs a construction and records it. Owns the numbers of storages, and draws that are postponed."""

    def __init__(self) -> None:
        super().__init__()
        self.log = InitLog()
        self._fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self._numbers: dict[int, tuple[StorageWeakRef, int]] = {}  # a weak reference keeps its address from another
        self._waiting: tuple[Tensor, list[int]] | None = None  # the generator's state, and the draws from there

    @contextmanager
    def registering(self) -> Iterator[None]:
        """Take the memory of each parameter when a module registers it."""
        apply = nn.Module._apply

        def changing(self: nn.Module, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> nn.Module:
            """A cast or move that changes nothing; PyTorch would exchange the fakes, which others refer to."""
            with torch.no_grad():
                is_same = all(fn(tensor) is tensor for tensor in (*self.parameters(), *self.buffers()))
            return self if is_same else apply(self, fn, *args, **kwargs)

        with installed(on_registering(self.without_memory), (nn.Module, "_apply", changing)):
            yield

    def take(self, base: nn.Module) -> None:
        """Note that the values of these parameters will be known later; the Python objects stay."""
        self.log.base = _unknown
        for name, parameter in base.named_parameters():
            swap(parameter, parameter_of(fake(parameter, None, self._fakes), parameter))
            op = BaseValue(self.log, name)
            self.log.add(Entry(op, (), {}, (self._window(parameter),), (), torch.get_default_dtype()))

    @_disable_current_modes()
    def without_memory(self, parameter: nn.Parameter) -> nn.Parameter:
        if isinstance(parameter, FakeTensor):
            return parameter
        if type(parameter) is not nn.Parameter or parameter.layout is not torch.strided or parameter.is_meta:
            raise CannotRecord("a parameter of another kind")
        value = parameter.detach()
        empty = fake(value, None, self._fakes)
        source = self.window(value)
        op, made = torch.ops.aten.clone.default, (self._window(empty),)
        self.log.add(Entry(op, (source,), {}, made, (), torch.get_default_dtype()))
        return parameter_of(empty, parameter)

    def window(self, tensor: Tensor) -> Window:
        """Return the window of a tensor; values of a tensor that was made elsewhere are kept."""
        window = self._window(tensor)
        log = self.log
        if not (log.is_written(window.storage) or window.storage in log.held):
            if isinstance(tensor, FakeTensor) or tensor.is_meta:
                raise CannotRecord("a tensor without values from elsewhere")
            memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())  # pyright: ignore[reportCallIssue, reportArgumentType]
            log.held[window.storage] = memory.clone()
        return window

    def _window(self, tensor: Tensor) -> Window:
        if tensor.layout is not torch.strided:
            raise CannotRecord("a sparse tensor")
        storage = tensor.untyped_storage()
        _, number = self._numbers.setdefault(storage._cdata, (StorageWeakRef(storage), len(self._numbers)))
        self.log.num_bytes[number] = storage.nbytes()
        return Window(number, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tensors_in((args, kwargs))
        if func.overloadpacket in EMPTY and not given:
            return self._noted(func, (args, kwargs), (), (), self._empty(func, args, kwargs))
        read = pytree.tree_map_only(Tensor, self.window, (args, kwargs))
        written = _written(func, args, kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            return self._draw(func, args, kwargs, read, written, given)
        result = self._result(func, args, kwargs, written, given)
        return self._noted(func, read, written, given, result)

    def _empty(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        with self._fakes:
            shape = func(*args, **kwargs)
        return shape if shape.untyped_storage().nbytes() > HUGE else func(*args, **kwargs)

    def _result(self, func: Any, args: Any, kwargs: Any, written: Any, given: Any) -> Any:
        """Run the op: on fakes if there are any; on their values if these decide the path, or are written to a tensor
        with memory.
        """
        if not any(isinstance(tensor, FakeTensor) for tensor in given):
            return func(*args, **kwargs)
        if all(isinstance(tensor, FakeTensor) for tensor in written):
            try:
                return func(*args, **kwargs)
            except _ASKS_VALUES:
                if written:
                    raise CannotRecord("a write with a data-dependent shape") from None
        args, kwargs = pytree.tree_map_only(FakeTensor, self._value, (args, kwargs))
        return func(*args, **kwargs)

    def _value(self, tensor: Tensor) -> Tensor:
        self._catch_up()
        return self.log.value(self.window(tensor))

    # ---- draws

    def _draw(self, func: Any, args: Any, kwargs: Any, read: Any, written: Any, given: Any) -> Any:
        if any(isinstance(leaf, torch.Generator) for leaf in pytree.tree_leaves((args, kwargs))):
            raise CannotRecord("its own generator")
        if not any(isinstance(tensor, FakeTensor) for tensor in given):
            self._catch_up()
            state = torch.get_rng_state()
            return self._noted(func, read, written, given, func(*args, **kwargs), is_draw=True, state=state)
        if any(tensor is not own for tensor, own in zip(given, written, strict=False)) or len(given) != len(written):
            raise CannotRecord("a draw that depends on values")
        self._wait_with(len(self.log.entries))
        return self._noted(func, read, written, given, func(*args, **kwargs), is_draw=True)

    def _wait_with(self, number: int) -> None:
        state = torch.get_rng_state()
        if self._waiting is not None and not torch.equal(state, self._waiting[0]):  # the constructor set a seed
            self.log.segments.append(self._waiting)
            self._waiting = None
        if self._waiting is None:
            if any(torch.equal(state, before) for before, _ in self.log.segments):
                raise CannotRecord("an earlier state of the generator")
            self._waiting = (state, [])
        self._waiting[1].append(number)

    def _catch_up(self) -> None:
        """Move the generator to its state after the postponed draws."""
        if self._waiting is None:
            return
        (state, numbers), self._waiting = self._waiting, None
        if not torch.equal(state, torch.get_rng_state()):
            self.log.segments.append((state, numbers))
            return
        with torch.no_grad():
            self.log.draw(numbers)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self._waiting is not None:
            self.log.segments.append(self._waiting)
            self._waiting = None

    # ---- the log

    def _noted(self, func: Any, read: Any, written: Any, given: Any, result: Any, **of_draw: Any) -> Any:
        """Return ``result``, and add an entry if it has memory of its own or the op wrote to a tensor.

        ``read``: positional and keyword arguments, with windows for tensors. ``of_draw``: fields of a draw.
        """
        known = {self._window(tensor).storage for tensor in given}
        windows = [self._window(tensor) for tensor in tensors_in(result)]
        made = tuple(None if window.storage in known else window for window in windows)
        if written or any(window is not None for window in made):
            into = tuple(self._window(tensor) for tensor in written)
            args, kwargs = read
            self.log.add(Entry(func, args, kwargs, made, into, torch.get_default_dtype(), **of_draw))
        return result


def _unknown(name: str) -> Tensor:
    raise CannotRecord(f"the construction asks for the value of {name}")


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    return tensors_in([given.get(name) for name in written_by(func)])


def _to_meta(parameter: nn.Parameter) -> None:
    """Move the parameter to meta. The Python object stays, and with it all references to it."""
    empty = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
    stand_in = nn.Parameter(empty, parameter.requires_grad)
    of_fakes = vars(nn.Parameter(fake(empty, None, parameter.fake_mode)))  # pyright: ignore[reportAttributeAccessIssue]
    attributes = {name: value for name, value in vars(parameter).items() if name not in of_fakes}
    swap(parameter, stand_in)
    vars(parameter).update(attributes)
