"""The ops of a model's construction on its parameters, recorded without their memory; rerun for one parameter at a
time.

    entry       an op, its arguments with each tensor as a window of a numbered storage, its writes
    draw        an entry that takes random numbers: the generator's state before it is kept, 5 KB
    base value  an entry that reads a tensor of the model that the construction wraps
    value       the entries that a parameter's storage comes from, run again in their order

Draws come from one generator, one after the other: before the first value is made all of them are repeated once, each
into memory that is freed at once, and the states in between are noted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from planner.capture.model.exchange import tensors_in

_ATEN = torch.ops.aten
# They do not read their target: its old content need not be computed.
_OVERWRITES = frozenset({_ATEN.normal_, _ATEN.uniform_, _ATEN.fill_, _ATEN.zero_, _ATEN.copy_})
EMPTY = frozenset({_ATEN.empty, _ATEN.empty_strided, _ATEN.empty_like, _ATEN.new_empty, _ATEN.new_empty_strided})


@dataclass(frozen=True, slots=True)
class Window:
    """A tensor, as a part of a numbered storage."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, memory: Tensor) -> Tensor:
        """Return the tensor in ``memory``, the bytes of its storage."""
        return torch.empty(0, dtype=self.dtype).set_(memory.untyped_storage(), self.offset, self.size, self.stride)  # pyright: ignore[reportArgumentType, reportCallIssue]


@dataclass(slots=True)
class Entry:
    """One op. ``made``: its results with storages of their own; ``written``: storages that it writes into.

    ``default_dtype``: of factories without a dtype. ``state``: of the generator before a draw, once it is known.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: tuple[Window | None, ...]
    written: tuple[Window, ...]
    default_dtype: torch.dtype
    is_draw: bool = False
    state: Tensor | None = None

    @property
    def read(self) -> Iterator[int]:
        """Return the storages of its arguments with values that it reads."""
        if self.op.overloadpacket in EMPTY:
            return iter(())
        return (leaf.storage for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Window))

    def overwrites(self, storage: int, num_bytes: int) -> bool:
        is_whole = any(w.storage == storage and _covers(w, num_bytes) for w in self.written)
        return is_whole and self.op.overloadpacket in _OVERWRITES and len(self.written) == 1


class BaseValue:
    """The op of an entry: a tensor of the base, which ``InitLog.base`` reads once the source of its values is known."""

    overloadpacket = None

    def __init__(self, log: InitLog, name: str) -> None:
        self._log, self._name = log, name

    def __call__(self) -> Tensor:
        assert self._log.base is not None, self._name
        return self._log.base(self._name)


@dataclass
class InitLog:
    """Owns the entries of one construction, in their order.

    ``num_bytes``: of each storage. ``held``: values that came from elsewhere, by storage. ``segments``: the generator's
    state before the first draw of each, and the numbers of draws that follow each other from there. ``live``: the
    entries that some parameter comes from, once the construction is over. ``base``: reads a tensor of the base by name.
    """

    entries: list[Entry] = field(default_factory=list)
    num_bytes: dict[int, int] = field(default_factory=dict)
    held: dict[int, Tensor] = field(default_factory=dict)
    segments: list[tuple[Tensor, list[int]]] = field(default_factory=list)
    live: frozenset[int] | None = None
    base: Callable[[str], Tensor] | None = None
    _writers: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))

    def add(self, entry: Entry) -> int:
        number = len(self.entries)
        self.entries.append(entry)
        for storage in {w.storage for w in (*entry.made, *entry.written) if w is not None}:
            self._writers[storage].append(number)
        return number

    def is_written(self, storage: int) -> bool:
        return storage in self._writers

    def sources(self, storage: int) -> list[int]:
        """Return the entries that the last content of ``storage`` depends on, in their order."""
        found: set[int] = set()
        waiting = [(storage, len(self.entries))]
        while waiting:
            needed, end = waiting.pop()
            for number in reversed([n for n in self._writers[needed] if n < end]):
                entry = self.entries[number]
                is_whole = entry.overwrites(needed, self.num_bytes[needed])
                if number not in found:
                    found.add(number)
                    waiting += [(read, number) for read in entry.read if read != needed]
                if is_whole:
                    break
        return sorted(found)

    def keep_only(self, storages: set[int]) -> None:
        """Forget values and draws on which none of ``storages`` depends; draws stay in their segments."""
        self.live = frozenset(number for storage in storages for number in self.sources(storage))
        for number, entry in enumerate(self.entries):
            entry.state = entry.state if number in self.live else None
        read = {s for number in self.live for s in self.entries[number].read}
        self.held = {storage: value for storage, value in self.held.items() if storage in read | storages}

    @torch.no_grad()
    def value(self, window: Window) -> Tensor:
        """Return the tensor in ``window`` at the end of the construction, in memory of its own."""
        self.repeat_draws()
        memories: dict[int, Tensor] = {}
        with torch.random.fork_rng(devices=[]):
            for number in self.sources(window.storage):
                self._run(self.entries[number], memories)
        return window.of(self._memory(window.storage, memories))

    def repeat_draws(self) -> None:
        """Note the state of the generator before each draw on which a kept value depends."""
        segments, self.segments = self.segments, []
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            for state, numbers in segments:
                torch.set_rng_state(state)
                self.draw(numbers)

    def draw(self, numbers: list[int]) -> None:
        """Take the numbers of these draws from the default generator, into memory that is freed at once."""
        kept = [number for number in numbers if self.live is None or number in self.live]
        # in one piece: one allocation each, between the draws, would keep the memory of every draw from being freed
        states = iter(torch.empty(len(kept), torch.get_rng_state().numel(), dtype=torch.uint8))
        wanted = frozenset(kept)
        for number in numbers:
            entry = self.entries[number]
            if number in wanted:
                entry.state = next(states)
                entry.state.copy_(torch.get_rng_state())
            self._call(entry, {})

    def _run(self, entry: Entry, memories: dict[int, Tensor]) -> None:
        if entry.is_draw:
            assert entry.state is not None, "a draw at an unknown position of its generator"
            torch.set_rng_state(entry.state.clone())
        if entry.op.overloadpacket in EMPTY or (isinstance(entry.op, BaseValue) and self.base is None):
            return
        for made, window in zip(tensors_in(self._call(entry, memories)), entry.made, strict=True):
            if window is not None:
                window.of(self._memory(window.storage, memories)).copy_(made)

    def _call(self, entry: Entry, memories: dict[int, Tensor]) -> Any:
        def actual(window: Window) -> Tensor:
            return window.of(self._memory(window.storage, memories))

        args, kwargs = pytree.tree_map_only(Window, actual, (entry.args, entry.kwargs))
        with _default_dtype(entry.default_dtype):
            return entry.op(*args, **kwargs)

    def _memory(self, storage: int, memories: dict[int, Tensor]) -> Tensor:
        """Return the bytes of a storage; zeros if nothing wrote to it, so that all ranks have the same."""
        if storage not in memories:
            held = self.held.get(storage)
            empty = torch.zeros(self.num_bytes[storage], dtype=torch.uint8) if held is None else held.clone()
            memories[storage] = empty
        return memories[storage]


def _covers(window: Window, num_bytes: int) -> bool:
    shown = torch.empty_strided(window.size, window.stride, dtype=window.dtype, device="meta")
    return not window.offset and shown.nbytes == num_bytes and shown.is_contiguous()


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
