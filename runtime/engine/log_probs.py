"""Log-probabilities of labels: as scores of the model, and as operands of a loss outside it.

The stages run as in an evaluation; that of the loss is lowered once more, to return scores beside the loss. The
gradient of a loss outside the model is fed back into the stages.

    F of the last stage     log P [micro, length] → function(log P, rows) → its value, and ∂ value / ∂ log P
    B of the last stage     begins with that gradient in place of the loss's

Ranks of tp and cp compute the same value; one of them adds it. After an error, zeros replace the value of the function,
so that all messages of the step are sent; then all ranks raise the error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from passes.errors import PlanError, message_of
from passes.ops.loss_head import COUNT, IS_TOP, LOG_P, LOG_PROBABILITY, SCORES
from runtime.data.batches import BatchLayout
from runtime.distributed.agreement import agree
from runtime.distributed.faults.failure import first_line, is_of_a_peer, place_of
from runtime.engine.build import Built, Running, executor_of
from runtime.pipeline.executor import Executor, Step

LossFunction = Callable[[Tensor, dict[str, Tensor]], Tensor]
FIGURES = 3


@dataclass(frozen=True)
class LossOutside:
    """A loss function outside the model. ``extras``: tensors of the batch that only it reads, [sequences, ..]."""

    function: LossFunction
    extras: Mapping[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def of(function: Any, batch: Mapping[str, Tensor], planned: Mapping[str, object]) -> LossOutside:
        """Return the loss. Raises PlanError unless it can be called and extras have a row for each sequence."""
        if not callable(function):
            what = f"the loss is a {type(function).__name__}, not a function"
            raise PlanError(what, where="loss", fix="give a function of (log_probs, batch) that returns a scalar")
        extras = {name: x for name, x in batch.items() if name not in planned}
        sizes = {len(x) for name, x in batch.items() if name in planned and isinstance(x, Tensor) and x.ndim}
        for name, value in extras.items():
            if not isinstance(value, Tensor) or not value.ndim or (sizes and len(value) not in sizes):
                form = f"has shape {list(value.shape)}" if isinstance(value, Tensor) else f"is a {type(value).__name__}"
                fix = "give a tensor with one row for each sequence, or keep it in the function"
                raise PlanError(f"batch[{name!r}], which only the loss function reads, {form}", where="batch", fix=fix)
        return LossOutside(cast(LossFunction, function), extras)


class LossOutsideExecutor(Executor):
    """The loop over actions with a function as the loss. ``of_model``: the loop with the model's own loss."""

    of_model: Executor
    failure: PlanError | None = None
    _function: LossFunction
    _rows: Sequence[dict[str, Tensor]] = ()

    def begin(self, loss: LossOutside, batch: Mapping[str, Tensor], layout: BatchLayout, *, local: bool) -> None:
        """Set the function of the next run, and the batch with the rows that it reads."""
        self._function, self.failure = loss.function, None
        rows = {**batch, **loss.extras}
        if any(stage.has_loss for stage in self.stages):
            self._rows = layout.microbatches(rows, rows, self.transport.groups.device, local=local)

    def evaluate(self, step: Step, *, training: bool = False) -> Tensor | None:
        """Run the forwards with the model's own loss, for sums over the batch that it reads."""
        return self.of_model.evaluate(step, training=training)

    def loss_of(self, output: Tensor, step: Step, action: Any) -> tuple[Tensor, Tensor]:
        """Return the value of the function for a microbatch, and its gradient; zeros after a failure."""
        if self.failure is None:
            try:
                return self._value_of(output, step, self._rows[action.microbatch])
            except PlanError as error:
                self.failure = error
            except Exception as error:
                if isinstance(error, torch.OutOfMemoryError) or is_of_a_peer(error):
                    raise
                self.failure = _failed(error, str(self.transport.groups.faults.activity))
        return torch.zeros((), dtype=torch.float64, device=output.device), torch.zeros_like(output)

    def _value_of(self, output: Tensor, step: Step, rows: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            log_probs = output.detach().requires_grad_()
            value: Any = self._function(log_probs, dict(rows))
            _check_value(value)
            (gradient,) = torch.autograd.grad(value, log_probs, allow_unused=True)
        if gradient is None:
            raise _independent()
        if step.scale is not None:
            gradient = gradient * step.scale.to(gradient.dtype)
        loss = value.detach().to(torch.float64).reshape(())
        is_counted = self.transport.groups.coordinate["cp"] == 0
        return loss if is_counted else torch.zeros_like(loss), gradient


def _failed(error: Exception, where: str) -> PlanError:
    failed = PlanError(
        f"{where}: the loss function failed with {type(error).__name__}: {first_line(message_of(error))}",
        where=place_of(error) or "loss",
        fix="correct the function; nothing was updated, and the next step may follow",
    )
    failed.__cause__ = error
    return failed


def _check_value(value: object) -> None:
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
        form = f"a {value.dtype} tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
        what = f"the loss function returns {form[:200]}"
        raise PlanError(what, where="loss", fix="return one floating-point scalar, as a tensor")
    if not value.requires_grad:
        raise _independent()


def _independent() -> PlanError:
    fix = "compute it from log_probs without detach(); for rows without a loss add log_probs.sum() * 0"
    return PlanError("the value of the loss function does not depend on log_probs", where="loss", fix=fix)


def build_outside(
    built: Built, of_model: Executor, before_backward: Callable[[bool], None]
) -> tuple[Built, LossOutsideExecutor]:
    """Return a rank's program and executor with the stage of the loss lowered to return log-probabilities, over the
    tensors of ``built``.
    """
    _, stages = built.headed(built.program.stages, LOG_P)
    built = replace(built, program=replace(built.program, stages=stages))
    executor = executor_of(LossOutsideExecutor, built, before_backward)
    executor.of_model = of_model
    return built, executor


class EngineOutsideLoss:
    """Steps of an engine with a function in place of the model's own loss."""

    def __init__(self, running: Running, layout: BatchLayout) -> None:
        self._groups, self._optimizer, self._layout = running.groups, running.optimizer, layout

    def of(
        self, batch: Mapping[str, Tensor], loss: LossFunction | None
    ) -> tuple[Mapping[str, Tensor], LossOutside | None]:
        """Return the planned tensors and the loss outside; without one, the whole batch and None."""
        if loss is None:
            return batch, None
        tensors = batch if isinstance(batch, Mapping) else {}
        return self._layout.planned(batch), LossOutside.of(loss, tensors, self._layout.inputs)

    @contextmanager
    def around(
        self,
        executor: Executor,
        layout: BatchLayout,
        loss: LossOutside | None,
        batch: Mapping[str, Tensor],
        *,
        local: bool,
    ) -> Iterator[None]:
        """Run a step with this loss inside the block. Raises PlanError on every rank if the function failed on one: the
        step is complete, and the next may follow.
        """
        if loss is None or not isinstance(executor, LossOutsideExecutor):
            yield
            return
        executor.begin(loss, batch, layout, local=local)
        yield
        try:
            agree(self._groups, executor.failure)
        except PlanError:
            self._optimizer.reduce_gradients()  # finishes reductions that have started
            raise


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of ``batch[key]``, the labels of the global batch; tensors on the CPU with the shape of the labels.

    ``log_probabilities`` (float64): natural logarithm of the label's probability; 0 if it is not scored. ``is_top``:
    whether no class is more probable, nor equally probable with a lower id. ``is_scored``: whether the element is a
    target of the loss: not an ignored label, nor the first token of a sequence in models that shift labels.
    """

    key: str
    log_probabilities: Tensor
    is_top: Tensor
    is_scored: Tensor

    @staticmethod
    def joined(rounds: Sequence[Scores], number: int) -> Scores:
        """Return the scores of the first ``number`` sequences of several batches."""
        tensors = ("log_probabilities", "is_top", "is_scored")
        return Scores(rounds[0].key, *(torch.cat([getattr(r, name) for r in rounds])[:number] for name in tensors))


class Scoring:
    """The forwards that score. Owns the stage of the loss that returns scores, with the weights of training.

    Raises PlanError if the loss gives no label a probability.
    """

    def __init__(self, built: Built, executor: Executor) -> None:
        self.key, self.layout, self.groups = built.plan.to_run()[0].scored.key, built.layout, built.groups
        self.executor = executor.over(built.headed(executor.stages, SCORES)[1])

    def score(self, step: Step, *, local: bool = False) -> Scores:
        """Return the scores of the batch of ``step`` on every rank, by one all-reduce. ``local``: only those of this dp
        rank's rows.
        """
        self.executor.evaluate(step)
        shape, _ = self.layout.inputs[self.key]
        total = torch.zeros((FIGURES, self.layout.global_size, *shape), dtype=torch.float64, device=self.groups.device)
        if self.executor.scores:
            first = self.layout.first_microbatch * self.layout.micro
            own = torch.cat(self.executor.scores, 1)
            total[:, first : first + own.shape[1]] = own
        if self.groups.world is not None:
            dist.all_reduce(total, group=self.groups.world)
        size = self.layout.global_size // self.layout.dp
        rows = slice(self.layout.dp_rank * size, (self.layout.dp_rank + 1) * size) if local else slice(None)
        total = total.cpu()[:, rows]
        if ((times := total[COUNT]) > 1).any():
            what = f"the loss scores a label of batch[{self.key!r}] {int(times.max())} times, which is ambiguous"
            raise PlanError(what, where="batch", fix="score a model that predicts each label once")
        return Scores(self.key, total[LOG_PROBABILITY], total[IS_TOP] > 0, times > 0)
