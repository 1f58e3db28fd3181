"""The computation of one call of a forward, as keys: two calls compute the same if their outputs have equal keys.

    key of an input, parameter, buffer     its name
    key of a result                        the function, the keys of its operands, Python's numbers among them
    key of a tensor written to             its old key, and the call that wrote
    key of a tensor with values            its values

Keys stay with the memory of a tensor from call to call: a table that the first call made, and a later one reads, is the
same to both, while a state that grows from call to call has another key in each. On tensors without memory and without
export a call costs a tenth of a capture.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain, repeat
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from passes.errors import Where
from passes.partition.batch.sequences import seen_as
from passes.program.source_lines import users_frame, where_of_frame
from planner.capture.model.exchange import storage_of, tensors_in
from planner.capture.python.draws import ASKS

_MOST_VALUES = 1 << 20
_RESHAPES = {"reshape", "view", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as", "ravel"}
_SIZED = _RESHAPES | {
    "expand",
    "broadcast_to",
    "repeat",
    "tile",
    "narrow",
    "new_zeros",
    "new_ones",
    "new_empty",
}  # their numbers are sizes
_QUIET = {"__get__", "size", "dim", "is_floating_point", "stride", "numel", "__len__", "get_device", "is_contiguous"}


Shape = tuple[int, ...]


def _where(site: Any) -> Where:
    return where_of_frame(*site) if site else Where()


class Keys:
    """Owns the keys of memory over the calls of one capture, and the answers that the first call got."""

    def __init__(self) -> None:
        self._content: dict[int, tuple[str, Tensor]] = {}  # of a storage, and a tensor that keeps it alive
        self._answers: dict[tuple[str, str], Any] = {}
        self._named: set[str] = set()

    def begin(self, model: nn.Module, args: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
        """Name the inputs of a call, except a buffer that the first call registered: it holds that call's results."""
        named = [*model.named_parameters(), *model.named_buffers()]
        named += [(f"input {i}", x) for i, x in enumerate(pytree.tree_leaves([list(args), dict(kwargs)]))]
        self._named = self._named or {name for name, _ in named}
        for name, tensor in named:
            if isinstance(tensor, Tensor) and _has_memory(tensor) and name in self._named:
                self._content[storage_of(tensor)] = (name, tensor)

    def of(self, value: Any) -> str:
        if isinstance(value, Tensor):
            return self._of_tensor(value)
        if isinstance(value, (list, tuple)):
            return f"[{','.join(map(self.of, value))}]"
        if isinstance(value, dict):
            return f"{{{','.join(f'{k}:{self.of(v)}' for k, v in value.items())}}}"
        if isinstance(value, slice):
            return f"slice({self.of(value.start)},{self.of(value.stop)},{self.of(value.step)})"
        if isinstance(value, (np.ndarray, np.generic)):
            return f"{value.dtype}{value.shape}{hashlib.sha256(value.tobytes()).hexdigest()}"
        plain = value is None or isinstance(value, (bool, int, float, complex, str, torch.dtype, torch.device))
        return repr(value) if plain else type(value).__name__

    def _of_tensor(self, tensor: Tensor) -> str:
        if not _has_memory(tensor):
            return "no memory"
        known = self._content.get(storage_of(tensor))
        content = known[0] if known is not None else _values_of(tensor)
        return f"{content}/{tuple(tensor.shape)}{tensor.stride()}{tensor.storage_offset()}{tensor.dtype}"

    def answered(self, asked: tuple[str, str], ask: Callable[[], Any]) -> Any:
        if asked not in self._answers:
            self._answers[asked] = ask()
        return self._answers[asked]

    def note(self, key: str, given: list[Tensor], versions: list[int], result: Any) -> None:
        """Note the content of a function's results, and of the arguments that it wrote to."""
        own = {storage_of(t) for t in given}
        for tensor, version in zip(given, versions, strict=True):
            if tensor._version != version:
                memory = storage_of(tensor)
                before = self._content[memory][0] if memory in self._content else ""
                self._content[memory] = (_hashed(f"{before}!{key}"), tensor)
        for i, tensor in enumerate(tensors_with_memory(result)):
            memory = storage_of(tensor)
            if memory not in own:
                self._content[memory] = (_hashed(f"{key}#{i}"), tensor)


