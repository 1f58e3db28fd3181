"""What lowering gives to the runtime: the stage modules of one rank, and the handles that they share.

A stage module is a torch.fx GraphModule over local tensors. Its placeholders are, in order, the received boundary
values (``receives``), the batch tensors it reads (``inputs``), and the loss denominators (``denominators``). It returns
a tuple: the boundary values it sends (``sends``), and last the loss where the stage computes it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from planner.placement.types import Placement


def widened(x: torch.Tensor) -> torch.Tensor:
    """``x`` in float32 where it is of half precision: sums over ranks are taken in no less."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


class AxisHandle:
    """One mesh axis as a lowered graph sees it: size and rank are known, the runtime binds the process group.

    Owns: the count of every collective that ran, by (kind, phase), for checks against the plan.
    """

    def __init__(self, name: str, size: int, rank: int) -> None:
        self.name = name
        self.size = size
        self.rank = rank
        self.group: Any = None
        self.counts: Counter[tuple[str, str]] = Counter()
        self.bytes: Counter[tuple[str, str]] = Counter()

    def __repr__(self) -> str:
        return f"{self.name}[{self.rank}/{self.size}]"


@dataclass
class RandomState:
    """Which random stream the next forward draws from: set by the executor before each forward (and recompute).

    Dropout acts while ``training``; in an evaluation it is the identity.
    """

    seed: int
    tp_rank: int
    step: int = 0
    microbatch: int = 0  # global index of the microbatch over all dp ranks
    training: bool = True

    def begin(self, step: int, microbatch: int) -> None:
        self.step = step
        self.microbatch = microbatch


@dataclass(frozen=True)
class Boundary:
    """A value that crosses from one stage to the next. ``shape`` is local, ``placement`` its type over tp."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    placement: Placement


@dataclass(frozen=True)
class LocalParameter:
    """A parameter of a stage module: its user's dotted name, its cut, and who must add gradients together.

    ``partial_over``: mesh groups whose ranks hold partial gradients of it at the end of a step ("tp" for type R,
    "embedding" for a tied weight that stands on several stages); after the dp reduction they are summed there.
    ``counted``: whether this rank counts the parameter in the global gradient norm (each logical element counts once).
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    placement: Placement
    global_shape: tuple[int, ...]
    partial_over: tuple[str, ...] = ()
    counted: bool = True
    tied_stages: tuple[int, ...] = ()  # stages that hold it, where more than one
    requires_grad: bool = True


@dataclass
class StageModule:
    """One stage (or virtual stage) of this rank, ready to run once its parameters and buffers are filled.

    ``module`` has every parameter as ``module.get_parameter(attributes[fqn])`` and every buffer likewise.
    """

    index: int
    chunk: int
    module: fx.GraphModule
    receives: tuple[Boundary, ...]
    sends: tuple[Boundary, ...]
    inputs: tuple[str, ...]
    denominators: tuple[int, ...]
    parameters: tuple[LocalParameter, ...]
    buffers: tuple[str, ...]
    attributes: dict[str, str]
    has_loss: bool

    def parameter(self, fqn: str) -> nn.Parameter:
        return self.module.get_parameter(self.attributes[fqn])


@dataclass
class RankProgram:
    """All that one rank runs: its stages in chunk order, the axis handles and the random state they share.

    ``count_module(*inputs) -> tuple`` gives for ONE microbatch the loss denominators' local counts (scalars, such as
    its number of valid tokens); the engine sums them over the global batch and feeds the sums to ``denominators``.
    """

    stages: list[StageModule]
    axes: dict[str, AxisHandle]
    random: RandomState
    count_module: fx.GraphModule | None = None
    count_inputs: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)
