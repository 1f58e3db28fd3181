"""Handles of a graph as planning runs it: they note collectives, draw no numbers, and sum gradients nowhere.

Each is one object for equal ones, and an op that names its stream of random numbers gets one name for all: so equal
calls of different blocks, stages and layouts are observed once (planner.trace.observe).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from passes.ops import dropout
from passes.ops.axis import AxisHandle
from passes.ops.random_state import RandomState
from passes.ops.weight_gradients import Add, WeightGradients, add_products, add_rows, add_whole
from passes.program.ops.aten import HALF


class Sent(NamedTuple):
    """A collective over ``axis``, of ``bytes`` as a plan counts them (passes.types.conversions)."""

    axis: str
    kind: str
    phase: str
    bytes: int


_SENT: list[Sent] = []


@contextmanager
def sent() -> Iterator[list[Sent]]:
    """Yields the collectives that ops would run inside, in their order."""
    _SENT.clear()
    yield _SENT


class _Axis(AxisHandle):
    def note(self, kind: str, phase: str, size: int) -> None:
        if self.size > 1:
            _SENT.append(Sent(self.name, kind, phase, size))


class _Sum:
    """The place of a gradient's sum. A product is added by the kernel that makes it, unless the sum is wider."""

    def add(self, add: Add, *values: Any) -> None:
        if add is add_rows:
            _ = values[0].sum(0)
        elif add is not add_whole:
            for left, right in zip(*values, strict=True) if add is add_products else [values]:
                _ = left @ right if left.dtype in HALF else None

    def add_nothing(self) -> None:
        pass


class _Sums:
    def place_of(self, parameter: Tensor) -> _Sum:
        return _Sum()


class _Streams(RandomState):
    """Any op may draw, and leaves the generators as they are."""

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride] - there is one
        return id(self)

    def generator(self, device: torch.device, op: int, sharded: bool) -> torch.Generator:
        return torch.default_generator

    @contextmanager
    def as_default(self, device: torch.device, op: int, sharded: bool) -> Iterator[None]:
        yield


@cache
def _axis(name: str, size: int) -> AxisHandle:
    return _Axis(name, size, 0)


_STREAMS, _WEIGHT_GRADIENTS = _Streams(0, 0), WeightGradients()
_WEIGHT_GRADIENTS.bind(_Sums())


def planned(handle: Any) -> Any:
    """Return the handle of planning for one of a lowered graph; anything else unchanged."""
    if isinstance(handle, AxisHandle):
        return _axis(handle.name, handle.size)
    if isinstance(handle, WeightGradients):
        return _WEIGHT_GRADIENTS
    return _STREAMS if isinstance(handle, RandomState) else handle


STREAM_AT = {dropout.stream_dropout: 3, dropout.stream_attention: 2, dropout.stream_random: 2}


def without_stream(target: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of a call, with one name for all streams and draws."""
    if target in STREAM_AT:
        at = STREAM_AT[target]
        return (*args[:at], 0, *args[at + 1 :])
    return tuple(a._replace(site=0) if isinstance(a, dropout.SampleElements) else a for a in args)
