"""An emulation of CUDA graphs for any device: a graph is a list of ops at fixed addresses.

    capture     runs the Python code once, and records each op with the memory that it reads and writes
    replay      runs the ops again in the same memory; the Python code, its shapes and branches do not run again

Results of ops are in a ``Pool``, in blocks that are reused after the capture frees them, as in the caching allocator. A
replay writes NaN into a block at the point at which the capture freed it, or reused a free block of an earlier graph.
So the emulation reveals the same mistakes as real graphs: a tensor that is read after its block was reused, an input
that was not copied, a number that Python chose at the capture. It also raises the errors of a real capture: reading a
value, data-dependent shapes, drawing from a generator that is not registered.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from passes.ops.random_state import RandomState, drawing_from
from passes.program.ops.aten import has_gradient, reads_on_host
from planner.capture.model.exchange import storage_of
from runtime.compiled.functions import recording

_READS = (Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.__array__)  # reads of a CPU's memory that dispatch no op
_UNWRITTEN = {"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided"}


class Pool:
    """Memory that graphs share, in blocks."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.blocks: list[torch.UntypedStorage] = []
        self._numbers: dict[int, int] = {}
        self._in_use: dict[int, PoolTensor] = {}

    @property
    def num_bytes(self) -> int:
        return sum(block.nbytes() for block in self.blocks)

    def take(self, num_bytes: int) -> int:
        """Return the index of the smallest free block that is large enough, or of a new one."""
        free = [(block.nbytes(), i) for i, block in enumerate(self.blocks) if self.is_free(i)]
        smallest = min((entry for entry in free if entry[0] >= num_bytes), default=None)
        if smallest is not None:
            return smallest[1]
        self.blocks.append(torch.UntypedStorage(max(num_bytes, 1), device=self.device))
        self._numbers[self.blocks[-1]._cdata] = len(self.blocks) - 1
        return len(self.blocks) - 1

    def is_free(self, block: int) -> bool:
        """Return whether only the pool refers to the block."""
        return torch._C._storage_Use_Count(self.blocks[block]._cdata) == 1  # pyright: ignore[reportAttributeAccessIssue]

    def place_of(self, tensor: Tensor) -> PoolTensor | None:
        """Return the place of a tensor in the pool; None if it is outside."""
        block = self._numbers.get(storage_of(tensor))
        if block is None:
            return None
        shape, offset = tuple(tensor.shape), int(tensor.storage_offset())
        return PoolTensor(block, tensor.dtype, shape, tensor.stride(), offset, tensor.is_conj(), tensor.is_neg())

    def keep(self, value: Tensor) -> Tensor:
        """Return a copy of ``value`` in a block of the pool."""
        stride = torch.empty_like(value, device="meta").stride()  # dense, even if elements of ``value`` share memory
        extent = 1 + sum((n - 1) * s for n, s in zip(value.shape, stride, strict=True)) if value.numel() else 0
        block = self.take(extent * value.element_size())
        place = self._in_use[block] = PoolTensor(block, value.dtype, tuple(value.shape), stride)
        kept = place.tensor(self)
        kept.copy_(value)
        return kept

    def freed(self) -> list[PoolTensor]:
        """Free the blocks that have lost their last reference, and return their places."""
        return [self._in_use.pop(block) for block in list(self._in_use) if self.is_free(block)]


@dataclass(frozen=True, slots=True)
class PoolTensor:
    """The place of a tensor in a pool, without a reference to it.

    ``is_conj``, ``is_neg``: it is a lazy conjugate or negative of the values in memory.
    """

    block: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0
    is_conj: bool = False
    is_neg: bool = False

    def tensor(self, pool: Pool) -> Tensor:
        empty = torch.empty(0, dtype=self.dtype, device=pool.device)
        tensor = empty.set_(pool.blocks[self.block], self.offset, self.shape, self.stride)
        tensor = tensor.conj() if self.is_conj else tensor
        return torch._neg_view(tensor) if self.is_neg else tensor


