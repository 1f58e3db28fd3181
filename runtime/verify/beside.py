"""One process beside an engine: every update is compared when both have made it, so one of them is held at a time.

    engine        forward, backward · update
    one process                                forward, backward · update
    compared                                   weights before, loss, gradients, norm

Below float64 the one process goes on from the engine's weights once they are compared.
The weights after an update are gathered when the next forward has read them, since a gather waits for all of them: the
engine continues as in ``train_step``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from planner.spec.spec import Spec
from runtime.audit.tolerance import Tolerance, lowest_precision
from runtime.verify.comparison import Row, compare_gradients, compare_parameters, compare_value, noise_of_updates
from runtime.verify.reference import OneProcess

Named = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class EngineStep:
    """The engine's results for one global batch, as full tensors. ``before``: the parameters that it read; none in the
    first step. ``imbalance``: rows of experts on the fullest rank of ep over the mean; None without such rows.
    """

    loss: float
    norm: float
    gradients: Named
    before: Named
    imbalance: float | None = None


class Beside:
    """Owns the one process and all that was compared so far. ``tolerance``: given by the user."""

    def __init__(self, one: OneProcess, tolerance: float | None = None) -> None:
        self._one, self._tolerance = one, tolerance
        self.rows: list[Row] = []
        sent = one.spec.precision.gather
        self.precision = getattr(torch, sent) if sent else torch.float64  # the lowest that the model computes in
        self.imbalance: float | None = None  # the most of all steps
        self._still: set[str] | None = None  # parameters that no loss has reached so far
        self._noise: dict[str, Tensor] = {}  # by element, the most that one update may have added so far

    def step(self, batch: Mapping[str, Tensor], made: EngineStep) -> None:
        """Compare the step that the engine has made with ``batch``, and make it here."""
        if made.imbalance is not None:
            self.imbalance = max(made.imbalance, self.imbalance or 0.0)
        if made.before:
            self.compare_parameters(made.before)
            self._adopt(made.before)
        with lowest_precision() as seen:
            loss = self._one.forward_backward(batch)
        if torch.finfo(seen.dtype).eps > torch.finfo(self.precision).eps:
            self.precision = seen.dtype
        step = self._one.num_updates + 1
        allowed = self._allowed(step)
        gradients = {name: p.grad for name, p in named_parameters(self._one.model)}
        self.rows.append(compare_value("loss", made.loss, loss, allowed.of_loss(loss), step))
        self.rows += compare_gradients(made.gradients, gradients, allowed, step)
        unscaled = {name: None if g is None else g.clone() for name, g in gradients.items()}
        norm = self._one.update()
        self.rows.append(compare_value("norm", made.norm, norm, allowed.gradient, step))
        self._note(made.gradients, unscaled, norm)

    def _adopt(self, found: Named) -> None:
        """Below float64 each step begins with the engine's parameters: its gradients differ by that step alone.

        AdamW makes an update of lr from a gradient near zero, so rounding, amplified, would move the next gradients.
        """
        if self.precision == torch.float64:
            return
        with torch.no_grad():
            for name, parameter in named_parameters(self._one.model):
                if name in found and found[name].shape == parameter.shape:
                    parameter.copy_(found[name])

    def compare_parameters(self, found: Named) -> None:
        """After the last update of both. ``found``: the engine's, as full tensors."""
        truth, step = dict(named_parameters(self._one.model)), self._one.num_updates
        self.rows += compare_parameters(found, truth, self._allowed(step), self._still or set(), self._noise, step=step)

    def _allowed(self, num_updates: int) -> Tolerance:
        return Tolerance.of(self.precision, greatest_rate(self._one.spec), self._tolerance, num_updates=num_updates)

    def _note(self, found: Named, gradients: Mapping[str, Tensor | None], norm: float) -> None:
        """Note the facts of this step's gradients that the comparison of parameters needs."""
        unreached = {name for name, gradient in gradients.items() if gradient is None}
        self._still = unreached if self._still is None else self._still & unreached
        o = self._one.spec.optimizer
        scale = 1.0 if o.clip_grad_norm is None else min(1.0, o.clip_grad_norm / (norm + 1e-6))
        for name, noise in noise_of_updates(
            found, gradients, lr=greatest_rate(self._one.spec), eps=o.eps, scale=scale
        ).items():
            before = self._noise.get(name)
            self._noise[name] = noise if before is None else torch.maximum(before, noise)


def greatest_rate(spec: Spec) -> float:
    """The greatest learning rate of all groups."""
    o = spec.optimizer
    return max(o.lr, *(group.lr or 0.0 for group in o.groups.values()), 0.0)


def named_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Under each of their names."""
    return list(model.named_parameters(remove_duplicate=False))
