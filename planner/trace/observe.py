"""Tensors that autograd saves for one call: run it on fake CPU tensors, and record the hooks of saved tensors.

    mul(x, w)              keeps operands x and w
    softmax(x)             keeps its result
    layer_norm(x, w, b)    keeps x, w, and two tensors that are no operand and no result: mean and 1 / deviation

A tensor is known by its memory, so a kept view of an operand is that operand. Which kernel an op takes is that of the
CPU, except attention of a cluster of GPUs (planner.trace.attention_kernels). Each signature (op, shapes, strides,
dtypes, constants) is seen once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import map_aggregate
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from planner.capture.model.exchange import storage_of
from planner.trace.attention_kernels import KernelsOfGPU
from planner.trace.handles import Sent, sent


@dataclass(frozen=True, slots=True)
class Like:
    """A tensor without memory, as one rank holds it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False

    @classmethod
    def of(cls, tensor: Tensor) -> Like:
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.requires_grad)

    @classmethod
    def contiguous(cls, shape: Sequence[int], dtype: torch.dtype, requires_grad: bool = False) -> Like:
        strides, size = list[int](), 1
        for n in reversed(shape):
            strides.insert(0, size)
            size *= max(n, 1)
        return cls(tuple(shape), tuple(strides), dtype, requires_grad)

    @property
    def bytes(self) -> int:
        """Return bytes that it would need as memory of its own."""
        if 0 in self.shape:
            return 0
        last = sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
        return (last + 1) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Made:
    """A result: ``shares`` the memory of an operand (its number), or of an earlier result (−1 − its number), or is
    new memory of ``bytes``."""

    like: Like
    shares: int | None
    bytes: int


@dataclass(frozen=True, slots=True)
class Gradient:
    """Of an operand. ``is_given``: it lies in the memory of a result's gradient; ``is_kept``: in that of an operand,
    has kept; else in ``bytes`` of its own."""

    is_given: bool
    bytes: int
    is_kept: bool = False


@dataclass(frozen=True, slots=True)
class Seen:
    """The memory that a call makes and saves. ``operands``, ``results``: numbers of those with saved memory;
    ``hidden``: bytes of each saved memory that is neither; ``is_tuple``: whether its value is a tuple of the results;
    ``overwritten``: numbers of the operands that its forward overwrites.

    ``peak``: the most new bytes at once in the forward, with results and saved tensors; ``backward_peak`` in the
    backward, with gradients. ``gradients``: of each operand; empty if the backward could not be seen. ``sent``: the
    collectives of both.
    """

    made: tuple[Made, ...]
    is_tuple: bool
    operands: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    hidden: tuple[int, ...] = ()
    peak: int = 0
    gradients: tuple[Gradient | None, ...] = ()
    backward_peak: int = 0
    sent: tuple[Sent, ...] = ()
    overwritten: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Operand:
    """Replaces a tensor among the arguments of a signature; the same tensor twice is one operand."""

    number: int


def observe(
    target: Callable[..., Any],
    args: Any,
    kwargs: dict[str, Any],
    operands: Sequence[Like],
    *,
    on_gpu: bool = False,
    cudnn: bool = False,
) -> Seen:
    """Return the memory that ``target(*args, **kwargs)`` makes and saves; the arguments have Operands in place of
    tensors. ``on_gpu``: attention and RMS norms by the kernels of a GPU, ``cudnn``: of one that prefers cuDNN's. Raises
    whatever the op raises on tensors without values.
    """
    given = map_aggregate((args, kwargs), lambda held: held)  # lists and dicts become hashable
    return _seen(target, given, repr(given), tuple(operands), on_gpu, cudnn)


@cache
def _seen(
    target: Callable[..., Any], given: Any, _text: str, operands: tuple[Like, ...], on_gpu: bool, cudnn: bool
) -> Seen:
    """Observe a call. ``given``: positional and keyword arguments. ``_text``: of them, as 1 is not True nor 1.0."""
    with _mode(), torch.enable_grad(), KernelsOfGPU(cudnn=cudnn) if on_gpu else nullcontext(), sent() as messages:
        leaves = [_empty(like) for like in operands]
        tensors = [_Operand.apply(leaf) if leaf.requires_grad else leaf for leaf in leaves]
        kept: dict[int, Tensor] = {}

        def pack(tensor: Tensor) -> Tensor:
            kept.setdefault(
                storage_of(tensor), tensor
            )  # stays alive meanwhile: memory that is freed may be given again
            return tensor

        args, kwargs = pytree.tree_map_only(Operand, lambda operand: tensors[operand.number], given)
        versions = [tensor._version for tensor in tensors]
        with Allocations(tensors) as allocations:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                value = target(*args, **kwargs)
            made = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
            found = _found(tensors, made, not isinstance(value, Tensor), kept)
            overwritten = (
                n for n, (t, before) in enumerate(zip(tensors, versions, strict=True)) if t._version > before
            )
            found = replace(found, peak=allocations.peak, overwritten=tuple(overwritten))
            kept.clear()
            allocations.restart()
            gradients = _gradients(leaves, tensors, made, allocations)
        found = replace(found, sent=tuple(messages))
        return found if gradients is None else replace(found, gradients=gradients, backward_peak=allocations.peak)


