"""One rank of a case: three steps compared with one process, a save, the running mean, and memory.

If another layout resumes the case, the state before step 3 is saved, and that layout repeats the step.

Bounds of the planned memory:

parameters, gradients, optimizer    1 % or 64 bytes
activations, logits among them      3 % or 1 KiB: the size of a scalar or a row of statistics

Memory is not compared if the plan does not predict bytes exactly: rows of experts depend on the routing, blocks of
attention on the documents, graphs have static memory, and the compiler chooses the saved tensors of compiled pieces.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from passes.ops import documents
from planner.frozen_plan import Plan
from planner.spec.spec import Spec
from runtime.audit.own_module import Tolerance
from runtime.engine.engine import Engine
from runtime.profiling.memory import measured
from runtime.report.memory_rows import Compared
from runtime.verify import run as verify
from runtime.verify.batches import random_batch
from runtime.verify.comparison import (
    Beside,
    EngineStep,
    Row,
    compare_gradients,
    compare_parameters,
    compare_value,
    noise_of_updates,
)

NUM_STEPS = 3
HALF_PRECISION = 2.5  # factor on the tolerance of one comparison: among many layouts, some round worse
SLACK_BYTES = {"activations": 1024}
SMALLEST_SLACK = 64


@dataclass(frozen=True, slots=True)
class LastStep:
    """The engine's last step, and its parameters, as full tensors. ``precision``: the lowest dtype of the computation.

    ``mean``: the expected running mean of the weights; empty without one.
    """

    step: EngineStep
    parameters: Mapping[str, Tensor]
    mean: Mapping[str, Tensor]
    precision: torch.dtype


@dataclass(frozen=True, slots=True)
class OfRank:
    """The results of one rank. ``rows`` and ``last``: only on rank 0."""

    rows: list[Row]
    memory: list[Compared]
    last: LastStep | None


class Kept(Beside):
    """Compares, and keeps the engine's last step and the parameters after it."""

    last: EngineStep
    parameters: Mapping[str, Tensor]

    def step(self, batch: Mapping[str, Tensor], engine: EngineStep) -> None:
        super().step(batch, engine)
        self.last = replace(engine, gradients={name: value.clone() for name, value in engine.gradients.items()})

    def compare_parameters(self, actual: Mapping[str, Tensor]) -> None:
        super().compare_parameters(actual)
        self.parameters = actual

    def _allowed(self, num_updates: int) -> Tolerance:
        return _loosened(super()._allowed(num_updates))


class Look:
    """Follows the running mean of the weights: call it before each step and after the last. ``directory``: for a save
    before the last step."""

    def __init__(self, spec: Spec, directory: Path | None) -> None:
        self._decay, self._directory, self._place = spec.optimizer.ema, directory, 0
        self.mean: dict[str, Tensor] = {}
        self.rows: list[Row] = []

    def __call__(self, engine: Engine) -> None:
        if self._directory is not None and engine.step_index == NUM_STEPS - 1:
            engine.save(self._directory)
        if self._decay is None:
            return
        self._follow(engine.gather_parameters())
        if engine.step_index == NUM_STEPS:
            with engine.averaged_weights():
                self.rows = [_row_of_mean(name, actual, self.mean[name]) for name, actual in _floats(engine)]

    def _follow(self, parameters: Mapping[str, Tensor]) -> None:
        share = 1.0 - (self._decay or 0.0)
        for name, value in parameters.items():
            now, mean = value.double(), self.mean.get(name)
            self.mean[name] = now if mean is None else mean + share * (now - mean)


def _floats(engine: Engine) -> list[tuple[str, Tensor]]:
    return [(n, t) for n, t in engine.gather_parameters().items() if t.dtype in (torch.float32, torch.float64)]


def _row_of_mean(name: str, actual: Tensor, mean: Tensor, more: float = 0.0) -> Row:
    allowed = more + 8 * torch.finfo(actual.dtype).eps * (1.0 + mean.abs().max().item())
    return Row("mean", name, (actual.double() - mean).abs().max().item(), allowed, NUM_STEPS)


def on_rank(decided: Plan, model: nn.Module, spec: Spec, directory: Path | None, is_local: bool) -> OfRank:
    """Compare on this rank. ``is_local``: the engine gets only the rows of its dp rank. Raises PlanError if refused."""
    documents.CALL = 0  # attention runs block by block even for small documents
    batches = _batches(spec, decided)
    memory = held(decided, batches, spec)
    look = Look(spec, directory)

    def make() -> Kept:
        return Kept(verify.one_process(model, spec, decided))

    beside = verify.run_beside(decided, batches, make, look=look, is_local=is_local)
    if not isinstance(beside, Kept):
        return OfRank([], memory, None)
    last = LastStep(beside.last, beside.parameters, look.mean, beside.precision)
    return OfRank([*beside.rows, *look.rows], memory, last)


def go_on(decided: Plan, spec: Spec, directory: Path, last: LastStep) -> list[Row]:
    """Return the comparison of the last step with its repetition on another layout, from the save; [] beside rank 0."""
    batch = _batches(spec, decided)[-1]
    with Engine(decided) as engine:
        engine.load(directory)
        loss = engine.forward_backward(batch)
        gradients = engine.gather_gradients()
        norm = engine.optimizer_step().grad_norm
        parameters, means = engine.gather_parameters(), list[tuple[str, Tensor]]()
        if last.mean:
            with engine.averaged_weights():
                means = _floats(engine)
        if engine.groups.rank:
            return []
    allowed = _loosened(Tolerance.of(last.precision, spec.optimizer.lr, num_updates=NUM_STEPS))
    truth = last.step.loss
    rows = [compare_value("loss", loss, truth, allowed.of_loss(truth), NUM_STEPS)]
    rows += compare_gradients(gradients, last.step.gradients, allowed, NUM_STEPS)
    rows += [compare_value("norm", norm, last.step.norm, allowed.gradient, NUM_STEPS)]
    noise = noise_of_updates(gradients, last.step.gradients, spec.optimizer, norm)
    rows += [_row_of_mean(name, actual, last.mean[name], allowed.parameter) for name, actual in means]
    return rows + compare_parameters(parameters, last.parameters, allowed, (), noise, step=NUM_STEPS)


def _batches(spec: Spec, decided: Plan) -> list[dict[str, Tensor]]:
    return [random_batch(spec, decided, seed) for seed in range(NUM_STEPS)]


def _loosened(allowed: Tolerance) -> Tolerance:
    is_half = torch.finfo(allowed.dtype).bits < 32
    return replace(allowed, gradient=allowed.gradient * HALF_PRECISION) if is_half else allowed


def held(decided: Plan, batches: Sequence[dict[str, Tensor]], spec: Spec) -> list[Compared]:
    """Return the memory of this rank in a step beside the plan's; empty if the plan does not predict it exactly."""
    is_exact = not decided.experts and not decided.to_run()[0].lowering.documents.attentions
    if not is_exact or spec.cuda_graphs.impl != "none" or spec.compiles(on_gpu=False):
        return []
    of_one_length = batches[:: len(decided.of_all_lengths)]  # batches of the longest length
    return measured(decided, [of_one_length[0], of_one_length[-1]]).rows


def exceeds(row: Compared) -> bool:
    """Return whether the difference exceeds both the allowed fraction and the slack in bytes of a small model."""
    slack = SLACK_BYTES.get(row.category, SMALLEST_SLACK)
    return not row.passed and abs(row.predicted - row.measured) > slack
