"""Predicted bytes on one rank of each pp rank that only evaluates: parameters, and the forward of one microbatch.

parameters      the rank's shards, without the padding of gradient buffers; with zero 3 its ZeRO shards; the model's
                own buffers and constants
activations     at the peak of a forward without autograd: a value lives until its last reader. On the stage of the
                loss the larger of two: of the loss alone, and with the scores of labels, which are kept
communication   messages between stages: received ahead, sent and not known to be consumed, kept on this rank
whole           with zero 3: peak bytes of full weights
"""

from contextlib import suppress
from dataclasses import replace
from math import prod

from passes.errors import PlanError
from planner.cost.liveness import forward_live
from planner.cost.memory import MemoryRow, registered_bytes
from planner.decisions import Decisions
from planner.exchanges.collectives import FIGURES, WIDE, check_scored, gathered_weights
from planner.pipeline.ledger import StageBytes, peak, under_way
from planner.pipeline.links import Message, RankMessages
from planner.pipeline.schedule import SchedulePlan
from planner.recompute.decide import with_reruns
from planner.sharding.parameters import parameters_of_rank
from planner.sharding.shards import Shards
from planner.trace.lowered import Lowered
from planner.trace.trace import StageTrace


def evaluation_memory(lowered: Lowered, schedule: SchedulePlan) -> tuple[MemoryRow, ...]:
    """Return one row for each pp rank of ``Engine(plan, mode="evaluate")``."""
    decisions, shards = lowered.decisions, lowered.shards
    orders = tuple(tuple(action for action in order if action.kind == "F") for order in schedule.orders)
    forwards = [_forward(lowered, stage, schedule) for stage in range(lowered.num_stages)]
    gathered = gathered_weights(lowered, orders, evaluates=True)
    fold, rows = decisions.mesh.fold, []

    def sent(message: Message) -> int:
        return sum(boundary.bytes for boundary in shards.sent(message.boundary))

    for rank in range(decisions.mesh.pp):
        chunks = [StageBytes(0, 0, forwards[stage], 0) for stage in decisions.mesh.stages_of(rank)]
        alone = len(chunks) == 1  # such a rank first waits for its previous send (runtime.pipeline.executor)
        own = RankMessages(orders, rank, len(forwards), fold)
        most = peak(orders[rank], chunks, under_way(own, sent, sent, handed=sent, waits=alone))
        parameters, whole = _parameters(decisions, shards, rank), gathered[rank].most_bytes
        passing = {"communication": int(most.messages), "whole": whole, "peak": str(most.action or "")}
        rows.append(MemoryRow(rank, parameters, gradients=0, optimizer=0, activations=int(most.working), **passing))
    return tuple(rows)


def _parameters(decisions: Decisions, shards: Shards, rank: int) -> int:
    buffers = shards.buffers_of_rank(rank)
    buffers = buffers if any(buffer.gathers for buffer in buffers) else ()
    laid_out = {name for buffer in buffers for name in buffer.by_name}
    others = {p.fqn: p for p in parameters_of_rank(decisions, rank) if p.fqn not in laid_out}  # a tied one once
    unsharded = sum(prod(p.shape) * p.dtype.itemsize for p in others.values())
    return unsharded + sum(buffer.parameter_bytes for buffer in buffers) + registered_bytes(decisions, rank)


def _forward(lowered: Lowered, stage: int, schedule: SchedulePlan) -> int:
    """Return the peak bytes of a forward of one microbatch, with received values and the scores of earlier ones."""
    peaks = [_peak(lowered.trace(stage), lowered)]
    if stage == lowered.num_stages - 1:
        with suppress(PlanError):  # labels of such a loss cannot be scored, so it is only evaluated
            check_scored(lowered.decisions)
            earlier = (schedule.num_microbatches - 1) * _scores(lowered.decisions)
            peaks.append(_peak(lowered.scoring_trace(), lowered) + earlier)
    return max(peaks)


def _scores(decisions: Decisions) -> int:
    """Return the bytes of the scores of one microbatch, which are kept until the end of the batch."""
    (labels,) = (name for name, key in decisions.program.inputs.items() if key == decisions.scored.key)
    return FIGURES * WIDE * decisions.program.node(labels).meta["val"].numel()


def _peak(trace: StageTrace, lowered: Lowered) -> int:
    trace = with_reruns(trace, lowered.recomputed)
    alone = replace(trace, calls=[replace(call, hidden=()) for call in trace.calls])
    return max((most for _, most in forward_live(alone, set(trace.received.values()))), default=0)
