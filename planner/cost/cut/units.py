"""The work of a cut by unit. A unit is one block with the calls anchored to it (passes.blocks.live_sets). If the
embedding or the loss may have a stage of its own, the calls before the first block and after the last are units too.

    stage [a, b)     Σ of its units, + work that several units share (once)

Equal units are one object, so that the seconds of each are computed once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import accumulate, chain, pairwise
from math import prod
from typing import NamedTuple

from planner.pipeline.ledger import StageBytes


class Size(NamedTuple):
    """A number of bytes, elements or FLOPs: ``fixed``, plus ``per`` for each sequence of a microbatch."""

    fixed: float = 0.0
    per: float = 0.0

    @classmethod
    def of(cls, amount: float, micro: int, *, follows: bool) -> Size:
        """Return the size that is ``amount`` at ``micro`` sequences; ``follows``: it is proportional to them."""
        return cls(0.0, amount / micro) if follows else cls(float(amount), 0.0)

    def at(self, micro: int) -> float:
        return self.fixed + self.per * micro

    @staticmethod
    def total(sizes: Iterable[Size]) -> Size:
        return reduce(Size.plus, sizes, Size())

    def plus(self, other: Size) -> Size:
        return Size(self.fixed + other.fixed, self.per + other.per)

    def times(self, factor: float) -> Size:
        return Size(self.fixed * factor, self.per * factor)


NOTHING = Size()
Sides = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Op:
    """A kernel. ``sides``: batch, m, n and k of a product, for one sequence; ``follows``: index of the side that is
    proportional to the sequences of a microbatch (−1: none). ``attention``: FLOPs of attention, with heads of ``head``
    features.
    """

    dtype: str
    bytes: Size
    sides: tuple[int, int, int, int] | None = None
    follows: int = -1
    attention: Size = NOTHING
    head: int = 0

    def sides_at(self, micro: int) -> tuple[int, int, int, int]:
        assert self.sides is not None
        b, m, n, k = (side * micro if at == self.follows else side for at, side in enumerate(self.sides))
        return b, m, n, k

    def flops(self, micro: int) -> float:
        """Return the FLOPs of its products."""
        return self.attention.at(micro) if self.sides is None else 2.0 * prod(self.sides_at(micro))

    def turned(self, order: tuple[int, int, int, int], more: Size) -> Op:
        """Return the product with its sides in another order, as the gradient of an operand has."""
        assert self.sides is not None
        b, m, n, k = (self.sides[i] for i in order)
        return Op(self.dtype, more, (b, m, n, k), order.index(self.follows) if self.follows >= 0 else -1)


OF_FIRST, OF_SECOND = (0, 1, 3, 2), (0, 3, 2, 1)  # [m, k] = g Bᵀ contracts n; [k, n] = Aᵀ g contracts m


@dataclass(frozen=True, slots=True)
class CallOps:
    """The kernels of one call. ``of_held``: those in the backward that compute gradients of its weights."""

    forward: tuple[Op, ...] = ()
    backward: tuple[Op, ...] = ()
    of_held: tuple[Op, ...] = ()

    @property
    def of_value(self) -> tuple[Op, ...]:
        """The products in the backward that compute the gradient of the first operand."""
        return tuple(op for op in (Counter(self.backward) - Counter(self.of_held)).elements() if op.sides is not None)


def together(parts: Iterable[CallOps]) -> CallOps:
    """Return the kernels of a call that does the work of several."""
    sides = zip(*((part.forward, part.backward, part.of_held) for part in parts), strict=True)
    return CallOps(*(tuple(chain.from_iterable(of_side)) for of_side in sides))


@dataclass(frozen=True, slots=True)
class Message:
    """A collective of one microbatch over ``axis``. ``bytes``: as in planner.exchanges.collectives.

    ``beside``: the products that overlap it; empty if the rank waits.
    """

    kind: str
    axis: str
    bytes: Size
    beside: tuple[Op, ...] = ()


@dataclass(frozen=True, slots=True)
class Phase:
    """The kernels and collectives of one direction, each with its count. ``saved``: launches that CUDA graphs avoid:
    their kernels, minus one launch per graph.
    """

    ops: tuple[tuple[Op, int], ...] = ()
    messages: tuple[tuple[Message, int], ...] = ()
    saved: int = 0


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one microbatch. ``weights``: the part of the backward that a W may run."""

    forward: Phase = Phase()
    backward: Phase = Phase()
    weights: Phase = Phase()


