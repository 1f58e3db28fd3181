"""The global batch of any step: which samples of an objective it holds, and under which names.

    sample k = step · global + row;  epoch k // n, place k % n;  index = permutation of (seed, epoch) at that place

So every sample comes once an epoch, each epoch in another order, and step 1000 is found without the 999 before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from passes.errors import PlanError
from planner.spec.data import DataSpec
from planner.spec.sections import InputSpec
from planner.spec.spec import Spec
from runtime.data.batches import BatchLayout
from runtime.data.objectives.masked import masked
from runtime.data.objectives.next_token import next_token
from runtime.data.objectives.protocol import ALL, NO_ROLES, Make, Objective, Roles, Within
from runtime.data.permutation import Permutation
from runtime.data.roles import length_of, roles_of
from runtime.data.tokens import Tokens

OBJECTIVES: dict[str, Make] = {"next_token": next_token, "masked": masked}


class Batches(Protocol):
    """Batches by step: a pure function, the same on every rank."""

    def batch(self, step: int) -> dict[str, Tensor]: ...


class BatchesByRows(Protocol):
    """Global batches by step, or some rows of them: a pure function, the same on every rank."""

    def batch(self, step: int, rows: slice | None = None) -> dict[str, Tensor]: ...
    def size_of(self, step: int) -> int: ...


class OwnRows:
    """Of each global batch the rows of one dp rank alone; ``is_local``: whether these are less than all. The others are
    neither read nor made here.

    dp rank d     rows [d·G/dp, (d+1)·G/dp), which ``train_step(batch, local=True)`` takes
    """

    def __init__(self, batches: BatchesByRows, layout: BatchLayout) -> None:
        self.batches, self.is_local = batches, layout.dp > 1
        self._ranks, self._rank = layout.dp, layout.dp_rank

    def batch(self, step: int) -> dict[str, Tensor]:
        """This rank's rows of a step."""
        if not self.is_local:
            return self.batches.batch(step)
        size = self.batches.size_of(step) // self._ranks
        return self.batches.batch(step, slice(self._rank * size, (self._rank + 1) * size))


class TokenBatches:
    """Batches of an objective's samples. ``roles``: input -> the role that feeds it."""

    def __init__(
        self, objective: Objective, inputs: Mapping[str, InputSpec], roles: Mapping[str, str], size: int, seed: int
    ) -> None:
        self.objective, self.roles, self.global_size, self.seed = objective, dict(roles), size, seed
        self._inputs = inputs
        self.stacked([objective.sample(0, 0)])

    @property
    def num_samples(self) -> int:
        return self.objective.num_samples

    @property
    def num_batches(self) -> int:
        """Of an epoch; one at least."""
        return max(1, self.num_samples // self.global_size)

    def size_of(self, step: int) -> int:
        """Sequences of a step."""
        return self.global_size

    def indices(self, step: int, rows: slice | None = None) -> list[tuple[int, int]]:
        """(epoch, index) of each row of the step's global batch, or of some of its rows."""
        return self._indices([step * self.global_size + row for row in range(self.global_size)[rows or slice(None)]])

    def batch(self, step: int, rows: slice | None = None) -> dict[str, Tensor]:
        """The global batch of a step, or some of its rows: each input as [rows, *shape]."""
        return self.stacked([self.objective.sample(index, epoch) for epoch, index in self.indices(step, rows)])

    def samples(self, numbers: Sequence[int]) -> list[Mapping[str, np.ndarray]]:
        """Those with these numbers in the order of training."""
        return [self.objective.sample(index, epoch) for epoch, index in self._indices(numbers)]

    def stacked(self, samples: Sequence[Mapping[str, np.ndarray]]) -> dict[str, Tensor]:
        """Each input as [samples, *shape]."""
        return stacked(samples, self.roles, self._inputs)

    def _indices(self, places: Sequence[int]) -> list[tuple[int, int]]:
        num_samples = self.objective.num_samples
        epochs = [place // num_samples for place in places]
        found = {
            epoch: iter(
                Permutation(num_samples, (self.seed, epoch))(
                    np.array([p % num_samples for p, e in zip(places, epochs, strict=True) if e == epoch], np.int64)
                ).tolist()
            )
            for epoch in dict.fromkeys(epochs)
        }
        return [(epoch, next(found[epoch])) for epoch in epochs]


def stacked(
    samples: Sequence[Mapping[str, np.ndarray]], roles: Mapping[str, str], inputs: Mapping[str, InputSpec]
) -> dict[str, Tensor]:
    """Each input as [samples, *shape]. Raises PlanError for an input that samples have nothing for."""
    for name, role in roles.items():
        if role not in samples[0]:
            raise PlanError(
                f"the input {name!r} is fed by {role}, which this objective does not provide",
                where=f"inputs.{name}",
                fix=f"remove the input, or choose another data.objective; this one provides {', '.join(samples[0])}",
            )
    return {
        name: torch.from_numpy(np.stack([sample[role] for sample in samples])).to(getattr(torch, inputs[name].dtype))
        for name, role in roles.items()
    }


def make_objective(
    tokens: Tokens, length: int, data: DataSpec, seed: int, roles: Roles = NO_ROLES, within: Within = ALL
) -> Objective:
    """The objective that the section asks for. Raises PlanError if the tokens do not serve it.

    ``roles``: those that the model reads. ``within``: sizes of the documents to take.
    """
    if tokens.is_supervised and data.objective != "next_token":
        what = f"{tokens.source} has samples with labels, and objective: {data.objective} chooses its own"
        raise PlanError(what, where="data.objective", fix="set objective: next_token")
    return OBJECTIVES[data.objective](tokens, length, data, seed, roles, within)


def token_batches(tokens: Tokens, spec: Spec, within: Within = ALL) -> TokenBatches:
    """Batches of ``tokens`` as the spec's ``inputs``, ``data`` and ``seed`` say, of documents with a size ``within``.
    Raises PlanError if they cannot."""
    inputs = spec.require_inputs()
    try:
        roles = roles_of(inputs, spec.data.inputs)
        shapes = {role: inputs[name].sizes for name, role in roles.items()}
        objective = make_objective(tokens, length_of(inputs, roles), spec.data, spec.seed, shapes, within)
        return TokenBatches(objective, inputs, roles, spec.batch.global_size, spec.seed)
    except PlanError as error:
        raise spec.locate(error) from None
