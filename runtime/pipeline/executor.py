"""Run one step of a pipeline rank: a loop over the schedule's actions, with one short method for each kind.

    F   receive values -> stage module -> send values        saves tensors for its backward
    B   receive gradients -> backward -> send gradients      frees them; if a W follows, defers the weight gradients
                                                             of matrix products
    W   the deferred weight gradients                        frees their inputs

The loss of a microbatch is its share of the mean over the global batch: losses and gradients are summed, not divided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from textwrap import indent
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from torch.autograd.graph import get_gradient_edge

from passes.base import StageModule
from passes.errors import PlanError
from passes.interceptors import installed
from passes.ops.random_state import RandomState
from passes.ops.recompute import abandon
from passes.ops.weight_gradients import WeightGradients
from passes.program.source_lines import where_failed
from planner.pipeline.links import Message, received_by, sent_by
from planner.pipeline.schedule import Action
from planner.pipeline.simulate import grid_around
from runtime.distributed.faults.activity import LAST_SENDS
from runtime.distributed.faults.failure import StepError, is_of_a_peer
from runtime.pipeline.p2p import Transport


@dataclass(frozen=True, slots=True)
class Step:
    """The input of one run over the actions.

    ``microbatches``: of this dp rank. ``first_microbatch``: global index of the first of them. ``denominators``:
    float64 scalars, sums over the global batch. ``scale``: the gradient of the loss, on the device; None for 1.
    """

    index: int
    microbatches: Sequence[Mapping[str, Tensor]]
    first_microbatch: int
    denominators: Sequence[Tensor]
    scale: Tensor | None = None


@dataclass(slots=True)
class Saved:
    """The tensors that a forward saves for its backward: not its outputs, only their edges in the autograd graph.

    ``edges``: of each sent value with a gradient, then of the loss; None for one that depends on nothing trainable.
    ``loss_gradient``: the gradient with which the backward of the loss starts.
    """

    received: list[Tensor]
    edges: list[Any]
    loss_gradient: Tensor | None


class Gradients(Protocol):
    """Sums of weight gradients. ``begin`` is called before the gradients of a microbatch, ``end`` after them."""

    def begin(self, chunk: int, *, is_alone: bool) -> None: ...

    def end(self) -> None: ...


class Executor:
    """Runs the actions of this rank.

    Owns the saved tensors of the microbatches in flight, the sum of their losses, and ``scores``: one of each
    microbatch of the last evaluation, if a stage returns them. ``around(action, step)``: a context, for observers, in
    which each action runs, with the receives that it posts.
    """

    def __init__(
        self,
        stages: Sequence[StageModule],
        order: Sequence[Action],
        transport: Transport,
        random: RandomState,
        *,
        before_backward: Callable[[bool], None] | None = None,
        before_forward: Callable[[Action], None] | None = None,
        before_weights: Callable[[bool], None] | None = None,
        weights: WeightGradients | None = None,
        gradients: Gradients | None = None,
    ) -> None:
        """``before_backward(is_last)``: called before each backward; ``is_last``: the last of its chunk in this step.

        ``before_forward(action)``: called before each forward that a backward will follow; ``before_weights(is_last)``:
        before each W. ``weights``: the work that Ws do; without it a backward computes all gradients. ``gradients``:
        weight gradients, complete for a microbatch after its W, or its B if it has no W.
        """
        self.stages = list(stages)
        self.order = tuple(order)
        self.transport = transport
        self.random = random
        self.before_backward = before_backward
        self.before_forward = before_forward
        self.before_weights = before_weights
        self.weights = weights
        self.gradients = gradients
        self.around: Callable[[Action, Step], AbstractContextManager[Any]] = lambda action, step: nullcontext()
        self.scores: list[Tensor] = []
        self._saved: dict[tuple[int, int], Saved] = {}
        self._last = {(action.kind, action.chunk): action for action in self.order}
        self._run_later = {(action.chunk, action.microbatch) for action in self.order if action.kind == "W"}
        self._run_by_kind = {"F": self._forward, "B": self._backward, "W": self._weights}

    def over(self, stages: Sequence[StageModule]) -> Executor:
        """Return an executor of the same order for other stages, which only evaluate."""
        return Executor(stages, self.order, self.transport, self.random)

    @property
    def in_flight(self) -> Iterable[Saved]:
        """The saved tensors of the microbatches between their forward and their backward."""
        return self._saved.values()

    def run(self, step: Step) -> Tensor | None:
        """Run forward and backward of all microbatches; return the sum of losses (float64) if the loss is here."""
        self.transport.waits.begin()
        loss = self._run(step, self.order)
        self.transport.waits.end()
        return loss

    @torch.no_grad()
    def evaluate(self, step: Step, *, training: bool = False) -> Tensor | None:
        """Run only the forwards, without autograd. ``training``: with the dropout that the step will draw."""
        self.scores = []
        with installed((self.random, "training", training)):
            return self._run(step, tuple(action for action in self.order if action.kind == "F"))

    def _run(self, step: Step, actions: Sequence[Action]) -> Tensor | None:
        self._loss: Tensor | None = None
        activity = self.transport.groups.faults.activity
        for position, action in enumerate(actions):
            activity.at(step.index, self.stages[action.chunk].index, action)
            try:
                with self.around(action, step):
                    for posted in actions[position : position + 2] if position + 1 < len(actions) else ():
                        self._post(posted)
                    self._run_by_kind[action.kind](step, action)
            except PlanError:
                abandon()
                raise
            except Exception as error:
                abandon()
                self._saved.clear()
                if self.weights is not None:
                    self.weights.forget()
                self.transport.forget()
                raise StepError(self._describe(action, error)) from error
        activity.off(LAST_SENDS)
        self.transport.drain()
        assert not torch.is_grad_enabled() or not self._saved, "a forward without its backward"
        assert self.weights is None or not self.weights.num_waiting, "weight gradients that no W has computed"
        return self._loss

    def _post(self, action: Action) -> None:
        """Start to receive the inputs of ``action``."""
        stage = self.stages[action.chunk]
        if action.kind == "F" and stage.receives:
            self.transport.post(_into(stage, action), stage.receives)
        if action.kind == "B" and any(b.requires_grad for b in stage.sends):
            self.transport.post(_into(stage, action), stage.sends)

    def _forward(self, step: Step, action: Action) -> None:
        stage = self.stages[action.chunk]
        received = self.transport.receive(_into(stage, action), stage.receives) if stage.receives else []
        if torch.is_grad_enabled():
            received = [t.requires_grad_(b.requires_grad) for t, b in zip(received, stage.receives, strict=True)]
        microbatch = step.microbatches[action.microbatch]
        self.random.begin(step.index, step.first_microbatch + action.microbatch)
        if self.before_forward is not None and torch.is_grad_enabled():
            self.before_forward(action)
        outputs = stage.module(
            *received, *(microbatch[name] for name in stage.inputs), *(step.denominators[i] for i in stage.denominators)
        )
        sent = outputs[: len(stage.sends)]
        if stage.sends:
            if not torch.is_grad_enabled() and len(self.stages) == 1:
                self.transport.settle()  # without backwards no message frees earlier ones, and all would be held
            self.transport.send(_out_of(stage, action), _to_send(stage, sent))
        if stage.has_scores:
            self.scores.append(outputs[-1 - stage.has_loss])  # before the loss, if there is one
        seed = None
        if stage.has_loss:
            loss, seed = self.loss_of(outputs[-1], step, action)
            self._loss = loss if self._loss is None else self._loss + loss
        if torch.is_grad_enabled():
            self._saved[action.chunk, action.microbatch] = _save(stage, received, outputs, seed)

    def loss_of(self, output: Tensor, step: Step, action: Action) -> tuple[Tensor, Tensor]:
        """Return the loss of a microbatch (float64), and the gradient with which the backward of ``output`` starts.

        The loss is a copy, because ``output`` may lie in static memory of a graph, which is reused.
        """
        return output.detach().to(torch.float64, copy=True), _seed(output, step.scale)

    def _backward(self, step: Step, action: Action) -> None:
        stage = self.stages[action.chunk]
        saved = self._saved.pop((action.chunk, action.microbatch))
        gradients: list[Tensor] = []
        if any(b.requires_grad for b in stage.sends):
            gradients.extend(self.transport.receive(_into(stage, action), stage.sends))
        if saved.loss_gradient is not None:
            gradients.append(saved.loss_gradient)
        if self.before_backward is not None:
            self.before_backward(self._last["B", action.chunk] == action)
        roots = [(edge, gradient) for edge, gradient in zip(saved.edges, gradients, strict=True) if edge is not None]
        waits = (action.chunk, action.microbatch) in self._run_later
        if self.gradients is not None and not waits:
            self.gradients.begin(action.chunk, is_alone=True)
        with self._with_weights(action):
            if roots:
                torch.autograd.backward([edge for edge, _ in roots], [gradient for _, gradient in roots])
        leaves = [t for t, b in zip(saved.received, stage.receives, strict=True) if b.requires_grad]
        if leaves:
            gradients = [t.grad if t.grad is not None else torch.zeros_like(t) for t in leaves]
            self.transport.send(_out_of(stage, action), gradients)
        if self.gradients is not None and not waits:
            self.gradients.end()

    def _with_weights(self, action: Action) -> AbstractContextManager[Any]:
        """Return a context in which a backward defers its weight gradients, if the schedule has a W for it."""
        key = action.chunk, action.microbatch
        if self.weights is None:
            return nullcontext()
        return self.weights.put_aside(key if key in self._run_later else None)

    def _weights(self, step: Step, action: Action) -> None:
        if self.before_weights is not None:
            self.before_weights(self._last["W", action.chunk] == action)
        if self.gradients is not None:
            self.gradients.begin(action.chunk, is_alone=False)
        if self.weights is not None:
            self.weights.run((action.chunk, action.microbatch))
        if self.gradients is not None:
            self.gradients.end()

    def _describe(self, action: Action, error: Exception) -> str:
        what = f"{self.transport.groups.faults.activity}: {type(error).__name__}: {error}"
        if is_of_a_peer(error):  # the position of this rank explains nothing
            return what
        module = self.stages[action.chunk].module
        where = where_failed(module.graph, error) if isinstance(module, fx.GraphModule) else None
        what += f"\n  at:  {where}" if where is not None and str(where) else ""
        return f"{what}\n  its place in the schedule of all pp ranks:\n{indent(self._place(action), '  ')}"

    def _place(self, action: Action) -> str:
        orders, groups = self.transport.orders or (self.order,), self.transport.groups
        if not torch.is_grad_enabled():  # an evaluation runs only forwards
            orders = tuple(tuple(a for a in order if a.kind == "F") for order in orders)
        return grid_around(orders, groups.place["pp"], action, groups.mesh.fold)


def _seed(loss: Tensor, scale: Tensor | None) -> Tensor:
    """Return the gradient of the loss."""
    return torch.ones_like(loss) if scale is None else scale.to(loss.dtype).expand_as(loss)


def _save(stage: StageModule, received: list[Tensor], outputs: Sequence[Tensor], seed: Tensor | None) -> Saved:
    roots = [output for output, b in zip(outputs, stage.sends, strict=False) if b.requires_grad]
    if stage.has_loss:
        roots.append(outputs[-1])
    edges = [get_gradient_edge(root) if root.requires_grad else None for root in roots]
    return Saved(received, edges, seed)


def _to_send(stage: StageModule, values: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the values to send: copies, if no gradient comes back in training. Nothing then stops this stage from
    overwriting static memory of a graph before its peer has received it."""
    waits = not torch.is_grad_enabled() or any(b.requires_grad for b in stage.sends)
    return values if waits else [value.detach().clone() for value in values]


def _into(stage: StageModule, action: Action) -> Message:
    return received_by(action.kind, stage.index, action.microbatch)


def _out_of(stage: StageModule, action: Action) -> Message:
    return sent_by(action.kind, stage.index, action.microbatch)