@dataclass(frozen=True, slots=True)
class HeldParameter:
    """One rank's shard of a parameter: ``elements`` of ``dtype``. ``reduced_over``: the axis of its gradient's
    reduction; ``partial_over``: axes of further reductions, except tied stages. ``starts``: elements with padding.
    ``rule``: its update rule; ``matrices``: (count, rows, columns) of those updated as a whole, over ``shared_by``.
    """

    elements: int
    starts: int
    dtype: str
    itemsize: int
    is_trainable: bool
    reduced_over: str
    partial_over: tuple[str, ...] = ()
    rule: str = "adamw"
    matrices: tuple[tuple[int, int, int], ...] = ()
    shared_by: str = ""


@dataclass(frozen=True, slots=True)
class Crossing:
    """A value that is sent at the end of a stage; ``bytes`` on one rank."""

    bytes: Size
    has_gradient: bool


@dataclass(frozen=True, slots=True)
class UnitWork:
    """The work of one unit. ``parameters``: each with its count; those of several units are in CutWork.shared.

    ``again``: kind of recomputation → the forward work that the backward repeats. ``after``: the values that are sent
    if a stage ends with this unit. ``buffers``: bytes of the model's own buffers.
    """

    work: Work
    again: Mapping[str, Phase] = field(hash=False)
    parameters: tuple[tuple[HeldParameter, int], ...] = ()
    after: tuple[Crossing, ...] = ()
    buffers: int = 0

    @property
    def returned(self) -> Size:
        return Size.total(value.bytes for value in self.after if value.has_gradient)


@dataclass(frozen=True, slots=True)
class Shared:
    """Work and memory of several ascending ``units``. ``work``: done once per stage, such as masks, rotary tables, or
    an f that all decoder layers read. ``held``, ``buffer_bytes``: a parameter or buffer that a rank has once.
    """

    units: tuple[int, ...]
    work: Work = field(default_factory=Work)
    held: HeldParameter | None = None
    buffer_bytes: int = 0

    def is_in(self, first: int, end: int) -> bool:
        """Whether a stage of units [first, end) has one of its units."""
        return any(first <= unit < end for unit in self.units)


MemoryOf = Callable[[str, Sequence[int], int, bool], StageBytes]  # kind of recomputation, units, micro, waits


def ranges_of(sizes: Sequence[int], *, ends: bool) -> list[tuple[int, int]]:
    """Return the unit range [first, end) of each stage. ``sizes``: blocks of each stage; ``ends``: as in CutWork."""
    stops = [int(ends) + stop for stop in accumulate(sizes)]
    stops[-1] += ends
    return list(pairwise((0, *stops)))


@dataclass(frozen=True, eq=False)
class CutWork:
    """The work of one cut, for microbatches of ``micro`` sequences.

    ``ends``: the first unit has the calls before all blocks, the last one those after them. ``source``: for each unit,
    the unit of the trace that it copies; ``memory``: a function from such units to the bytes of a stage. ``num_noted``:
    numbers beside the norm in its all-reduce. ``cache``: derived values that callers store.
    """

    units: tuple[UnitWork, ...]
    micro: int
    shared: tuple[Shared, ...] = ()
    num_noted: int = 0
    reads_global_sums: bool = False
    ends: bool = False
    source: tuple[int, ...] = ()
    memory: MemoryOf | None = field(default=None, repr=False)
    cache: dict[object, object] = field(default_factory=dict, repr=False)

    def at(self, micro: int) -> CutWork:
        """Return the same cut for microbatches of ``micro`` sequences."""
        if micro == self.micro:
            return self
        work = self.cache.get(("at", micro))
        if work is None:
            work = self.cache["at", micro] = replace(self, micro=micro, cache={})
        assert isinstance(work, CutWork)
        return work

    def ranges(self, sizes: Sequence[int]) -> list[tuple[int, int]]:
        """Return the unit range [first, end) of each stage. ``sizes``: blocks of each stage."""
        return ranges_of(sizes, ends=self.ends)

    def repeated(self, order: tuple[int, ...]) -> CutWork:
        """Return the cut of a deeper model, in which block i is a copy of block ``order[i]`` of this one.

        ``order`` ascends and has every block. Work that units share is shared by all their copies.
        """
        if self.ends:
            order = (0, *(old + 1 for old in order), len(self.units) - 1)
        where: dict[int, list[int]] = {}
        for new, old in enumerate(order):
            where.setdefault(old, []).append(new)
        everywhere = (tuple(sorted(new for old in item.units for new in where[old])) for item in self.shared)
        shared = tuple(replace(item, units=units) for item, units in zip(self.shared, everywhere, strict=True))
        units = tuple(self.units[old] for old in order)
        source = tuple(self.source[old] for old in order)
        return replace(self, units=units, shared=shared, source=source, cache={})
