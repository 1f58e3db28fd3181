"""The cost of a cut, unit by unit: a unit is one block with the calls anchored to it (passes.blocks.live_sets). If the
embedding or the loss may be alone on a stage, the calls before the first block and those after the last are units too.

    stage [a, b)     Σ of its units, + what several units share (once), + what is kept of values that are made in
                     one unit and kept in a later one (where both are in the stage; else it was received)

Equal units are one object, so that each is computed once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

from planner.cost.cut.kernels import NOTHING, Op, Size


@dataclass(frozen=True, slots=True)
class Message:
    """A collective of one microbatch over ``axis``. ``bytes`` as planner.exchanges.collectives counts them.

    ``beside``: the products that the rank computes meanwhile; empty if it waits.
    """

    kind: str
    axis: str
    bytes: Size
    beside: tuple[Op, ...] = ()


@dataclass(frozen=True, slots=True)
class Phase:
    """Kernels with how often each runs, and collectives, of one direction. ``saved``: launches that the host need not
    make: kernels inside of CUDA graphs, less one launch a graph.
    """

    ops: tuple[tuple[Op, int], ...] = ()
    messages: tuple[tuple[Message, int], ...] = ()
    saved: int = 0


NO_PHASE = Phase()


@dataclass(frozen=True, slots=True)
class KindWork:
    """A unit under one kind of recompute. ``again``: the forward work that its backward repeats, beside ``backward``.

    ``kept``: bytes between forward and backward, of the unit's own values; ``kept_of_previous``: of values of the unit
    before that this one is the first to save. ``logits``: the part of it after the last block. ``forward_over``,
    ``backward_over``: the most bytes at once beyond those saved before this unit, each the maximum of several;
    ``backward_apart``: if tied weights are on several stages, so that none of their gradients waits.
    ``weights``: the part of the backward that a W may run, and ``aside``: bytes that wait for it.
    """

    backward: Phase = NO_PHASE
    again: Phase = NO_PHASE
    kept: Size = NOTHING
    kept_of_previous: Size = NOTHING
    logits: Size = NOTHING
    forward_over: tuple[Size, ...] = ()
    backward_over: tuple[Size, ...] = ()
    backward_apart: tuple[Size, ...] = ()
    weights: Phase = NO_PHASE
    aside: Size = NOTHING


@dataclass(frozen=True, slots=True)
class HeldParameter:
    """One rank's part of a parameter: ``elements`` of ``dtype``. ``reduced_over``: the axis of its gradient's sum;
    ``partial_over``: axes of further sums, without that of tied stages. ``starts``: elements up to the next slot.
    ``rule``: its update rule; ``matrices``: (how many, rows, columns) of those updated whole, over ``shared_by``.
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
    """A value that is sent at the end of a stage: bytes of one rank."""

    bytes: Size
    has_gradient: bool


@dataclass(frozen=True, slots=True)
class UnitWork:
    """One unit. ``parameters`` with how often each occurs; those that several units hold are in CutWork.tied.

    ``after``: the values sent if a stage ends with this unit. ``buffers``: bytes of the model's own buffers.
    """

    forward: Phase
    kinds: Mapping[str, KindWork] = field(hash=False)
    parameters: tuple[tuple[HeldParameter, int], ...] = ()
    after: tuple[Crossing, ...] = ()
    buffers: int = 0

    @property
    def sent(self) -> Size:
        """Bytes that are sent if a stage ends here."""
        total = Size()
        for value in self.after:
            total = total.plus(value.bytes)
        return total

    @property
    def returned(self) -> Size:
        """Bytes of the gradients that come back there."""
        total = Size()
        for value in self.after:
            total = total.plus(value.bytes) if value.has_gradient else total
        return total


@dataclass(frozen=True, slots=True)
class Shared:
    """Work that several units need and a stage does once: masks, rotary tables, an f that all decoder layers read.

    ``units``: those that need it, ascending. ``kept``: bytes by kind, counted if one of ``kept_by`` is in the stage.
    """

    units: tuple[int, ...]
    forward: Phase = NO_PHASE
    backward: Phase = NO_PHASE
    weights: Phase = NO_PHASE

    def is_in(self, first: int, end: int) -> bool:
        return any(first <= unit < end for unit in self.units)


