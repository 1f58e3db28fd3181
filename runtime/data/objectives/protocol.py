"""The interface of objectives: samples by number. A sample with one number is always the same."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

import numpy as np

from planner.spec.data import DataSpec
from runtime.data.tokens import Tokens

NOTHING = -100  # the label of a position that does not count: cross entropy ignores it by default


class Objective(Protocol):
    """``num_samples``: of one epoch."""

    @property
    def num_samples(self) -> int: ...

    def sample(self, index: int, epoch: int) -> Mapping[str, np.ndarray]:
        """Role -> int64 [length], or [] for one number a sequence: a pure function of (seed, epoch, index).

        The roles are those of ``planner.spec.data.ROLES``; an objective gives the ones that it has.
        """
        ...


# of tokens, length, section, seed, and the roles that the model reads; raises PlanError
Make = Callable[[Tokens, int, DataSpec, int, Collection[str]], Objective]
