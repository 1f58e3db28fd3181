"""The result of lowering for the runtime: the stage modules of one rank, and the handles that they share.

A stage module is a torch.fx GraphModule over local tensors. Its placeholders are, in order, the received boundary
values (``receives``), the batch tensors it reads (``inputs``), and the loss denominators (``denominators``). It returns
a tuple: the boundary values it sends (``sends``), the scores of labels if it was lowered to give them, and last the
loss if the stage computes it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx, nn

from passes.ops.axis import AxisHandle
from passes.ops.global_sums import GlobalSums
from passes.ops.load import ExpertLoad
from passes.ops.parameter_gate import ParameterGate
from passes.ops.random_state import RandomState
from passes.ops.weight_gradients import WeightGradients
from passes.parameters import LocalParameter
from passes.program.stages import BoundaryPlan


@dataclass
class StageModule:
    """One stage (or virtual stage) of this rank, ready to run once its parameters and buffers are filled.

    ``module`` has every parameter as ``module.get_parameter(attributes[fqn])`` and every buffer likewise.
    """

    index: int
    chunk: int
    module: fx.GraphModule
    receives: tuple[BoundaryPlan, ...]
    sends: tuple[BoundaryPlan, ...]
    inputs: tuple[str, ...]
    denominators: tuple[int, ...]
    parameters: tuple[LocalParameter, ...]
    buffers: tuple[str, ...]
    attributes: dict[str, str]
    has_loss: bool
    has_scores: bool = False

    def parameter(self, fqn: str) -> nn.Parameter:
        return self.module.get_parameter(self.attributes[fqn])


@dataclass
class RankProgram:
    """All that one rank runs: its stages in chunk order, the axis handles and the random state they share.

    ``count_module(*inputs) -> tuple`` gives for ONE microbatch the loss denominators' local counts (scalars, such as
    its number of valid tokens); the engine sums them over the global batch and feeds the sums to ``denominators``.
    ``load``: the counts of rows that experts get. ``sums``: those of the global batch that the loss needs, counted by
    forwards of their own. ``gate``: lets stages wait for updated parameters; None if all are
    awaited before the first forward. ``weight_gradients``: the weight gradients of their products.
    """

    stages: list[StageModule]
    axes: dict[str, AxisHandle]
    random: RandomState
    count_module: fx.GraphModule | None = None
    count_inputs: tuple[str, ...] = ()
    gate: ParameterGate | None = None
    load: ExpertLoad | None = None
    sums: GlobalSums | None = None
    weight_gradients: WeightGradients = field(default_factory=WeightGradients)
    notes: list[str] = field(default_factory=list)
