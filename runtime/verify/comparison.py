"""Compare an engine with one process: the differences of tensors, and the differences that rounding may cause.

Every update is compared once both sides have made it, so that only one update is in memory. Below float64, the one
process continues from the engine's weights after their comparison. The weights after an update are gathered only after
the next forward, because a gather waits for all of them, and the engine should run as in ``train_step``.

Updates can amplify differences that come only from the rounding of gradients:

AdamW's first update    lr · g / (|g| + eps): for gradients below eps, the rounding is as large as the update
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
DECAY_OVER_EPS = ("adam", "adagrad")  # they divide weight decay, as a part of the gradient, by its own size
_SCALES = (1.1, 1.3, 1.7)  # no powers of two, so that every element of a scaled matrix is rounded differently


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison: the ``difference`` (inf: a tensor is missing or has NaN) and the ``allowed`` one.

    ``name``: of the tensor; "" for a number of the whole step. ``step``: from 1, as in the log; 0: none.
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


def compare_value(kind: str, actual: float, truth: float, allowed: float, step: int) -> Row:
    """Compare one number of a step, by its relative difference."""
    return Row(kind, "", _finite(abs(actual - truth) / max(abs(truth), 1e-300)), allowed, step)


def compare_gradients(
    actual: Mapping[str, Tensor], truth: Mapping[str, Tensor | None], allowed: Tolerance, step: int = 0
) -> list[Row]:
    """Compare gradients, by the largest difference of each relative to its own largest element.

    In half precision, rounding turns single neurons of a ReLU on or off, with their whole gradient: therefore twice the
    norm of the difference, relative to the norm of the gradient, counts if it is smaller. Rounding of parameters adds
    up as a random walk over updates, and so does the allowed difference. A gradient that only one side has is a
    difference: a parameter that only the other side freezes. None in ``truth`` (the loss does not depend on the
    parameter) counts as zeros.
    """
    floor = allowed.gradient_floor(max((_largest(t) for t in truth.values() if t is not None), default=0.0))
    limit = allowed.gradient * sqrt(allowed.num_updates)
    is_half = torch.finfo(allowed.dtype).bits < 32
    rows = []
    for name in dict.fromkeys((*truth, *actual)):
        true, mine = truth.get(name), actual.get(name)
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
    actual: Mapping[str, Tensor],
    truth: Mapping[str, Tensor],
    allowed: Tolerance,
    still: Container[str] = (),
    noise: Mapping[str, Tensor] | None = None,
    *,
    step: int = 0,
) -> list[Row]:
    """Compare the worst element of each parameter. Those in ``still`` were not updated, and must be equal bit for bit.

    ``noise``: for each element, the difference that one update may add.
    """
    added = noise or {}
    rows = [_parameter_row(n, actual.get(n), t.detach(), allowed, n in still, added.get(n)) for n, t in truth.items()]
    return [replace(row, step=step) for row in rows]


def _parameter_row(
    name: str, actual: Tensor | None, truth: Tensor, allowed: Tolerance, is_still: bool, noise: Tensor | None
) -> Row:
    if is_still or not truth.is_floating_point():
        return Row("parameter", name, _distance(actual, truth), 0.0)
    limit = allowed.rounding(truth) + allowed.parameter
    if noise is not None:
        limit = limit + noise.to(truth.device) * allowed.num_updates
    if actual is None or actual.shape != truth.shape or not truth.numel():
        return Row("parameter", name, _distance(actual, truth), allowed.parameter)
    difference = (actual.to(truth.device, torch.float64) - truth.double()).abs()
    worst = int((difference / limit).nan_to_num(inf).argmax())
    return Row("parameter", name, _finite(difference.view(-1)[worst].item()), limit.view(-1)[worst].item())


def _distance(actual: Tensor | None, truth: Tensor, measure: Callable[[Tensor], float] | None = None) -> float:
    """Return the distance by ``measure`` (default: the largest element); inf for a missing tensor or other shape."""
    if actual is None or actual.shape != truth.shape:
        return inf
    return _finite((measure or _largest)(actual.to(truth.device, torch.float64) - truth.detach().double()))


def _largest(tensor: Tensor) -> float:
    return tensor.detach().abs().max().item() if tensor.numel() else 0.0


def _norm(tensor: Tensor) -> float:
    return tensor.detach().double().norm().item()


def _finite(value: float) -> float:
    return inf if isnan(value) else value


@dataclass(frozen=True, slots=True)
class EngineStep:
    """The engine's results of one step, as full tensors. ``before``: the parameters before the step; empty in the first
    one. ``imbalance``: rows of experts on the fullest ep rank divided by the mean; None without experts.
    """

    loss: float
    norm: float
    gradients: Named
    before: Named
    imbalance: float | None = None


class Beside:
    """Runs the one process beside an engine, and compares their steps in ``rows``. ``tolerance``: the user's."""

    def __init__(self, one: OneProcess, tolerance: float | None = None) -> None:
        self._one, self._tolerance = one, tolerance
        self.rows: list[Row] = []
        sent = one.spec.precision.gather
        self.precision = getattr(torch, sent) if sent else torch.float64  # the lowest dtype of the computation
        self.imbalance: float | None = None  # the maximum of all steps
        self._still: set[str] | None = None  # parameters without a gradient in any step so far
        self._noise: dict[str, Tensor] = {}  # for each element, the most that one update may have added so far

    def step(self, batch: Mapping[str, Tensor], engine: EngineStep) -> None:
        """Run the step of ``batch`` in the one process, and compare it with the engine's."""
        if engine.imbalance is not None:
            self.imbalance = max(engine.imbalance, self.imbalance or 0.0)
        if engine.before:
            self.compare_parameters(engine.before)
            self._adopt(engine.before)
        with LowestPrecision() as lowest:
            loss = self._one.forward_backward(batch)
        if torch.finfo(lowest.dtype).eps > torch.finfo(self.precision).eps:
            self.precision = lowest.dtype
        step = self._one.num_updates + 1
        allowed = self._allowed(step)
        gradients = {name: p.grad for name, p in self._parameters.items()}
        self.rows.append(compare_value("loss", engine.loss, loss, allowed.of_loss(loss), step))
        self.rows += compare_gradients(engine.gradients, gradients, allowed, step)
        unscaled = {name: None if g is None else g.clone() for name, g in gradients.items()}
        norm = self._one.update()
        self.rows.append(compare_value("norm", engine.norm, norm, allowed.gradient, step))
        self._note(engine.gradients, unscaled, norm)

    @property
    def _parameters(self) -> dict[str, nn.Parameter]:
        return dict(self._one.model.named_parameters(remove_duplicate=False))

    @property
    def _is_rounded(self) -> bool:
        return self.precision != torch.float64

    @property
    def _is_amplified(self) -> bool:
        """Whether the rounding of a weight grows by lr · decay / eps a step: decay in a gradient that is else zero."""
        return self._one.spec.optimizer.name in DECAY_OVER_EPS

    def _adopt(self, actual: Named) -> None:
        """Begin each step with the engine's parameters if rounding would grow, so that gradients differ by this step.

        AdamW turns a gradient near zero into an update of lr: below float64 that would change the next gradients.
        """
        if not (self._is_rounded or self._is_amplified):
            return
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                if name in actual and actual[name].shape == parameter.shape:
                    parameter.copy_(actual[name])

    def compare_parameters(self, actual: Named) -> None:
        """Compare parameters after the last update of both. ``actual``: the engine's, as full tensors."""
        step, still = self._one.num_updates, self._still or set()
        self.rows += compare_parameters(actual, self._parameters, self._allowed(step), still, self._noise, step=step)

    def _allowed(self, num_updates: int) -> Tolerance:
        return Tolerance.of(
            self.precision, greatest_rate(self._one.spec.optimizer), self._tolerance, num_updates=num_updates
        )

    def _note(self, actual: Named, gradients: Mapping[str, Tensor | None], norm: float) -> None:
        """Note the gradients of this step for the comparison of parameters: which exist, and the noise they cause."""
        unreached = {name for name, gradient in gradients.items() if gradient is None}
        self._still = unreached if self._still is None else self._still & unreached
        optimizer = self._one.spec.optimizer
        of_matrices = noise_of_matrices(gradients, self._one.matrices, optimizer) if self._is_rounded else {}
        for name, noise in (noise_of_updates(actual, gradients, optimizer, norm) | of_matrices).items():
            self._noise[name] = torch.maximum(self._noise.get(name, noise), noise)


