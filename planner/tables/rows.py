"""The rows of a Plan: what each table holds, with units. Plain ints, strings and tuples, so that they save and compare.

A row checks itself when it is made, whether by the planner or from a file. The JSON keys are the field names.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite, prod
from typing import Any

from planner.errors import require
from planner.placement.types import Placement
from planner.spec.sections import STYLES

PHASES = ("forward", "backward", "step")
PERIODS = ("microbatch", "step")
LEVELS = ("info", "warning", "error")


@dataclass(frozen=True, slots=True)
class ParameterPlan:
    """One parameter: global ``shape``, and what one rank of the tp group (for experts, of etp and ep) holds.

    ``dim`` is cut; ``segments`` are its global sizes, each cut for itself, except those whose index is in
    ``whole_segments``: every rank holds them whole. ``padding`` elements without data make the last one divide.
    ``aliases``: other names of the same tied parameter. ``origin``: "solver", "default" or the spec's line.
    ``stages``: every stage that holds it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    style: str
    dim: int | None
    segments: tuple[int, ...]
    local_shape: tuple[int, ...]
    stages: tuple[int, ...]
    reason: str
    aliases: tuple[str, ...] = ()
    origin: str = "default"
    where: str = ""
    whole_segments: tuple[int, ...] = ()
    padding: int = 0

    @classmethod
    def of(cls, placement: Placement, tp: int, *, name: str, shape: tuple[int, ...], **rest: Any) -> ParameterPlan:
        """The row of a parameter with this tp ``placement``; ``rest`` are the other fields."""
        cut = {"dim": None, "segments": ()}
        if placement.is_sharded:
            whole = tuple(i for i, s in enumerate(placement.segments) if not s.sharded)
            cut = {
                "dim": placement.dim,
                "segments": placement.sizes,
                "whole_segments": whole,
                "padding": placement.padding,
            }
        return cls(name=name, shape=tuple(shape), local_shape=placement.local_shape(tuple(shape), tp), **cut, **rest)

    def __post_init__(self) -> None:
        require(self.style in STYLES, f"{self.name} has the unknown style {self.style}")
        require(
            len(self.local_shape) == len(self.shape), f"{self.name}: {self.local_shape} is no shard of {self.shape}"
        )
        if self.dim is None:
            require(not self.segments and self.local_shape == self.shape, f"{self.name} is whole and yet cut")
        else:
            require(0 <= self.dim < len(self.shape), f"{self.name} is cut on dim {self.dim} of {len(self.shape)}")
            require(sum(self.segments) == self.shape[self.dim], f"{self.name}: segments {self.segments} miss its dim")

    @property
    def num_elements(self) -> int:
        """Elements of the whole parameter."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class CollectivePlan:
    """An exchange over ``axis``: ``count`` messages of ``bytes`` each on one rank, per microbatch or step.

    ``where``: the user's module and line; ``stage``: None where no single stage runs it; ``block``: the block it is in.
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

    def __post_init__(self) -> None:
        require(self.phase in PHASES, f"{self.kind} at {self.where} has the unknown phase {self.phase}")
        require(self.per in PERIODS, f"{self.kind} at {self.where} is counted per {self.per}")
        require(self.bytes >= 0 and self.count >= 0, f"{self.kind} at {self.where} has a negative size")


@dataclass(frozen=True, slots=True)
class BoundaryPlan:
    """A value that one stage sends to the next: ``shape`` and ``bytes`` on one rank, ``placement`` over tp."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    placement: str = "I"
    requires_grad: bool = True


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One (virtual) stage. ``num_parameters``: elements of the whole parameters that it holds, before tp cuts them."""

    index: int
    pp_rank: int
    chunk: int
    blocks: tuple[str, ...]
    num_parameters: int
    receives: tuple[BoundaryPlan, ...] = ()
    sends: tuple[BoundaryPlan, ...] = ()


@dataclass(frozen=True, slots=True)
class SchedulePlan:
    """Per pp rank the actions ("F" or "B", microbatch, chunk) in the order in which it runs them."""

    kind: str
    num_microbatches: int
    orders: tuple[tuple[tuple[str, int, int], ...], ...]
    bubble_fraction: float = 0.0
    peak_in_flight: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for rank, order in enumerate(self.orders):
            forwards = {action[1:] for action in order if action[0] == "F"}
            backwards = {action[1:] for action in order if action[0] == "B"}
            complete = forwards == backwards and len(order) == 2 * len(forwards)
            require(complete, f"pp rank {rank} does not run each forward and its backward once")


@dataclass(frozen=True, slots=True)
class GraphRegion:
    """A part of a block that a CUDA graph captures, or the reason why it does not; inputs and outputs are names."""

    block: str
    scope: str
    captured: bool
    reason: str
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """Elements [start, end) of a buffer that are reduced together, and the parameters in them, in buffer order."""

    start: int
    end: int
    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BufferPlan:
    """One contiguous gradient buffer of a pp rank: its parameters of one dtype. Sizes in elements, with padding."""

    pp_rank: int
    dtype: str
    gradient_dtype: str
    num_elements: int
    shard_elements: int
    buckets: tuple[BucketPlan, ...]


@dataclass(frozen=True, slots=True)
class OptimizerPlan:
    """The layout of the optimizer: ``zero`` 1 gives each dp rank ``shard_elements`` of every buffer."""

    buffers: tuple[BufferPlan, ...] = ()
    name: str = "adamw"
    zero: int = 1
    alignment: str = "nccl"


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """Bytes on one rank of ``pp_rank``. ``total`` is their sum; left out, it is filled in."""

    pp_rank: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    graph_buffers: int = 0
    total: int = -1

    def __post_init__(self) -> None:
        total = self.parameters + self.gradients + self.optimizer + self.activations + self.graph_buffers
        if self.total == -1:
            object.__setattr__(self, "total", total)
        require(self.total == total, f"memory of pp rank {self.pp_rank}: {self.total} is not the sum {total}")


@dataclass(frozen=True, slots=True)
class CostPlan:
    """Estimated seconds of one step, by cause; ``step_seconds`` is their total as the critical path sees it."""

    step_seconds: float
    compute: float
    tp_comm: float = 0.0
    pp_comm: float = 0.0
    pp_bubble: float = 0.0
    dp_comm: float = 0.0
    ep_comm: float = 0.0
    optimizer: float = 0.0

    def __post_init__(self) -> None:
        require(isfinite(self.step_seconds) and self.step_seconds >= 0, f"a step takes {self.step_seconds} seconds")


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """Something the user should know: ``what``, ``where`` (module and line), and how to ``fix`` it if possible."""

    level: str
    what: str
    where: str = ""
    fix: str = ""

    def __post_init__(self) -> None:
        require(self.level in LEVELS, f"a diagnostic has the unknown level {self.level}")


@dataclass(frozen=True, slots=True)
class Summary:
    """Shares (0 to 1) of matrix-product FLOPs and of parameter elements that are cut over tp, and the element count."""

    flops_sharded_fraction: float = 0.0
    parameters_sharded_fraction: float = 0.0
    num_parameters: int = 0
