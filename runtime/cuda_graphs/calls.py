"""The regions of a stage with their tensors and counts of collectives: a replay runs no Python that would count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

from passes.ops.axis import AxisHandle
from passes.ops.region import RegionCall, run_region
from passes.stage_module import StageModule

# for each axis its collectives by (kind, phase), and their bytes
Counted = list[tuple[AxisHandle, Counter[Any], Counter[Any]]]


def calls_of(stage: StageModule) -> Iterator[tuple[RegionCall, list[Any]]]:
    """The regions of a stage in the order in which they run, each with its parameters, buffers and handles."""
    for node in stage.module.graph.find_nodes(op="call_function", target=run_region):
        handle, _, held = node.args
        yield attrgetter(handle.target)(stage.module), [attrgetter(n.target)(stage.module) for n in held]


def axes_of(values: Iterable[Any]) -> list[AxisHandle]:
    """The axes among handles, each once."""
    return list({id(value): value for value in values if isinstance(value, AxisHandle)}.values())


@contextmanager
def uncounted(axes: Iterable[AxisHandle]) -> Iterator[Counted]:
    """Afterwards the counts are as before; the yielded list then holds the counts of the calls inside."""
    before = [(axis, axis.counts.copy(), axis.bytes.copy()) for axis in axes]
    counted: Counted = []
    try:
        yield counted
    finally:
        for axis, counts, sizes in before:
            counted.append((axis, axis.counts - counts, axis.bytes - sizes))
            axis.counts, axis.bytes = counts, sizes


def count_again(counted: Counted) -> None:
    """As if it had run once more."""
    for axis, counts, sizes in counted:
        axis.counts.update(counts)
        axis.bytes.update(sizes)
