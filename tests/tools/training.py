"""A model trained on forks of the laboratory, and by plain PyTorch: losses of steps and parameters at their end.

    trained_on(host, plan, batches)                    in a call of the laboratory: what rank 0 found
    trained_alone(model, loss, batches, update)        the unmodified model on the same whole batches

Parameters have all their names, also of weights that are tied.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from planner import Plan
from planner.spec.spec import Spec
from runtime import Engine
from runtime.fuzz.forks import StoreHost
from runtime.verify.reference import OneProcess
from tests.models.families import Entry
from tests.tools.limits import HANG_SECONDS
from tests.tools.ranks import Ranks
from tests.tools.specs import entry_inputs

ADAMW = {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.01, "clip_grad_norm": 1.0}
Batch = dict[str, Tensor]


class Trained(NamedTuple):
    """After a step of each batch; ``evaluated``: the loss of each batch then; ``measured``: bytes by category."""

    losses: list[float]
    parameters: dict[str, Tensor]
    evaluated: list[float]
    measured: dict[str, int]

    def furthest(self, parameters: Batch) -> float:
        """The largest difference of a parameter from these."""
        assert self.parameters.keys() == parameters.keys()
        return max(float((x - parameters[n]).abs().max()) for n, x in self.parameters.items())


def spec_of(entry: Entry, lengths: Sequence[int] = (), dtype: str = "float64", **sections: Any) -> dict[str, Any]:
    """``lengths``: all that the first dim of each input has."""
    inputs = entry_inputs(entry)
    if lengths:
        inputs = {n: {**given, "shape": [list(lengths), *given["shape"][1:]]} for n, given in inputs.items()}
    return {
        "batch": {"global": 8, "micro": 2},
        "inputs": inputs,
        "optimizer": {"name": "adamw", **ADAMW},
        "precision": {"parameters": dtype},
        "tensor_parallel": {"vocabulary_multiple": 8},
        "seed": 7,
        **sections,
    }


def train(plan: Plan, batches: Sequence[Batch]) -> Trained:
    """The job of a rank."""
    with Engine(plan, timeout_seconds=HANG_SECONDS) as engine:
        losses = [engine.train_step(batch).loss for batch in batches]
        measured = engine.optimizer.measured_bytes()
        return Trained(losses, engine.gather_parameters(), [engine.evaluate(batch) for batch in batches], measured)


def trained_on(host: StoreHost, plan: Plan, batches: Sequence[Batch]) -> Trained:
    return Ranks(plan, "forks", host).run(train, batches)[0]


def trained_alone(
    model: nn.Module,
    loss_of: Callable[[Any], Tensor],
    batches: Sequence[Batch],
    update: torch.optim.Optimizer,
    before_update: Callable[[int], object] = lambda step: None,
) -> Trained:
    """Gradients are clipped at 1. ``before_update``: called before each update with its number, from 0."""
    losses = []
    for step, batch in enumerate(batches):
        update.zero_grad()
        loss = loss_of(model(**batch))
        loss.backward()
        losses.append(loss.item())
        nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
        before_update(step)
        update.step()
    parameters = {n: p.detach() for n, p in model.named_parameters(remove_duplicate=False)}
    return Trained(losses, parameters, [], {})


def trained_by_spec(model: nn.Module, spec: dict[str, Any], batches: Sequence[Batch]) -> Trained:
    """In one process, as a spec says."""
    alone = OneProcess(model, Spec.load({**spec, "mesh": {}}))
    losses = [alone.train_step(batch) for batch in batches]
    return Trained(losses, {n: p.detach() for n, p in alone.model.named_parameters(remove_duplicate=False)}, [], {})
