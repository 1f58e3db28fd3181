"""The decisions on the captured program: the plan's rows print them, and passes lower them.

A fresh plan and one loaded from ``.pt`` hold them; a plan loaded from JSON has only the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import fx

from passes.blocks.blocks import Block, Blocks
from passes.errors import PlanError
from passes.lowering import Lowering
from passes.moe.layers import ExpertPart, Experts, expert_parts, resting
from passes.ops.counts import ExpertLoad
from passes.partition.batch.id_ranges import IdRange, id_ranges
from passes.partition.loss.counts import ignored_labels
from passes.partition.loss.scored import Scored, find_scored, read_by_the_loss_alone
from passes.partition.loss.shares import LossTerms
from passes.partition.sequence.facts import Context
from passes.partition.type_changes import Placements
from passes.program.matrices import parameter_roles
from passes.program.program import Program, StageAssignment
from planner.mesh import Mesh
from planner.updates import UpdateRules


@dataclass(frozen=True)
class Decisions:
    """All decisions of a plan. Passes read ``lowering``; only the planner reads the other fields.

    ``on_gpu`` and ``cudnn`` (whether attention uses it), from the cluster, choose the kernels that costs assume.
    ``imbalance``: expected rows of experts on the fullest ep rank, divided by the mean.
    """

    lowering: Lowering
    blocks: Blocks
    terms: LossTerms
    mesh: Mesh
    seed: int
    context: Context = field(default_factory=Context, repr=False)
    rules: UpdateRules = field(default_factory=UpdateRules, repr=False)
    on_gpu: bool = False
    cudnn: bool = False
    imbalance: float = 1.0

    @property
    def program(self) -> Program:
        return self.lowering.program

    @property
    def placements(self) -> Placements:
        return self.lowering.placements

    @property
    def stages(self) -> StageAssignment:
        return self.lowering.stages

    @property
    def experts(self) -> Experts:
        return self.lowering.experts

    def without_own_tokens(self) -> Decisions:
        """Return a copy for recomputed blocks, which gather keys and values in the backward anyway."""
        options = replace(self.lowering.options, own_tokens=False)
        return replace(self, lowering=replace(self.lowering, options=options))

    @cached_property
    def batch_inputs(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Batch key → shape of one sequence, and dtype, both as captured."""
        values = {key: self.program.node(name).meta["val"] for name, key in self.program.inputs.items()}
        return {key: (tuple(value.shape[1:]), value.dtype) for key, value in values.items()}

    @cached_property
    def roles(self) -> dict[str, str]:
        """Name of each parameter → its role, by which fresh weights are drawn."""
        return parameter_roles(self.program.graph.graph, self.program.parameters)

    @cached_property
    def expert_parts(self) -> dict[str, ExpertPart]:
        """Placeholder of an expert parameter → its part of the experts; empty if experts have no axes of their own."""
        return expert_parts(self.experts) if self.mesh.has_expert_axes else {}

    @property
    def fullest(self) -> float:
        """``imbalance``, but at most ep: a rank cannot have more rows than all ranks together."""
        return min(self.imbalance, float(self.mesh.ep))

    def load(self) -> ExpertLoad:
        """Return the counters of experts in a step; of no layer unless experts have axes of their own."""
        layers = self.experts.layers if self.mesh.has_expert_axes else ()
        asked = sum(asked.size for asked in self.lowering.asked)
        return ExpertLoad([layer.num_experts for layer in layers], [layer.limit for layer in layers], asked)

    @cached_property
    def resting(self) -> Mapping[str, tuple[int, ...]]:
        """Parameter → indices of the figures that ``asked`` counts in a step: if all are zero, it is not updated."""
        return resting(self.program, self.experts)

    @cached_property
    def id_ranges(self) -> dict[str, tuple[IdRange, ...]]:
        """Batch key → the ranges of integers that it may hold."""
        return id_ranges(self.program)

    @cached_property
    def ignored_labels(self) -> dict[str, int]:
        """Batch key → the label that the loss skips."""
        return ignored_labels(self.program)

    @cached_property
    def scored(self) -> Scored:
        """The op of the loss that looks up the probabilities of the labels. Raises PlanError if there is none."""
        return find_scored(self.program)

    @cached_property
    def read_by_the_loss_alone(self) -> tuple[str, ...]:
        """Trained parameters that a loss outside the model does not read; none if there can be no other loss."""
        if not self.program.loss:
            return ()
        try:
            return tuple(read_by_the_loss_alone(self.program, self.scored))
        except PlanError:  # no label has a probability
            return ()

    def calls_of(self, block: Block) -> list[fx.Node]:
        """Return the calls of a block, with calls copied to every stage (views of weights) that only they read.

        A value that several blocks read, such as a bias of relative positions, therefore stays outside of blocks.
        """
        found: dict[fx.Node, None] = {}
        for node in map(self.program.node, reversed(block.nodes)):
            copies = self.stages.copies.get(node.name, ())
            is_own = len(copies) == 1 and all(user in found for user in node.users)
            if node.op == "call_function" and node.name in self.stages.stage_of and (not copies or is_own):
                found[node] = None
        return list(reversed(found))