@dataclass(frozen=True, slots=True)
class Sizes:
    """A called function, the shapes of its operands and results, and the numbers among its arguments."""

    name: str
    read: tuple[Shape, ...]
    made: tuple[Shape, ...]
    numbers: tuple[float, ...]

    @staticmethod
    def of(name: str, given: Any, read: Iterable[Tensor], made: Iterable[Tensor]) -> Sizes:
        numbers = tuple(x for x in pytree.tree_leaves(given) if type(x) in (int, float))
        return Sizes(name, tuple(tuple(t.shape) for t in read), tuple(tuple(t.shape) for t in made), numbers)

    @property
    def _ranks(self) -> tuple[list[int], list[int]]:
        return list(map(len, self.read)), list(map(len, self.made))

    def widens(self, more: Sizes) -> bool:
        """Return whether the graph of one sequence shows how the call ``more`` of several treats them. It does not show

        a cut ``x[:, :1]`` of all of a dim of size 1, a reshape with a literal 1, a number that is the size of the batch
        """
        if (self.name, self._ranks) != (more.name, more._ranks):
            return False
        if self.name not in _SIZED and self.numbers != more.numbers and set(self.made) <= set(self.read):
            return False
        for before, wider in zip(self.read, more.read, strict=True):
            for after, wide in zip(self.made, more.made, strict=True):
                grown, found = _grown(before, wider), _grown(after, wide)
                is_cut = len(before) == len(after) and any(before[d] == after[d] for d in grown - found)
                if is_cut or (self.name in _RESHAPES and found - _followed(before, grown, after)):
                    return False
        return True


class ForwardCall(TorchFunctionMode):
    """One call of a forward, recorded while it is active: its ``steps`` (key of each called function, its line), the
    keys of its ``outputs``, and the ``sizes`` of functions of values made of ``batch``.
    """

    def __init__(self, keys: Keys, batch: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.steps: list[tuple[str, FrameType | tuple[Any, int] | None]] = []
        self.sizes: list[Sizes] = []
        self.outputs: list[str] | None = None
        self._on_batch = {storage_of(t) for t in batch}
        self._keys, self._dispatch_modes = keys, torch._C._len_torch_dispatch_stack()

    def first_other(self, earlier: ForwardCall) -> Where:
        """Return the line of the first step that is not in ``earlier``."""
        theirs = chain((key for key, _ in earlier.steps), repeat(None))
        others = (site for (key, site), known in zip(self.steps, theirs, strict=False) if key != known)
        return _where(next(others, self.steps[-1][1] if self.steps else None))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        # What a mode of dispatch does inside a call of the forward is not the forward's, and its memo changes it.
        is_inside_a_mode = torch._C._len_torch_dispatch_stack() < self._dispatch_modes
        if is_inside_a_mode or (name in _QUIET and not _gives_tensor(func)):
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():  # other modes need not see these reads
            key = _hashed(f"{name}{self._keys.of(args)}{self._keys.of(kwargs)}")
            given = tensors_with_memory((args, kwargs))
            versions = [t._version for t in given]
        if name in ASKS:
            result = self._keys.answered((key, name), lambda: func(*args, **kwargs))
        else:
            result = func(*args, **kwargs)
        self.steps.append((key, users_frame()))
        with torch._C.DisableTorchFunction():
            self._keys.note(key, given, versions, result)
            if not self._on_batch.isdisjoint(map(storage_of, given)):
                made = tensors_with_memory(result)
                self._on_batch.update(map(storage_of, made))  # the keys keep this memory
                self.sizes.append(Sizes.of(name, (args, kwargs), given, made))
        return result

    def widens(self, one: ForwardCall) -> bool:
        """Return whether this call, of more sequences, did to each what ``one`` did to one sequence: it called the same
        functions, and what they do along the batch shows in the graph of ``one`` too.
        """
        return len(self.sizes) == len(one.sizes) and all(map(Sizes.widens, one.sizes, self.sizes))

    def end(self, output: Any) -> None:
        self.outputs = [self._keys.of(t) for t in tensors_with_memory(output)]


def _grown(one: Shape, more: Shape) -> set[int]:
    return {d for d, (a, b) in enumerate(zip(one, more, strict=True)) if a != b}


def _followed(before: Shape, dims: Iterable[int], after: Shape) -> set[int]:
    """Return the dims in which a reshape of one sequence shows sequences that are a dim, or the outer part of one."""
    places = [(d, behind) for d in dims for behind in (1, before[d])]
    return {dim for place in places for dim, _ in seen_as(before, place, after)}


def _gives_tensor(func: Any) -> bool:
    """Return whether a property is a view: x.T, x.mT, x.real, x.data, x.grad."""
    owner = getattr(func, "__self__", None)
    return getattr(owner, "__name__", "") in ("T", "mT", "H", "mH", "real", "imag", "data")


def tensors_with_memory(value: Any) -> list[Tensor]:
    return list(filter(_has_memory, tensors_in(value)))


def _has_memory(tensor: Tensor) -> bool:
    """Return whether a tensor is neither sparse nor a row within vmap."""
    return tensor.layout is torch.strided and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # pyright: ignore[reportAttributeAccessIssue]


def _values_of(tensor: Tensor) -> str:
    if isinstance(tensor, FakeTensor) or tensor.is_meta or tensor.device.type != "cpu":
        return "unknown"
    memory = tensor.untyped_storage()
    if memory.nbytes() > _MOST_VALUES:
        return f"{memory.nbytes()} bytes at {storage_of(tensor)} {tensor._version}"
    return hashlib.sha256(ctypes.string_at(memory.data_ptr(), memory.nbytes())).hexdigest()  # no op, so no mode sees it


def _hashed(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
