"""Values of a block that are freed after its forward, and recomputed when its backward reads the first of them.

    begin_block(c); …; watch_inside(c, k, [x]); y = op(x); unwatch_inside(c); …; end_block(c, [dropped], [sources])

Autograd saves each tensor in between in a holder. At the end a holder of a dropped value's memory frees it and
remembers its place; so does a holder of an internal tensor that op ``k`` saved. The rerun is a graph: from sources
(inputs, weights, kept values) to the dropped values, with the random streams of that microbatch; for an op with
internal tensors it takes those that the same op saves again. Autograd's own graph is untouched: gradients are the same
bits.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

from passes.interceptors import installed
from passes.ops.axis import AxisHandle
from passes.ops.random_state import RandomState
from passes.ops.weight_gradients import WeightGradients


class BlockCall:
    """One block of a stage: ``module(rerun, *sources)`` recomputes the dropped values, and reports internal tensors to
    ``rerun``.

    ``axes``: of its collectives, which count as the backward's.
    """

    def __init__(self, name: str, module: fx.GraphModule, random: RandomState, axes: Sequence[AxisHandle]) -> None:
        self.name, self.module, self.random, self.axes = name, module, random, tuple(axes)
        self.before: Callable[[], None] | None = None  # gathers the weights that it reads, if ranks hold shards of them

    def __repr__(self) -> str:
        return self.name


class _Open(threading.local):
    """The forwards of blocks that run on this thread; one may begin before another has ended."""

    def __init__(self) -> None:
        self.forwards: list[_Forward] = []
        self.hooks: saved_tensors_hooks | None = None

    def begin(self, forward: _Forward) -> None:
        if self.hooks is None:
            self.hooks = saved_tensors_hooks(_pack, _unpack)
            self.hooks.__enter__()
        self.forwards.append(forward)

    def end(self, forward: _Forward) -> None:
        self.forwards.remove(forward)
        if not self.forwards:
            self.clear()

    def clear(self) -> None:
        hooks, self.hooks = self.hooks, None
        self.forwards.clear()
        if hooks is not None:
            hooks.__exit__()

    def of(self, call: BlockCall) -> _Forward | None:
        return next((f for f in reversed(self.forwards) if f.call is call), None)


_OPEN = _Open()


def abandon() -> None:
    """Save tensors as usual from now on: a forward has failed."""
    _OPEN.clear()


# ---- the forward


def begin_block(call: BlockCall) -> None:
    """Watch from here on which tensors autograd saves: they may be of the block. Nothing happens without gradients."""
    if torch.is_grad_enabled():
        _OPEN.begin(_Forward(call))


def watch_inside(call: BlockCall, number: int, inputs: Sequence[Any]) -> None:
    """Take saved tensors that are no values of the graph, from here on, as those of op ``number``, called with
    ``inputs``."""
    forward = _OPEN.of(call)
    if forward is not None:
        forward.watch(number, inputs)


def unwatch_inside(call: BlockCall) -> None:
    forward = _OPEN.of(call)
    if forward is not None:
        forward.inside = None


def end_block(call: BlockCall, dropped: Sequence[Tensor], sources: Sequence[Any]) -> None:
    """Free ``dropped``; the rerun recomputes it from ``sources``, tensors and handles."""
    forward = _OPEN.of(call)
    if forward is not None:
        _OPEN.end(forward)
        forward.close(dropped, sources)


MARKS = (begin_block, watch_inside, unwatch_inside, end_block)  # calls that read no values


class _Holder:
    """The object that autograd holds instead of a tensor. ``tensor``: None while it is freed.

    ``inside``: for ops with watched internal tensors, in each open block: (number, count that it had saved before).
    """

    __slots__ = ("__weakref__", "forward", "inside", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self.inside: list[tuple[_Forward, int, int]] = []
        self.forward: _Forward | None = None


def _pack(tensor: Tensor) -> _Holder:
    holder = _Holder(tensor.detach())
    for forward in _OPEN.forwards:
        forward.saved(holder)
    return holder


def _unpack(holder: _Holder) -> Tensor:
    if holder.tensor is None:
        assert holder.forward is not None
        holder.forward.run_again()
        assert holder.tensor is not None, "a freed value was not recomputed"
    return holder.tensor


class _Forward:
    """One forward of a block. Owns: until its rerun, the sources; the place of each freed tensor."""

    def __init__(self, call: BlockCall) -> None:
        self.call = call
        self.step, self.microbatch = call.random.step, call.random.microbatch
        self.modes = _get_current_function_mode_stack()
        self.inside: int | None = None
        self.inputs: dict[int, list[_Input]] = {}
        self._counts: dict[int, int] = {}
        self._holders: list[_Holder] = []
        self._sources: list[Any] = []
        self._layouts: list[tuple[Any, ...]] = []
        self._values: list[tuple[weakref.ref[_Holder], int, tuple[Any, ...]]] = []
        self._insides: list[tuple[weakref.ref[_Holder], int, int, tuple[Any, ...]]] = []

    def watch(self, number: int, inputs: Sequence[Any]) -> None:
        self.inside, self.inputs[number] = number, [_input(x) for x in inputs]

    def saved(self, holder: _Holder) -> None:
        self._holders.append(holder)
        if self.inside is not None:
            count = self._counts.get(self.inside, 0)
            holder.inside.append((self, self.inside, count))
            self._counts[self.inside] = count + 1

    def close(self, dropped: Sequence[Tensor], sources: Sequence[Any]) -> None:
        self._sources = [s.detach() if isinstance(s, Tensor) and not s.is_leaf else s for s in sources]
        kept = {_storage_of(s) for s in self._sources if isinstance(s, Tensor)}
        owners: dict[int, int] = {}
        for index, value in enumerate(dropped):
            if _storage_of(value) not in kept:
                owners.setdefault(_storage_of(value), index)
        self._layouts = [(value.shape, value.stride(), value.dtype) for value in dropped]
        for holder in self._holders:
            self._let_go(holder, dropped, owners, kept)
        if not self._values and not self._insides:
            self._sources = []
        self._holders = []

    def _let_go(self, holder: _Holder, dropped: Sequence[Tensor], owners: dict[int, int], kept: set[int]) -> None:
        tensor = holder.tensor
        inside = [(number, count) for forward, number, count in holder.inside if forward is self]
        holder.inside = [entry for entry in holder.inside if entry[0] is not self]
        if tensor is None or tensor.is_conj() or tensor.is_neg() or (storage := _storage_of(tensor)) in kept:
            return
        owner = owners.get(storage)
        if owner is not None and dropped[owner].dtype == tensor.dtype:
            offset = tensor.storage_offset() - dropped[owner].storage_offset()
            self._values.append((weakref.ref(holder), owner, (tensor.shape, tensor.stride(), offset)))
        elif owner is None and inside and not _is_held(tensor):
            self._insides.append((weakref.ref(holder), *inside[0], (tensor.shape, tensor.dtype)))
        else:
            return
        holder.tensor, holder.forward = None, self

    # ---- the backward

    def run_again(self) -> None:
        """Give every holder its tensor again."""
        sources = self._sources
        rerun = Rerun(self.inputs, sources)
        self._sources = []
        if self.call.before is not None:
            self.call.before()
        again = self.call.random.again(self.step, self.microbatch)
        as_backward = installed(*((axis, "phase", "backward") for axis in self.call.axes))
        with torch.no_grad(), again, as_backward, _under(self.modes):
            try:
                values = self.call.module(rerun, *sources)
            finally:
                rerun.leave()
        for value, (shape, stride, dtype) in zip(values, self._layouts, strict=True):
            assert (value.shape, value.stride(), value.dtype) == (shape, stride, dtype), f"{self.call}: another layout"
        for reference, owner, (shape, stride, offset) in self._values:
            holder, base = reference(), values[owner]
            if holder is not None:
                holder.tensor = base.as_strided(shape, stride, base.storage_offset() + offset)
        for reference, number, count, layout in self._insides:
            holder, tensor = reference(), rerun.insides[number][count]
            assert (tensor.shape, tensor.dtype) == layout, f"{self.call}: op {number} saves other tensors"
            if holder is not None:
                holder.tensor = tensor
        self._values, self._insides = [], []


class _Input(NamedTuple):
    """An input of an op in its forward. ``flag``: whether it carried a gradient; ``like``: its layout in memory;
    ``handle``: for a handle of weight gradients, one with the same binding."""

    flag: bool = False
    like: dict[str, Any] | None = None
    handle: WeightGradients | None = None


def _input(x: Any) -> _Input:
    if not isinstance(x, Tensor):
        return _Input(handle=x.as_bound_now() if isinstance(x, WeightGradients) else None)
    layout = {"size": x.shape, "stride": x.stride(), "dtype": x.dtype, "device": x.device}
    return _Input(x.requires_grad, layout)


def _storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _is_held(tensor: Tensor) -> bool:
    """Return whether a number was wrapped in a tensor: nothing is to be gained."""
    return tensor.dim() == 0


@contextmanager
def _under(modes: Sequence[TorchFunctionMode]) -> Iterator[None]:
    """Run inside under the function modes of the forward, such as that of a capture: autograd runs a backward without
    them."""
    here = _get_current_function_mode_stack()
    missing = [mode for mode in modes if mode not in here]
    for mode in missing:
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in missing:
            _pop_mode()


# ---- inside the rerun


class Rerun:
    """A rerun in progress. Owns: the tensors that ops save while they are watched, by their number.

    ``inputs``: of each op in its forward. ``sources``: the inputs of the rerun.
    """

    def __init__(self, inputs: Mapping[int, Sequence[_Input]], sources: Sequence[Any]) -> None:
        self.inputs = inputs
        self.leaves = {id(x) for x in sources if isinstance(x, Tensor) and x.requires_grad}
        self.insides: dict[int, list[Tensor]] = {}
        self._hooks: saved_tensors_hooks | None = None

    def enter(self, number: int) -> None:
        found = self.insides.setdefault(number, [])
        self._hooks = saved_tensors_hooks(lambda tensor: found.append(tensor.detach()), _never)
        self._hooks.__enter__()
        torch._C._set_grad_enabled(True)

    def leave(self) -> None:
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            torch._C._set_grad_enabled(False)
            hooks.__exit__()


def _never(_: Any) -> Tensor:
    raise AssertionError("nothing runs back through a rerun")


def enter_inside(rerun: Rerun, number: int, inputs: Sequence[Any]) -> list[Any]:
    """The inputs of op ``number`` as its forward had them: tensors that it saves are noted until ``leave_inside``.

    A weight is the same object: its op looks up the gradient's place by it, and saves other tensors if it finds none.
    A view of a leaf is not: without gradients it is a leaf too, and an op saves other tensors of it.
    """
    before = rerun.inputs.get(number, [_Input()] * len(inputs))
    leaves = [
        handle or (x.detach().requires_grad_(flag) if isinstance(x, Tensor) and id(x) not in rerun.leaves else x)
        for x, (flag, _, handle) in zip(inputs, before, strict=True)
    ]
    rerun.enter(number)
    return leaves


def blank_inputs(rerun: Rerun, number: int, inputs: Sequence[Any]) -> list[Any]:
    """The same for an op with internal tensors that do not depend on values: tensors (None here) hold anything."""
    leaves = []
    for given, (flag, like, _) in zip(inputs, rerun.inputs[number], strict=True):
        leaves.append(given if like is None else torch.empty_strided(**like).requires_grad_(flag))
    rerun.enter(number)
    return leaves


def leave_inside(rerun: Rerun, value: Any) -> Any:
    """Return the op's result, without a graph of its own."""
    rerun.leave()
    return _detached(value)


def _detached(value: Any) -> Any:
    """Detach a tensor, or several: of a compiled piece, one may itself be the tuple that an op gives."""
    return tuple(map(_detached, value)) if isinstance(value, (tuple, list)) else value.detach()
