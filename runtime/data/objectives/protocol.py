"""The interface of objectives: samples by number. A sample with one number is always the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import numpy as np

from planner.spec.data import DataSpec
from runtime.data.tokens import Tokens

NOTHING = -100  # the label of a position that does not count: cross entropy ignores it by default


class Within(NamedTuple):
    """Sizes of documents: more than ``above`` tokens, and at most ``most`` of them (None: any number)."""

    above: int = 0
    most: int | None = None

    def of(self, tokens: Tokens) -> tuple[np.ndarray, np.ndarray]:
        """Starts and sizes (int64 [documents]) of those documents."""
        ends, sizes = np.asarray(tokens.ends), np.diff(tokens.ends, prepend=0)
        if self == ALL:
            return ends - sizes, sizes
        chosen = (sizes > self.above) & (sizes <= (sizes.max(initial=0) if self.most is None else self.most))
        return (ends - sizes)[chosen], sizes[chosen]


ALL = Within()
NO_ROLES: Mapping[str, tuple[int, ...]] = {}


class Objective(Protocol):
    """``num_samples``: of one epoch."""

    @property
    def num_samples(self) -> int: ...

    def sample(self, index: int, epoch: int) -> Mapping[str, np.ndarray]:
        """Role -> int64 [length], or [] for one number a sequence: a pure function of (seed, epoch, index).

        The roles are those of ``planner.spec.data.ROLES``; an objective gives the ones that it has.
        """
        ...


Roles = Mapping[str, tuple[int, ...]]  # that the model reads → the shape of its input
# of tokens, length, section, seed, roles, and sizes of documents; raises PlanError
Make = Callable[[Tokens, int, DataSpec, int, Roles, Within], Objective]
