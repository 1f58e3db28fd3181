"""Log-probabilities of labels, and losses outside the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from passes.errors import PlanError
from runtime.data.batches import BatchLayout
from runtime.distributed.agreement import agree
from runtime.distributed.faults.shared_call import shared_call
from runtime.distributed.groups import Groups
from runtime.loss_outside import LossFunction, LossOutside, LossOutsideExecutor
from runtime.optimizer.zero1 import DistributedOptimizer
from runtime.pipeline.executor import Executor
from runtime.scores import Scores

if TYPE_CHECKING:
    from runtime.variants import Variant, Variants


class EngineLoss:
    """What an Engine does with the probabilities of labels. The Engine owns all that is named here."""

    groups: Groups
    layout: BatchLayout
    optimizer: DistributedOptimizer
    _variants: Variants
    _ready: Any
    _step: Any

    @shared_call("evaluation")
    def score(self, batch: Mapping[str, Tensor], *, local: bool = False) -> Scores:
        """How probable each label of the global batch is, and whether it is the arg max: without gradients and dropout.

        The same call on every rank, with the same batch of any number of sequences; the same answer on every rank.
        ``local``: each dp rank gives its own rows of a batch of the planned size, and gets the scores of these.
        Logits are not gathered.
        Raises PlanError, with the source line, for a loss that is not a cross-entropy over a vocabulary.
        """
        self._ready()
        batch = self.layout.in_rows(batch)
        variant = self._variants.of(batch, local=local, any_number=True)
        rounds = variant.rounds.of(batch, local=local, scored=True)
        found = [variant.scoring.score(self._step(variant, each, local), local=local) for each in rounds]
        return Scores.joined(found, len(batch[found[0].key]))

    def scoring_executor(self, batch: Mapping[str, Tensor]) -> Executor:
        """The loop over actions that ``score`` runs for ``batch``. Raises PlanError as ``score``."""
        return self._variants.of(self.layout.in_rows(batch), local=False, any_number=True).scoring.executor

    def log_probs(self, batch: Mapping[str, Tensor], *, local: bool = False) -> Tensor:
        """log P of each label of the global batch, [sequences, length] (float64, on the CPU), without gradients and
        dropout; 0 where the loss takes no target.

        The same call on every rank, with the same batch of any number of sequences; the same answer on every rank.
        ``local``: as of ``score``. Tensors that the plan does not read may be in the batch: they are ignored. Raises
        PlanError, with the source line, for a loss that is not a cross-entropy over a vocabulary.
        """
        return self.score(self._planned(batch), local=local).log_probabilities

    def _planned(self, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The tensors of a batch that the plan reads."""
        if not isinstance(batch, Mapping):
            return batch  # its check reports it
        return {name: value for name, value in batch.items() if name in self.layout.inputs}

    def _outside(
        self, batch: Mapping[str, Tensor], loss: LossFunction | None
    ) -> tuple[Mapping[str, Tensor], LossOutside | None]:
        """The planned tensors and the loss outside; without one the whole batch."""
        if loss is None:
            return batch, None
        given = batch if isinstance(batch, Mapping) else {}
        return self._planned(batch), LossOutside.of(loss, given, self.layout.inputs)

    def _begin_outside(
        self, outside: LossOutside | None, variant: Variant, batch: Mapping[str, Tensor], *, local: bool
    ) -> None:
        if outside is not None and isinstance(variant.executor, LossOutsideExecutor):
            variant.executor.begin(outside, batch, variant.layout, local=local)

    def _end_outside(self, executor: Executor) -> None:
        """Raises PlanError on every rank if the function failed on one. The step is whole: the next may follow."""
        if not isinstance(executor, LossOutsideExecutor):
            return
        try:
            agree(self.groups, executor.failure)
        except PlanError:
            self.optimizer.reduce_gradients()  # sums that have begun end
            raise