def noise_of_updates(
    actual: Mapping[str, Tensor], truth: Mapping[str, Tensor | None], o: OptimizerSpec, norm: float
) -> dict[str, Tensor]:
    """Return the difference that AdamW's first update makes of the differences of gradients, for each element.

    ``norm``: of all gradients, before clipping. ``compare_gradients`` checks the gradients themselves.
    """
    lr = greatest_rate(o)
    scale = 1.0 if o.clip_grad_norm is None else min(1.0, o.clip_grad_norm / (norm + 1e-6))

    def update(gradient: Tensor) -> Tensor:
        scaled = gradient.detach().double().cpu() * scale
        return lr * scaled / (scaled.abs() + o.eps)

    both = {n: (actual[n], t) for n, t in truth.items() if t is not None and n in actual and actual[n].shape == t.shape}
    return {name: (update(mine) - update(true)).abs().nan_to_num(0.0) for name, (mine, true) in both.items()}


def noise_of_matrices(
    gradients: Mapping[str, Tensor | None], matrices: Mapping[str, Matrices], o: OptimizerSpec
) -> dict[str, Tensor]:
    """Return weight → the difference of Muon's update, for each element, if its gradient is rounded differently.

    Elements of one matrix have one bound, because the iterations mix its rows and columns.
    """
    lr, adjust = greatest_rate(o), base_of(o).adjust_lr
    noise: dict[str, Tensor] = {}
    for name, own in matrices.items():
        gradient = gradients.get(name)
        if gradient is None:
            continue
        whole = gradient.detach().float().cpu()
        noise[name] = torch.zeros(whole.shape, dtype=torch.float64)
        for dim, boxes in places_of(tuple(whole.shape), own):
            part = torch.cat([whole[box] for box in boxes], dim)
            update = _update(part, adjust)
            apart = max((_update(part * scale, adjust) - update).abs().max().item() for scale in _SCALES)
            for box in boxes:
                noise[name][box] = lr * apart
    return noise


def _update(gradient: Tensor, adjust: str) -> Tensor:
    """Return PyTorch's Muon update of a weight of zeros, at a learning rate of 1."""
    weight = nn.Parameter(torch.zeros_like(gradient))
    weight.grad = gradient
    torch.optim.Muon([weight], 1.0, weight_decay=0.0, momentum=0.0, nesterov=False, adjust_lr_fn=adjust).step()
    return weight.detach()


def greatest_rate(o: OptimizerSpec) -> float:
    """Return the largest learning rate of all groups."""
    return max(o.lr, *(group.lr or 0.0 for group in o.groups.values()), 0.0)
