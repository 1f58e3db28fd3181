"""The sizes of the axes that a program is partitioned over; the planner's mesh has them, and more."""

from __future__ import annotations

from typing import Protocol, runtime_checkable


@runtime_checkable
class Sizes(Protocol):
    """Ranks of each axis; the experts' own ones are ``ep`` and ``etp``."""

    @property
    def tp(self) -> int: ...

    @property
    def cp(self) -> int: ...

    @property
    def ep(self) -> int: ...

    @property
    def etp(self) -> int: ...

    @property
    def has_expert_axes(self) -> bool: ...

    def pp_rank_of(self, stage: int) -> int: ...
