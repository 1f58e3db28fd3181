"""Compare a run with the truth: how far apart two tensors are, and how far apart rounding may drive them.

One process beside an engine: every update is compared when both have made it, so one of them is held at a time. Below
float64 the one process goes on from the engine's weights once they are compared. The weights after an update are
gathered when the next forward has read them, since a gather waits for all of them: the engine continues as in
``train_step``.

How far an update drives two sides apart that differ by nothing but the rounding of their gradients:

AdamW's first update    lr · g / (|g| + eps): of a gradient no larger than eps, its rounding is as large as the update
Muon                    the update is rounded to bfloat16 before the Newton-Schulz iterations, which raise singular
                        values of any size to about 1: those below the rounding of the largest one are noise
"""

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from math import inf, isnan, sqrt

import torch
from torch import Tensor, nn

from passes.program.matrices import Matrices
from planner.capture.gradients.applications import LowestPrecision
from planner.spec.optimizer import OptimizerSpec
from planner.updates import base_of
from runtime.audit.own_module import Tolerance
from runtime.verify.reference import OneProcess, places_of

Named = Mapping[str, Tensor]
_SCALES = (1.1, 1.3, 1.7)  # no powers of two: every element of a scaled matrix is rounded otherwise


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison: ``difference`` against the ``allowed`` one; inf if a tensor is missing or holds NaN.

    ``name``: of a tensor; "" for a number of the full step. ``step`` counts from 1, as the log does; 0: of no step.
    """

    kind: str
    name: str
    difference: float
    allowed: float
    step: int = 0

    @property
    def passed(self) -> bool:
        return self.difference <= self.allowed

    @property
    def severity(self) -> float:
        return self.difference / max(self.allowed, 1e-300)

    @property
    def place(self) -> str:
        """The tensor and the step."""
        return ", ".join(text for text in (self.name, f"step {self.step}" if self.step else "") if text)

    def __str__(self) -> str:
        missing = "is missing or has NaN or Inf" if self.difference == inf else f"differs by {self.difference:.2e}"
        step = f", step {self.step}" if self.step else ""
        return f"{f'{self.kind} {self.name}'.strip()} {missing} (allowed {self.allowed:.1e}{step})"


def compare_value(kind: str, found: float, truth: float, allowed: float, step: int) -> Row:
    """The relative difference of one number of a step."""
    return Row(kind, "", _finite(abs(found - truth) / max(abs(truth), 1e-300)), allowed, step)


def compare_gradients(
    found: Mapping[str, Tensor], truth: Mapping[str, Tensor | None], allowed: Tolerance, step: int = 0
) -> list[Row]:
    """The largest difference of each gradient, relative to its own largest element.

    In half precision, rounding turns single neurons of a ReLU on or off, each with all of its own gradient: if it is
    smaller, twice the norm of the difference counts, relative to the norm of the gradient.
    Rounding of parameters adds up as a random walk over updates, and so does the difference of their gradients.
    A gradient that one side lacks is a difference: a parameter frozen by the plan, or one that it alone trains. None in
    ``truth`` (the loss does not depend on it) counts as zeros.
    """
    floor = allowed.gradient_floor(max((_largest(t) for t in truth.values() if t is not None), default=0.0))
    limit = allowed.gradient * sqrt(allowed.num_updates)
    is_half = torch.finfo(allowed.dtype).bits < 32
    rows = []
    for name in dict.fromkeys((*truth, *found)):
        true, mine = truth.get(name), found.get(name)
        if true is None and mine is not None:
            true = torch.zeros_like(mine)
        if true is not None:
            difference = _distance(mine, true) / max(_largest(true), floor, 1e-300)
            if is_half and difference > limit and mine is not None and mine.shape == true.shape:
                size = max(_norm(true), floor * sqrt(true.numel()), 1e-300)
                difference = min(difference, 2 * _distance(mine, true, _norm) / size)
            rows.append(Row("gradient", name, difference, limit, step))
    return rows


def compare_parameters(
    found: Mapping[str, Tensor],
    truth: Mapping[str, Tensor],
    allowed: Tolerance,
    still: Container[str] = (),
    noise: Mapping[str, Tensor] | None = None,
    *,
    step: int = 0,
) -> list[Row]:
    """The worst element of each parameter; those named in ``still`` got no update, and must be equal in every bit.

    ``noise``: by element, the difference that one update may add.
    """
    added = noise or {}
    rows = [_parameter_row(n, found.get(n), t.detach(), allowed, n in still, added.get(n)) for n, t in truth.items()]
    return [replace(row, step=step) for row in rows]


def _parameter_row(
    name: str, found: Tensor | None, truth: Tensor, allowed: Tolerance, is_still: bool, noise: Tensor | None
) -> Row:
    if is_still or not truth.is_floating_point():
        return Row("parameter", name, _distance(found, truth), 0.0)
    limit = allowed.rounding(truth) + allowed.parameter
    if noise is not None:
        limit = limit + noise.to(truth.device) * allowed.num_updates
    if found is None or found.shape != truth.shape or not truth.numel():
        return Row("parameter", name, _distance(found, truth), allowed.parameter)
    difference = (found.to(truth.device, torch.float64) - truth.double()).abs()
    worst = int((difference / limit).nan_to_num(inf).argmax())
    return Row("parameter", name, _finite(difference.view(-1)[worst].item()), limit.view(-1)[worst].item())


def _distance(found: Tensor | None, truth: Tensor, measure: Callable[[Tensor], float] | None = None) -> float:
    """``measure``: the largest element by default."""
    if found is None or found.shape != truth.shape:
        return inf
    return _finite((measure or _largest)(found.to(truth.device, torch.float64) - truth.detach().double()))


def _largest(tensor: Tensor) -> float:
    return tensor.detach().abs().max().item() if tensor.numel() else 0.0


def _norm(tensor: Tensor) -> float:
    return tensor.detach().double().norm().item()


def _finite(value: float) -> float:
    return inf if isnan(value) else value


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
        with LowestPrecision() as seen:
            loss = self._one.forward_backward(batch)
        if torch.finfo(seen.dtype).eps > torch.finfo(self.precision).eps:
            self.precision = seen.dtype
        step = self._one.num_updates + 1
        allowed = self._allowed(step)
        gradients = {name: p.grad for name, p in self._parameters.items()}
        self.rows.append(compare_value("loss", made.loss, loss, allowed.of_loss(loss), step))
        self.rows += compare_gradients(made.gradients, gradients, allowed, step)
        unscaled = {name: None if g is None else g.clone() for name, g in gradients.items()}
        norm = self._one.update()
        self.rows.append(compare_value("norm", made.norm, norm, allowed.gradient, step))
        self._note(made.gradients, unscaled, norm)

    @property
    def _parameters(self) -> dict[str, nn.Parameter]:
        return dict(self._one.model.named_parameters(remove_duplicate=False))

    @property
    def _is_rounded(self) -> bool:
        return self.precision != torch.float64

    def _adopt(self, found: Named) -> None:
        """Below float64 each step begins with the engine's parameters: its gradients differ by that step alone.

        AdamW makes an update of lr from a gradient near zero, so rounding, amplified, would move the next gradients.
        """
        if not self._is_rounded:
            return
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                if name in found and found[name].shape == parameter.shape:
                    parameter.copy_(found[name])

    def compare_parameters(self, found: Named) -> None:
        """After the last update of both. ``found``: the engine's, as full tensors."""
        step, still = self._one.num_updates, self._still or set()
        self.rows += compare_parameters(found, self._parameters, self._allowed(step), still, self._noise, step=step)

    def _allowed(self, num_updates: int) -> Tolerance:
        return Tolerance.of(
            self.precision, greatest_rate(self._one.spec.optimizer), self._tolerance, num_updates=num_updates
        )

    def _note(self, found: Named, gradients: Mapping[str, Tensor | None], norm: float) -> None:
        """Note the facts of this step's gradients that the comparison of parameters needs."""
        unreached = {name for name, gradient in gradients.items() if gradient is None}
        self._still = unreached if self._still is None else self._still & unreached
        optimizer = self._one.spec.optimizer
        of_matrices = noise_of_matrices(gradients, self._one.matrices, optimizer) if self._is_rounded else {}
        for name, noise in (noise_of_updates(found, gradients, optimizer, norm) | of_matrices).items():
            self._noise[name] = torch.maximum(self._noise.get(name, noise), noise)


