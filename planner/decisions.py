"""The decisions on the captured program: the plan's rows print them, and passes lower them.

A fresh plan holds them, and one from a ``.pt``; a plan that was loaded from JSON has only its rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import fx

from passes.blocks.blocks import Block, Blocks
from passes.lowering import Lowering
from passes.moe.layers import ExpertPart, Experts, expert_parts, resting
from passes.ops.counts import ExpertLoad
from passes.partition.batch.id_ranges import IdRange, id_ranges
from passes.partition.loss.counts import ignored_labels
from passes.partition.loss.scored import Scored, find_scored
from passes.partition.loss.shares import LossTerms
from passes.partition.sequence.facts import Context
from passes.partition.type_changes import Placements
from passes.program.matrices import parameter_roles
from passes.program.program import Program, StageAssignment
from planner.mesh import Mesh
from planner.updates import UpdateRules


@dataclass(frozen=True)
class Decisions:
    """``lowering``: all that the passes read; the planner alone reads the other fields.

    By ``on_gpu`` and ``cudnn`` (of attention), which the cluster says, kernels are chosen that ops are counted with.
    ``imbalance``: rows of experts on the fullest rank of ep over the mean, as the spec expects.
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
        """For recomputed blocks, which gather in the backward anyway."""
        options = replace(self.lowering.options, own_tokens=False)
        return replace(self, lowering=replace(self.lowering, options=options))

    @cached_property
    def batch_inputs(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Batch key → shape of one sequence and dtype, as the model was captured with them."""
        values = {key: self.program.node(name).meta["val"] for name, key in self.program.inputs.items()}
        return {key: (tuple(value.shape[1:]), value.dtype) for key, value in values.items()}

    @cached_property
    def roles(self) -> dict[str, str]:
        """The role of each parameter, by name: how fresh weights are drawn depends on it."""
        return parameter_roles(self.program.graph.graph, self.program.parameters)

    @cached_property
    def expert_parts(self) -> dict[str, ExpertPart]:
        """The expert parts that parameters hold, by placeholder; empty if experts have no axes of their own."""
        return expert_parts(self.experts) if self.mesh.has_expert_axes else {}

    @property
    def fullest(self) -> float:
        """Rows of experts on the fullest rank of ep over the mean; one rank can have no more than all."""
        return min(self.imbalance, float(self.mesh.ep))

    def load(self) -> ExpertLoad:
        """What a step counts of experts: of all layers, if experts have axes of their own."""
        layers = self.experts.layers if self.mesh.has_expert_axes else ()
        asked = sum(asked.size for asked in self.lowering.asked)
        return ExpertLoad([layer.num_experts for layer in layers], [layer.limit for layer in layers], asked)

    @cached_property
    def resting(self) -> Mapping[str, tuple[int, ...]]:
        """Parameter → the figures of a step, of those that ``asked`` counts: it rests if all of them are zero."""
        return resting(self.program, self.experts)

    @cached_property
    def id_ranges(self) -> dict[str, tuple[IdRange, ...]]:
        """Batch key → which integers it may hold."""
        return id_ranges(self.program)

    @cached_property
    def ignored_labels(self) -> dict[str, int]:
        """Batch key → the label that the loss skips."""
        return ignored_labels(self.program)

    @cached_property
    def scored(self) -> Scored:
        """The op of the loss that looks up the targets' probabilities. Raises PlanError if it does not."""
        return find_scored(self.program)

    def calls_of(self, block: Block) -> list[fx.Node]:
        """The calls of a block; of calls that stages recompute, such as views of weights, those that only these calls
        read.

        So a value that blocks share, as a bias of relative positions, is computed outside, with all its inputs.
        """
        found: dict[fx.Node, None] = {}
        for node in map(self.program.node, reversed(block.nodes)):
            copies = self.stages.copies.get(node.name, ())
            is_own = len(copies) == 1 and all(user in found for user in node.users)
            if node.op == "call_function" and node.name in self.stages.stage_of and (not copies or is_own):
                found[node] = None
        return list(reversed(found))
