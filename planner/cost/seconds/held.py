"""Memory rows of a layout, as planner.cost.memory has them of a plan, from the sums of the units of each stage.

kept of a stage      Σ kept of its units, + its received values                       exact
peak of a forward    max over units of  kept before it + the most beyond              exact if the cut is the plan's
peak of a rank       along its actions, as long as its memory still grows
messages             those received for the next action, and those just sent
put aside for a W    Σ of its units: saved tensors of their products with weights, and the gradients of their results
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from math import ceil

from planner.cost.cut.kernels import Size
from planner.cost.cut.units import CutWork
from planner.cost.layout import Layout
from planner.cost.memory import SLACK, MemoryRow
from planner.cost.seconds.buffers import RankHolds
from planner.mesh import Mesh
from planner.pipeline.actions import Order
from planner.pipeline.ledger import Peak, peak
from planner.pipeline.ledger import StageBytes as Held
from planner.pipeline.links import received_by, sent_by
from planner.pipeline.schedule import KINDS, build_schedule, rank_order


@dataclass(frozen=True, slots=True)
class StageBytes:
    """Of one microbatch: ``kept``, ``logits`` included; at the peak of a ``forward`` and a ``backward``."""

    kept: float
    logits: float
    forward: float
    backward: float
    received: float
    returned: float  # gradients that come back over its end
    aside: float = 0.0  # bytes that a backward leaves for its W


def stage_bytes(work: CutWork, kind: str, first: int, end: int) -> StageBytes:
    """Of the stage of units [first, end)."""
    micro, received = work.micro, work.received(first)
    loose = [item for item in work.loose if item.kind == kind and item.is_in(first, end)]
    kept = received.at(micro)
    forward = backward = 0.0
    logits = Size()
    are_together = all(first <= item.units[0] and item.units[-1] < end for item in work.tied if item.held is not None)
    for number in range(first, end):
        of = work.units[number].kinds[kind]
        before = kept + sum(i.bytes.at(micro) for i in loose if i.units[0] < number and i.maker < number)
        forward = max(forward, before + max((s.at(micro) for s in of.forward_over), default=0.0))
        beyond = of.backward_over if are_together else of.backward_apart
        backward = max(backward, before + max((s.at(micro) for s in beyond), default=0.0))
        kept += of.kept.at(micro) + (of.kept_of_previous.at(micro) if number > first else 0.0)
        logits = logits.plus(of.logits)
    kept += sum(item.bytes.at(micro) for item in loose)
    returned = work.units[end - 1].returned.at(micro) if end < len(work.units) else 0.0
    aside = sum(work.units[number].kinds[kind].aside.at(micro) for number in range(first, end))
    peaks = max(forward, kept), max(backward, kept)
    return StageBytes(kept, logits.at(micro), *peaks, received.at(micro), returned, aside)


def memory_row(
    rank: int, layout: Layout, stages: Sequence[StageBytes], holds: RankHolds, group_size: int | None
) -> MemoryRow:
    """Of one pp rank; ``stages``: of the full pipeline."""
    at, kept, logits, working, messages = _peak(rank, layout, stages, group_size)
    return MemoryRow(
        rank,
        parameters=holds.parameters,
        gradients=holds.gradients,
        optimizer=holds.optimizer,
        activations=round(kept - logits),
        logits=round(logits),
        working=round(working),
        communication=round(messages),
        whole=holds.whole,
        slack=ceil(SLACK * round(kept + working + messages + holds.whole)),
        peak=str(at or ""),
        of_microbatch=tuple(round(stage.kept) for stage in (stages[s] for s in layout.mesh.stages_of(rank))),
    )


def _peak(rank: int, layout: Layout, stages: Sequence[StageBytes], group_size: int | None) -> Peak:
    """As long as its memory still grows; of messages those received for the next action, and those just sent."""
    mesh = layout.mesh
    pp, own = mesh.pp, mesh.stages_of(rank)
    group = group_size or pp
    count = layout.num_microbatches
    if KINDS[layout.schedule].repeats:
        few = 2 * pp + 2 * group
        count = min(count, few + (count - few) % group) if count > few else count
    order, waits = _order(layout.schedule, pp, rank, count, mesh.vpp, group), KINDS[layout.schedule].waits
    chunks = [_of_chunk(stages[stage], waits) for stage in own]
    works = [(kind, chunk) for kind in "FBW" for chunk in range(len(own))]
    awaited = {(kind, chunk): _awaited(kind, stages, own[chunk], mesh) for kind, chunk in works}
    sends = {(kind, chunk): _sent(kind, stages, own[chunk], mesh) for kind, chunk in works}
    sent, under_way = {"F": 0.0, "B": 0.0, "W": 0.0}, list[float]()
    for action, following in zip_longest(order, order[1:]):
        waiting = awaited[following.kind, following.chunk] if following else 0.0
        under_way.append(waiting + sent["F"] + sent["B"])
        sent[action.kind] = sends[action.kind, action.chunk]
    return peak(order, chunks, under_way)


def _of_chunk(stage: StageBytes, waits: bool) -> Held:
    """A backward counts all deferred bytes, since most are there at its end."""
    aside = stage.aside if waits else 0.0
    return Held(stage.kept, stage.logits, stage.forward, stage.backward + aside, aside)


def _order(kind: str, pp: int, rank: int, count: int, vpp: int, group: int) -> Order:
    """The actions of a rank; with deferred weight gradients, those of equal stages."""
    if not KINDS[kind].waits:
        return rank_order(kind, pp, rank, count, vpp, group)
    return _orders_of_equal_stages(kind, pp, count, vpp)[rank]


@lru_cache(maxsize=256)
def _orders_of_equal_stages(kind: str, pp: int, count: int, vpp: int) -> tuple[Order, ...]:
    return build_schedule(kind, pp, count, vpp).orders


def _awaited(kind: str, stages: Sequence[StageBytes], index: int, mesh: Mesh) -> float:
    if kind == "W" or not received_by(kind, index, 0).crosses(len(stages), mesh.pp, mesh.fold):
        return 0.0
    return stages[index].received if kind == "F" else stages[index].returned


def _sent(kind: str, stages: Sequence[StageBytes], index: int, mesh: Mesh) -> float:
    if kind == "W" or not sent_by(kind, index, 0).crosses(len(stages), mesh.pp, mesh.fold):
        return 0.0
    if kind == "F":  # sent values are mostly not saved on this stage
        return stages[index + 1].received
    return stages[index - 1].returned