def noise_of_updates(
    found: Mapping[str, Tensor], truth: Mapping[str, Tensor | None], o: OptimizerSpec, norm: float
) -> dict[str, Tensor]:
    """By element how far apart AdamW's first update drives the two sides.

    ``norm``: of all gradients, before clipping. Whether the gradients go together, ``compare_gradients`` says.
    """
    lr = greatest_rate(o)
    scale = 1.0 if o.clip_grad_norm is None else min(1.0, o.clip_grad_norm / (norm + 1e-6))

    def update(gradient: Tensor) -> Tensor:
        scaled = gradient.detach().double().cpu() * scale
        return lr * scaled / (scaled.abs() + o.eps)

    both = {n: (found[n], t) for n, t in truth.items() if t is not None and n in found and found[n].shape == t.shape}
    return {name: (update(mine) - update(true)).abs().nan_to_num(0.0) for name, (mine, true) in both.items()}


def noise_of_matrices(
    gradients: Mapping[str, Tensor | None], matrices: Mapping[str, Matrices], o: OptimizerSpec
) -> dict[str, Tensor]:
    """By element how far Muon's update of each of ``matrices``, by weight, moves if its gradient is rounded otherwise.

    Elements of one matrix have one bound: the iterations mix its rows and columns.
    """
    lr, adjust = greatest_rate(o), base_of(o).adjust_lr
    found: dict[str, Tensor] = {}
    for name, own in matrices.items():
        gradient = gradients.get(name)
        if gradient is None:
            continue
        whole = gradient.detach().float().cpu()
        found[name] = torch.zeros(whole.shape, dtype=torch.float64)
        for dim, boxes in places_of(tuple(whole.shape), own):
            part = torch.cat([whole[box] for box in boxes], dim)
            update = _update(part, adjust)
            apart = max((_update(part * scale, adjust) - update).abs().max().item() for scale in _SCALES)
            for box in boxes:
                found[name][box] = lr * apart
    return found


def _update(gradient: Tensor, adjust: str) -> Tensor:
    """PyTorch's, of a weight of zeros, at a learning rate of 1."""
    weight = nn.Parameter(torch.zeros_like(gradient))
    weight.grad = gradient
    torch.optim.Muon([weight], 1.0, weight_decay=0.0, momentum=0.0, nesterov=False, adjust_lr_fn=adjust).step()
    return weight.detach()


def greatest_rate(o: OptimizerSpec) -> float:
    """The greatest learning rate of all groups."""
    return max(o.lr, *(group.lr or 0.0 for group in o.groups.values()), 0.0)