class _Operand(torch.autograd.Function):
    """A tensor that another op made, so that a call may overwrite it; its gradient comes out unchanged."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


def _gradients(
    given_to: Sequence[Tensor], operands: Sequence[Tensor], made: Sequence[Tensor], allocations: Allocations
) -> tuple[Gradient | None, ...] | None:
    """Return the gradients that the backward makes from gradients as large as the results; None if it cannot run
    without values. ``given_to``: the leaves of ``operands``.
    """
    results = [tensor for tensor in made if tensor.requires_grad]
    leaves = [tensor for tensor in given_to if tensor.requires_grad]
    given = [torch.empty_like(tensor) for tensor in results]
    allocations.restart()
    try:
        found = torch.autograd.grad(results, leaves, given, allow_unused=True) if results and leaves else ()
    except Exception:  # a user's own backward may raise anything
        return None
    of_given, of_operands = {storage_of(tensor) for tensor in given}, {storage_of(tensor) for tensor in operands}
    rest = iter(found)
    return tuple(_gradient(next(rest, None), of_given, of_operands) if x.requires_grad else None for x in given_to)


def _gradient(tensor: Tensor | None, of_given: set[int], of_operands: set[int]) -> Gradient | None:
    if tensor is None:
        return None
    memory = storage_of(tensor)
    return Gradient(memory in of_given, tensor.untyped_storage().nbytes(), memory in of_operands)


@cache
def _mode() -> FakeTensorMode:
    return FakeTensorMode()


def _empty(like: Like) -> Tensor:
    tensor = torch.empty_strided(like.shape, like.strides, dtype=like.dtype, device="cpu")
    return tensor.requires_grad_() if like.requires_grad else tensor


def _found(operands: Sequence[Tensor], made: Sequence[Tensor], is_tuple: bool, kept: dict[int, Tensor]) -> Seen:
    of_operand = {storage_of(tensor): number for number, tensor in reversed(list(enumerate(operands)))}
    of_result: dict[int, int] = {}
    results = []
    for number, tensor in enumerate(made):
        memory = storage_of(tensor)
        shares = of_operand.get(memory)
        if shares is None and memory in of_result:
            shares = -1 - of_result[memory]
        of_result.setdefault(memory, number)
        results.append(Made(Like.of(tensor), shares, tensor.untyped_storage().nbytes()))
    new = {memory: number for memory, number in of_result.items() if memory not in of_operand}
    return Seen(
        tuple(results),
        is_tuple,
        tuple(sorted(of_operand[memory] for memory in kept if memory in of_operand)),
        tuple(sorted(new[memory] for memory in kept if memory in new)),
        tuple(t.untyped_storage().nbytes() for m, t in kept.items() if m not in of_operand and m not in new),
    )


class Allocations(TorchDispatchMode):
    """Owns the live allocations made under it, by memory; ``peak``: the most bytes at once since ``restart``.

    ``known``: tensors without counted memory. ``settling``: seconds before a new peak is read, in which a thread that
    ends a collective releases its tensors. Workspaces inside a kernel are not seen.
    """

    reads_memory_alone = True  # so that compiled functions may run under it

    def __init__(self, known: Iterable[Tensor] = (), *, settling: float = 0.0) -> None:
        super().__init__()
        self._settling = settling
        self._known: dict[int, StorageWeakRef] = {}
        self.know(known)
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    @property
    def live(self) -> int:
        return sum(self.living.values())

    @property
    def living(self) -> dict[int, int]:
        """Return each memory that lives now → bytes."""
        for memory in [memory for memory, (storage, _) in self._made.items() if storage.expired()]:
            del self._made[memory]
        return {memory: size for memory, (_, size) in self._made.items()}

    @property
    def known(self) -> Set[int]:
        return self._known.keys()

    def know(self, tensors: Iterable[Tensor]) -> None:
        """Count no memory of ``tensors``."""
        self._known |= {storage.cdata: storage for storage in map(_reference, tensors)}

    def restart(self) -> None:
        """Count the live allocations no longer, and reset the peak."""
        self._known |= {memory: storage for memory, (storage, _) in self._made.items()}
        self._made, self.peak = {}, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        new = False
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = _reference(leaf)
                if storage.cdata not in self._known and storage.cdata not in self._made:
                    self._made[storage.cdata] = (storage, leaf.untyped_storage().nbytes())
                    new = True
        if new and self.live > self.peak:
            if self._settling:
                time.sleep(self._settling)
            self.peak = max(self.peak, self.live)
        return result


def _reference(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())
