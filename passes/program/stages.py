"""The stage of each call of a program that is cut for a pipeline."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StageAssignment:
    """The stage of each call; ``planner.fold`` decides which rank runs a stage.

    ``stage_of``           call that the loss needs → its stage; for a recomputed one the first that reads it
    ``recomputed``         calls that each stage of ``copies`` computes for itself
    ``copies``             recomputed call → all stages that read it
    ``live``               per cut k the values that stage k sends to stage k + 1, in graph order, passed through or not
    ``parameter_stages``   placeholder (parameter, buffer, constant, batch tensor) → stages that read it, maybe none
    ``blocks_of_stage``    indices of blocks
    ``cost_of_stage``      in the unit of the node cost, without recomputed calls
    """

    num_stages: int
    stage_of: dict[str, int]
    recomputed: frozenset[str]
    copies: dict[str, tuple[int, ...]]
    live: tuple[tuple[str, ...], ...]
    parameter_stages: dict[str, tuple[int, ...]]
    blocks_of_stage: tuple[tuple[int, ...], ...]
    cost_of_stage: tuple[int, ...]

    def runs_on(self, name: str, stage: int) -> bool:
        """Whether ``stage`` computes the call ``name``."""
        return stage in self.copies[name] if name in self.recomputed else self.stage_of.get(name) == stage

    def tied(self) -> dict[str, tuple[int, ...]]:
        """Placeholders that several stages read."""
        return {name: stages for name, stages in self.parameter_stages.items() if len(stages) > 1}


@dataclass(frozen=True, slots=True)
class BoundaryPlan:
    """A value that one stage sends to the next: ``shape`` and ``bytes`` on one rank, ``placement`` over tp."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    placement: str = "I"
    requires_grad: bool = True
