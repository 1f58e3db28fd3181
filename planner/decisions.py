"""The decisions on the captured program: the plan's rows print them, and passes lower them.

A fresh plan holds them; a plan that was loaded from a file has only its rows.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import fx, nn

from passes.blocks.blocks import Block, Blocks
from passes.moe.layers import Asked, Experts
from passes.moe.parts import ExpertPart, expert_parts
from passes.moe.resting import asked_of, resting
from passes.ops.gathered_attention import FLASH
from passes.partition.batch.id_ranges import IdRange, id_ranges
from passes.partition.loss.ignored_labels import ignored_labels
from passes.partition.loss.scored import Scored, find_scored
from passes.partition.loss.shares import LossTerms
from passes.partition.placements import Placements
from passes.partition.sequence.facts import Context
from passes.program.documents import NO_DOCUMENTS, Documents
from passes.program.program import Program
from passes.program.roles import parameter_roles
from passes.program.stages import StageAssignment
from planner.capture.model.compiled import uncompiled
from planner.capture.model.hub_format import HubFormat, hub_format
from planner.mesh import Mesh
from planner.updates.rules import UpdateRules


@dataclass
class Decisions:
    """Owns the captured program and, until the first engine has taken its shards, the user's model."""

    program: Program
    blocks: Blocks
    placements: Placements
    stages: StageAssignment
    terms: LossTerms
    mesh: Mesh
    seed: int
    _model: nn.Module | None = None
    _reference: weakref.ref[nn.Module] | None = field(default=None, repr=False)
    hub: HubFormat = field(default_factory=HubFormat, repr=False)
    experts: Experts = field(default_factory=Experts, repr=False)
    context: Context = field(default_factory=Context, repr=False)
    on_gpu: bool = False  # by the cluster: decides which kernels ops are counted with
    cudnn: bool = False  # of attention, too
    regather: bool = False  # as passes.base.Staged has them
    own_tokens: bool = False
    documents: Documents = NO_DOCUMENTS
    attention: str = FLASH
    rules: UpdateRules = field(default_factory=UpdateRules, repr=False)
    imbalance: float = 1.0  # rows of experts on the fullest rank of ep over the mean, as the spec expects

    def __post_init__(self) -> None:
        if (model := self.model) is not None:
            self.hub = hub_format(model)  # now: the model may be gone when weights are loaded or saved

    @property
    def model(self) -> nn.Module | None:
        """The user's model, without wrappers of torch.compile, while someone keeps it alive."""
        model = self._model if self._reference is None else self._reference()
        return None if model is None else uncompiled(model)

    def take_model(self, model: nn.Module, hub: HubFormat) -> None:
        """Hold ``model``, in place of the one that was planned. ``hub``: its format."""
        self._model, self.hub = model, hub

    def release(self) -> None:
        """Keep only a weak reference: the full model must not outlive the copying of shards."""
        if self._model is not None:
            self._reference = weakref.ref(self._model)
            self._model = None

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

    @property
    def noted_experts(self) -> tuple[int, ...]:
        """Experts of each layer for which a step counts rows: of all layers, if experts have axes of their own."""
        return tuple(layer.num_experts for layer in self.experts.layers) if self.mesh.has_expert_axes else ()

    @property
    def num_noted(self) -> int:
        """Figures of experts that a step sums."""
        return sum(self.noted_experts) + sum(limit > 0 for limit in self.noted_limits) + self.num_asked

    @property
    def noted_limits(self) -> tuple[int, ...]:
        """Slots of each expert of each layer, if a step counts dropped rows; 0 if it does not."""
        return tuple(layer.limit for layer in self.experts.layers) if self.mesh.has_expert_axes else ()

    @cached_property
    def asked(self) -> tuple[Asked, ...]:
        """The layers of experts for which a step counts choices: weights that no token chose are not updated."""
        return asked_of(self.program, self.experts)

    @property
    def num_asked(self) -> int:
        """Figures that these counts take."""
        return sum(asked.size for asked in self.asked)

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
