"""Faults of the schedule: messages between stages, deferred weight gradients, slots, recomputation, draws, saves."""

from collections import deque
from dataclasses import replace
from typing import Any

import torch

from passes import dropout
from passes.ops.random_state import RandomState
from passes.ops.weight_gradients import WeightGradients
from runtime.checkpoint import training_state
from runtime.checkpoint.training_state import TrainingState
from runtime.cuda_graphs import region_graphs
from runtime.data.batches import BatchLayout
from runtime.engine.engine import Engine
from runtime.optimizer.buffers import GradientBuffers
from runtime.optimizer.slots import ParameterSlot
from runtime.pipeline import p2p
from runtime.pipeline.executor import Executor
from runtime.pipeline.p2p import Transport
from tests.tools.planted.fault import Fault, Function, Make


def _sent(kind: str, change: Any) -> Make:
    """Messages of ``kind`` (F: values, B: gradients) carry something else."""

    def make(whole: Function) -> Function:
        def send(self: Any, message: Any, tensors: Any) -> None:
            whole(self, message, [change(t.detach()) for t in tensors] if message.kind == kind else tensors)

        return send

    return make


def _sent_late(kind: str) -> Make:
    """Each message of ``kind`` carries what the message before it should have carried; the first is right."""

    def make(whole: Function) -> Function:
        before: dict[int, Any] = {}

        def send(self: Any, message: Any, tensors: Any) -> None:
            if message.kind == kind:
                kept = [t.detach().clone() for t in tensors]
                tensors, before[message.boundary] = before.get(message.boundary, kept), kept
            whole(self, message, tensors)

        return send

    return make


def _first_w_left_out(whole: Function) -> Function:
    def run(self: Any, key: Any) -> None:
        if key[1] == 0:
            self._kept.pop(key)
        else:
            whole(self, key)

    return run


def _first_w_twice(whole: Function) -> Function:
    def run(self: Any, key: Any) -> None:
        again = deque(self._kept[key])
        whole(self, key)
        if key[1] == 0:
            self._kept[key] = again
            whole(self, key)

    return run


def _first_loss_left_out(whole: Function) -> Function:
    def forward(self: Any, step: Any, action: Any) -> None:
        whole(self, step, action)
        if self.stages[action.chunk].has_loss and action.microbatch == 0 and self._loss is not None:
            self._loss = torch.zeros_like(self._loss)

    return forward


def _graph_slots_released_after_the_forward(whole: Function) -> Function:
    """So the next microbatch of the chunk takes the same slot."""
    return lambda order: {key: 0 for key in whole(order)}


def _message_slots_released_at_once(whole: Function) -> Function:
    return lambda *args: {key: 0 for key in whole(*args)}


def gradients_in_graphs_not_zeroed(whole: Function) -> Function:
    def begin_step(self: Any) -> None:
        in_graphs, self._in_graphs = self._in_graphs, []
        whole(self)
        self._in_graphs = in_graphs
        for slot in in_graphs:
            slot.is_fresh = False

    return begin_step


def _first_of_a_step(answer: bool) -> Make:
    """Whether a gradient is written (the first of a step) or added is always answered alike."""

    def make(whole: Function) -> Function:
        def take(self: Any) -> bool:
            whole(self)
            return answer

        return take

    return make


def _draws_of_next_microbatch(whole: Function) -> Function:
    return lambda self, step, microbatch: whole(self, step, microbatch + 1)


def _kinds_not_read(*left_out: str) -> Make:
    def make(whole: Function) -> Function:
        return lambda self: ((t, n, kind, box) for t, n, kind, box in whole(self) if kind not in left_out)

    return make


FAULTS = {
    "stages: gradients not sent": Fault(Transport, "send", _sent("B", torch.zeros_like), seed=177),
    "stages: gradients doubled": Fault(Transport, "send", _sent("B", lambda t: 2 * t), seed=177),
    "stages: gradients of another microbatch": Fault(Transport, "send", _sent_late("B"), seed=177),
    "stages: values of another microbatch": Fault(Transport, "send", _sent_late("F"), seed=177),
    "schedule: a W left out": Fault(WeightGradients, "run", _first_w_left_out, seed=30),
    "schedule: a W twice": Fault(WeightGradients, "run", _first_w_twice, seed=30),
    "schedule: the loss of a microbatch left out": Fault(Executor, "_forward", _first_loss_left_out, seed=25),
    "gradients: written over those of other microbatches": Fault(ParameterSlot, "take", _first_of_a_step(True), seed=0),
    "gradients: added to those of the step before": Fault(ParameterSlot, "take", _first_of_a_step(False), seed=0),
    "graphs: a slot released early": Fault(region_graphs, "slots_of", _graph_slots_released_after_the_forward, seed=30),
    "graphs: a message's buffer released early": Fault(p2p, "message_slots", _message_slots_released_at_once, seed=63),
    "graphs: gradients added to those of the step before": Fault(
        GradientBuffers, "begin_step", gradients_in_graphs_not_zeroed, seed=30
    ),
    "recomputation: draws of another microbatch": Fault(RandomState, "again", _draws_of_next_microbatch, seed=63),
    "dropout: a seed shared by microbatches": Fault(
        RandomState, "begin", lambda whole: lambda self, step, microbatch: whole(self, step, 0), seed=63
    ),
    "dropout: a seed shared by dp ranks": Fault(
        BatchLayout, "first_microbatch", lambda whole: property(lambda self: 0), seed=112
    ),
    "dropout: a seed shared by steps": Fault(
        Engine, "_step", lambda whole: lambda self, *given: replace(whole(self, *given), index=0), seed=63
    ),
    "dropout: a seed shared by tp ranks": Fault(
        dropout, "_held", lambda whole: lambda placement, tp, rank: whole(placement, tp, 0), seed=63
    ),
    "dropout: a seed shared by cp ranks": Fault(
        dropout, "_chunks", lambda whole: lambda cut, cp, rank: whole(cut, cp, 0), seed=35
    ),
    "save: moments not loaded": Fault(TrainingState, "_targets", _kinds_not_read("exp_avg", "exp_avg_sq"), seed=69),
    "save: mean of the weights not loaded": Fault(TrainingState, "_targets", _kinds_not_read("ema"), seed=86),
    "save: count of updates not loaded": Fault(
        training_state, "begin_at", lambda whole: lambda optimizer, updates, rested: whole(optimizer, 0, {}), seed=69
    ),
}