class Emulation:
    """Makes recorded graphs, and writes NaN into static memory that must not be read any more."""

    def __init__(self, random: RandomState, device: torch.device) -> None:
        self._random, self._device = random, device

    def pool(self) -> Pool:
        return Pool(self._device)

    def graph(self, pool: Pool, generators: Collection[Any]) -> RecordedGraph:
        return RecordedGraph(pool, self._random, generators)

    def warm_up(self, body: Callable[[], None]) -> None:
        body()

    def spoil(self, tensors: Collection[Tensor]) -> None:
        for tensor in tensors:
            poison(tensor)


class CaptureError(RuntimeError):
    """An op that no graph can capture."""


@dataclass(eq=False)
class _Op:
    """One op. ``made``: places of its results, None for a result that is not a new tensor. ``random``: the generator
    from which it draws implicitly. ``memory``: the storages that it reads and writes.
    """

    target: Any
    args: Any
    kwargs: Any
    random: torch.Generator | None
    made: Any = ()
    memory: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        self.is_exchange = self.target.namespace == "c10d"
        self.copies_when_awaited = self.is_exchange and "reduce_scatter" in self.target._opname  # and was not yet
        self.is_send = self.is_exchange and self.target._opname == "send"
        self.reads_only = not self.is_exchange and not self.target._schema.is_mutable
        self.is_written = self.target._schema.name not in _UNWRITTEN

    def bind(self, pool: Pool) -> None:
        self.args, self.kwargs, self.made = _bound((self.args, self.kwargs, self.made), pool)
        leaves = tree_leaves((self.args, self.kwargs, self.made))
        self.memory = frozenset(storage_of(v) for v in leaves if isinstance(v, Tensor))

    def run(self) -> Any:
        """Run the op; return the work to wait for if it is an exchange."""
        with nullcontext() if self.random is None else drawing_from(self.random):
            results = tree_leaves(self.target(*self.args, **self.kwargs))
        if self.is_exchange:
            return results[-1]
        for place, value in zip(self.made, results, strict=True):
            if place is not None and self.is_written:
                place.copy_(value)
        return None


@dataclass
class _Free:
    """The point at which the capture freed a block, so that its content is undefined."""

    place: Any
    is_exchange = reads_only = False
    memory: frozenset[int] = frozenset()

    def bind(self, pool: Pool) -> None:
        self.place = _bound(self.place, pool)
        self.memory = frozenset([storage_of(self.place)])

    def run(self) -> None:
        poison(self.place)


