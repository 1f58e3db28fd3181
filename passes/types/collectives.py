"""A collective as the plan lists it: one row for equal messages."""

from __future__ import annotations

from dataclasses import dataclass

from passes.errors import require

PHASES = ("forward", "backward", "step")


PERIODS = ("microbatch", "step")


@dataclass(frozen=True, slots=True)
class CollectivePlan:
    """An exchange over ``axis``: ``count`` messages of ``bytes`` each on one rank, per microbatch or step.

    ``where``: the user's module and line; ``stage``: None if no single stage runs it; ``block``: the block it is in.
    ``again``: a forward collective that the backward's recomputation repeats.
    """

    kind: str
    axis: str
    phase: str
    where: str
    bytes: int
    count: int
    per: str
    stage: int | None = None
    block: str = ""
    again: bool = False

    def __post_init__(self) -> None:
        require(self.phase in PHASES, f"{self.kind} at {self.where} has the unknown phase {self.phase}")
        require(self.per in PERIODS, f"{self.kind} at {self.where} is counted per {self.per}")
        require(self.bytes >= 0 and self.count >= 0, f"{self.kind} at {self.where} has a negative size")
