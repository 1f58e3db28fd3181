"""What lowering gives to the runtime: the stage modules of one rank, and the handles that they share.

A stage module is a torch.fx GraphModule over local tensors. Its placeholders are, in order, the received boundary
values (``receives``), the batch tensors it reads (``inputs``), and the loss denominators (``denominators``). It returns
a tuple: the boundary values it sends (``sends``), and last the loss where the stage computes it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import fx, nn

from passes.ops.axis import AxisHandle
from passes.ops.random_state import RandomState
from planner.placement.types import Placement


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