class RecordedGraph:
    """One recorded graph: its ops, with their blocks after the first replay. ``generators``: it may draw from these."""

    def __init__(self, pool: Pool, random: RandomState, generators: Collection[torch.Generator] = ()) -> None:
        self.pool, self._random, self._registered = pool, random, {_number_of(g) for g in generators}
        self._ops: list[_Op | _Free] = []
        self._is_bound = self._is_reset = False

    def capture(self, body: Callable[[], None]) -> None:
        """Run ``body`` once and record its ops. Raises CaptureError for an op that a GPU cannot capture."""
        with self.capturing():
            body()

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Record the ops that run inside."""
        with recording(), _Capture(self), _Reads():
            yield
        self._free()

    def record(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Run and record one op; return its results in memory of the pool."""
        if reads_on_host(target, args):
            raise CaptureError(f"{target} reads a value on the host, or has a data-dependent shape")
        if self._is_of_an_exchange(target, args):
            return target(*args, **kwargs)
        self._free()
        placed = tree_map(self._placed, (args, kwargs))
        op = _Op(target, placed[0], placed[1], self._drawn_from(target, args, kwargs))
        known = {storage_of(v) for v in tree_leaves((args, kwargs)) if isinstance(v, Tensor)}

        def is_new(value: Any) -> bool:
            return isinstance(value, Tensor) and not op.is_exchange and storage_of(value) not in known

        out = target(*args, **kwargs)
        new = [is_new(value) for value in tree_leaves(out)]
        kept = tree_map(lambda value: self.pool.keep(value) if is_new(value) else value, out)
        op.made = [self._placed(v) if fresh else None for v, fresh in zip(tree_leaves(kept), new, strict=True)]
        if any(new) or not op.reads_only:  # else it is a view, and needs no op
            self._ops.append(op)
        return kept

    def _is_of_an_exchange(self, target: Any, args: Any) -> bool:
        """Return whether an op is part of an exchange: gloo copies the result of a reduce-scatter during the wait."""
        if target is not torch.ops.aten.copy_.default:
            return False
        to, source = (self._placed(value) for value in args[:2])
        if not isinstance(to, PoolTensor) or isinstance(source, PoolTensor):
            return False
        running = (op for op in reversed(self._ops) if isinstance(op, _Op) and op.copies_when_awaited)
        places = ((op, v) for op in running for v in tree_leaves((op.args, op.kwargs)) if isinstance(v, PoolTensor))
        owner = next((op for op, place in places if place.block == to.block), None)
        if owner is not None:
            owner.copies_when_awaited = False
        return owner is not None

    def reset(self) -> None:
        """Free the ops and their hold on memory and groups."""
        self._ops, self._is_reset = [], True

    def replay(self) -> None:
        """Run all ops again. Before an op touches memory of an exchange, wait for it, as the stream of a GPU does."""
        if self._is_reset:
            raise RuntimeError("a graph was replayed after its reset")
        if not self._is_bound:
            for op in self._ops:
                op.bind(self.pool)
            self._is_bound = True
        pending: list[tuple[_Op, Any]] = []
        with torch.no_grad():
            for op in self._ops:
                for entry in list(pending):
                    exchange, work = entry  # a tensor that is being sent may be read meanwhile
                    if not exchange.memory.isdisjoint(op.memory) and not (exchange.is_send and op.reads_only):
                        work.wait()
                        pending.remove(entry)
                work = op.run()
                if isinstance(op, _Op) and op.is_exchange:
                    pending.append((op, work))
        for _, work in pending:
            work.wait()

    def _free(self) -> None:
        """Record the blocks without references."""
        self._ops += [_Free(place) for place in self.pool.freed()]

    def _placed(self, value: Any) -> Any:
        place = self.pool.place_of(value) if isinstance(value, Tensor) else None
        return value if place is None else place

    def _drawn_from(self, target: Any, args: Any, kwargs: Any) -> torch.Generator | None:
        """Return the implicit generator, None for other ops. Raises CaptureError for one that is not registered."""
        named = [v for v in tree_leaves((args, kwargs)) if isinstance(v, torch.Generator)]
        is_random = torch.Tag.nondeterministic_seeded in target.tags
        default = self._random.default if is_random and not named else None
        if not {_number_of(g) for g in (*named, default) if g is not None} <= self._registered:
            raise CaptureError(f"{target} draws from a generator that is not registered with the graph")
        return default


class _Capture(TorchDispatchMode):
    def __init__(self, graph: RecordedGraph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._graph.record(func, args, kwargs or {})


class _Reads(TorchFunctionMode):
    """Refuses any read of a tensor from Python, also inside an op that is written in Python.

    one_hot checks its values only on a CPU: here they are not checked, as on a device.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS:
            raise CaptureError(f"Tensor.{func.__name__} reads a value on the host")
        if func is torch.ops.aten.one_hot.default and (*args[1:], -1)[0] != -1:
            return args[0].new_zeros(*args[0].shape, args[1]).scatter_(-1, args[0].unsqueeze(-1), 1)
        return func(*args, **(kwargs or {}))


def poison(tensor: Tensor) -> None:
    """Fill freed memory with NaN, so that later reads are noticed; integers are unchanged."""
    if has_gradient(tensor.dtype):
        tensor.data.fill_(float("nan"))


def _number_of(generator: torch.Generator) -> int:
    """Return the identity of a generator, as ops get another Python object for it."""
    return generator._cdata  # pyright: ignore[reportAttributeAccessIssue]


def _bound(tree: Any, pool: Pool) -> Any:
    return tree_map(lambda value: value.tensor(pool) if isinstance(value, PoolTensor) else value, tree)