@dataclass(frozen=True, slots=True)
class Loose:
    """Bytes kept under ``kind``. With ``maker`` ≥ 0: made there, first saved in ``units[0]``, and counted if a stage
    has both; else counted once if a stage has any of ``units``.
    """

    kind: str
    maker: int
    units: tuple[int, ...]
    bytes: Size

    def is_in(self, first: int, end: int) -> bool:
        if self.maker >= 0:
            return self.maker >= first and self.units[0] < end
        return any(first <= unit < end for unit in self.units)


@dataclass(frozen=True, slots=True)
class Tied:
    """A parameter, or buffer, that several units read: a rank that has one of them holds it once."""

    name: str
    units: tuple[int, ...]
    held: HeldParameter | None = None
    buffer_bytes: int = 0

    def is_in(self, first: int, end: int) -> bool:
        return any(first <= unit < end for unit in self.units)


@dataclass(frozen=True, eq=False)
class CutWork:
    """The cost of one cut. ``micro``: sequences of a microbatch. ``kinds``: the kinds of recompute that it has.

    ``tp``, ``cp``, ``ep``, ``etp``, ``sequence_parallel`` say which cut it is. ``ends``: the first unit is what comes
    before all blocks, the last what comes after them. ``cache``: derived values that others store with it.
    """

    units: tuple[UnitWork, ...]
    micro: int
    kinds: tuple[str, ...]
    shared: tuple[Shared, ...] = ()
    loose: tuple[Loose, ...] = ()
    tied: tuple[Tied, ...] = ()
    num_noted: int = 0
    reads_global_sums: bool = False
    ends: bool = False
    cache: dict[object, object] = field(default_factory=dict, repr=False)

    def at(self, micro: int) -> CutWork:
        """The same cut for microbatches of ``micro`` sequences."""
        if micro == self.micro:
            return self
        found = self.cache.get(("at", micro))
        if found is None:
            found = self.cache["at", micro] = replace(self, micro=micro, cache={})
        assert isinstance(found, CutWork)
        return found

    def ranges(self, sizes: Sequence[int]) -> list[tuple[int, int]]:
        """[first, end) of the units of each stage. ``sizes``: blocks of each."""
        ends = [int(self.ends) + end for end in accumulate(sizes)]
        ends[-1] += self.ends
        return list(pairwise((0, *ends)))

    def repeated(self, order: tuple[int, ...]) -> CutWork:
        """The cut of a deeper model: block i of it is block ``order[i]`` of this one (``order`` ascends, and has all).

        Work that units share is shared by all their copies.
        """
        if self.ends:
            order = (0, *(old + 1 for old in order), len(self.units) - 1)
        where: dict[int, list[int]] = {}
        for new, old in enumerate(order):
            where.setdefault(old, []).append(new)

        def all_of(units: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(sorted(new for old in units for new in where[old]))

        shared = tuple(replace(item, units=all_of(item.units)) for item in self.shared)
        loose = tuple(
            replace(item, maker=where[item.maker][-1] if item.maker >= 0 else -1, units=all_of(item.units))
            for item in self.loose
        )
        tied = tuple(replace(item, units=all_of(item.units)) for item in self.tied)
        units = tuple(self.units[old] for old in order)
        return replace(self, units=units, shared=shared, loose=loose, tied=tied, cache={})

    def kept(self, kind: str, first: int, end: int) -> Size:
        """Bytes that a stage of units [first, end) keeps of one microbatch, without its received values."""
        total = Size()
        for number in range(first, end):
            work = self.units[number].kinds[kind]
            total = total.plus(work.kept)
            if number > first:
                total = total.plus(work.kept_of_previous)
        for item in self.loose:
            if item.kind == kind and item.is_in(first, end):
                total = total.plus(item.bytes)
        return total

    def received(self, first: int) -> Size:
        """Bytes that the stage which begins with unit ``first`` receives and holds."""
        return self.units[first - 1].sent if first else Size()
