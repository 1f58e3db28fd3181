"""Builds the parts of an engine, in order: groups, stage modules, weights, buffers, executor.

An engine has one of two modes: it trains, or it evaluates and holds nothing that only training needs.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from passes.base import RankProgram, StageModule
from passes.errors import PlanError, RunError, first_line
from passes.own_linears import contributions
from passes.parameters import LocalParameter
from planner.capture.model.meta_init import give_back_freed
from planner.decisions import Decisions
from planner.frozen_plan import Plan
from planner.lower import lower, lower_with_head
from planner.mesh import OF_WEIGHTS, REPLICA, SHARD
from planner.pipeline.actions import without_weights
from planner.saved_plan.model import Skeleton
from planner.sharding.buffers import Buffer
from planner.sharding.homes import combined_axes, homes_of
from planner.sharding.residency import Residency
from planner.spec.sections import FULL_ITERATION
from planner.spec.spec import Spec
from planner.updates import settings_of
from runtime.compiled.functions import CompiledPieces
from runtime.compiled.requirements import check_backend, compiles
from runtime.cuda_graphs.full_iteration import FullIteration
from runtime.cuda_graphs.graphs import CudaGraphs, Graphs
from runtime.cuda_graphs.recorded import Emulation
from runtime.cuda_graphs.region_graphs import GraphsBySlot
from runtime.cuda_graphs.transformer_engine import TransformerEngineGraphs
from runtime.data.batches import BatchLayout
from runtime.distributed.groups import Groups
from runtime.distributed.opening import open_groups
from runtime.engine.checks import check_attention, identity, require_same_code
from runtime.optimizer.flat import OWN_LOSS
from runtime.optimizer.matrices import BucketExchange, Member
from runtime.optimizer.scalars import LossScale
from runtime.optimizer.zero1 import DistributedOptimizer
from runtime.pipeline.executor import Executor
from runtime.pipeline.p2p import Transport
from runtime.report.step_report import warn_of
from runtime.weights.initial_weights import Fresh, differing, take_constants, take_weights
from runtime.weights.shards import Kept, RankWeights, fill, fill_later, keep, share, without_gradients
from runtime.weights.sources import ModelWeights

AnyExecutor = TypeVar("AnyExecutor", bound=Executor)
Mode = Literal["train", "evaluate"]
_CONTRADICTIONS = (LookupError, TypeError, ValueError, AttributeError, AssertionError, RuntimeError, SyntaxError)
_OTHERS = (PlanError, RunError, torch.OutOfMemoryError, dist.DistError, NotImplementedError)


@contextmanager
def errors_of_file(model: nn.Module | None) -> Iterator[None]:
    """Raise errors of the block as PlanError about the plan's file, if the plan of ``model`` was read from one."""
    try:
        yield
    except _CONTRADICTIONS as error:
        if not isinstance(model, Skeleton) or isinstance(error, _OTHERS):
            raise
        fix = "save the plan again; if that one fails too, let ranks plan by themselves"
        raise PlanError(f"the loaded plan cannot be run: {first_line(error)}", fix=fix) from error


def open_rank(plan: Plan, device: torch.device | str | None, timeout_seconds: float) -> Groups:
    """Return the process groups of this rank, after all ranks agreed that they run the same plan and versions."""
    tied = [tuple(p.stages) for p in plan.parameters if len(p.stages) > 1]
    combined = combined_axes(plan.optimizer) + ((SHARD, REPLICA) if plan.mesh.replica > 1 else ())
    combined += tuple(sorted({b.reduced_over + OF_WEIGHTS for b in plan.to_run()[1].buffers if b.gathers}))
    options = {"device": device, "timeout_seconds": timeout_seconds, "combined": combined}
    groups = open_groups(plan.mesh, identity(plan), tied, **options)
    warn_of(plan, groups.rank)
    return groups


def check_mode(mode: str) -> None:
    """Raise PlanError for an unknown mode."""
    if mode not in get_args(Mode):
        known = " or ".join(map(repr, get_args(Mode)))
        raise PlanError(f"an engine has no mode {mode!r}", where="Engine(mode=…)", fix=f"use {known}")


def need_training(mode: str, name: str) -> None:
    """Raise PlanError if an engine in this mode has no gradients and no optimizer state for the call ``name``."""
    if mode != "train":
        what = f"{name} needs gradients or optimizer state, and an engine with mode {mode!r} has none"
        raise PlanError(what, where=name, fix='make the engine with Engine(plan), or Engine(plan, mode="train")')


@dataclass(frozen=True)
class Built:
    """One rank's program of a plan, with its weights. ``fresh``: parameters that wait for values."""

    plan: Plan
    groups: Groups
    program: RankProgram
    layout: BatchLayout
    optimizer: DistributedOptimizer
    fresh: Fresh
    kept: Kept
    compiled: CompiledPieces | None = None
    mode: Mode = "train"

    def headed(self, stages: Sequence[StageModule], want: str) -> tuple[StageModule | None, list[StageModule]]:
        """Return the stage of the loss lowered to return ``want`` beside the loss (None on other ranks), and ``stages``
        with it, over their tensors. Raises PlanError if the loss gives no label a probability.
        """
        last = lower_with_head(self.plan, self.groups.rank, self.program, self.groups.device, want=want)
        if last is None:
            return last, list(stages)
        for stage in (stage for stage in stages if stage.index == last.index):
            share(stage, last, self.groups.device)
        return last, [last if stage.index == last.index else stage for stage in stages]


class Running:
    """The state of one rank that all parts of its engine share. ``weights``: its own, and those that rank 0 keeps.

    ``step_index``: number of updates, with those before a load. ``gradients_ready``: whether a ``forward_backward`` is
    without its update.
    """

    def __init__(self, spec: Spec, built: Built) -> None:
        self.plan, self.spec, self.groups, self.mode = built.plan, spec, built.groups, built.mode
        self.program, self.optimizer = built.program, built.optimizer
        self.weights = RankWeights(self.plan, self.program, self.groups, built.kept)
        self.loss_scale = LossScale(spec.precision, self.groups.device)
        self.step_index = 0
        self.gradients_ready = False
        self.nothing = torch.zeros((), dtype=torch.float64, device=self.groups.device)

    def addend_of(self, loss: Tensor | None) -> Tensor:
        """This rank's addend to the global loss: the tp ranks of the last stage all have it, one adds it."""
        return loss if loss is not None and self.groups.place["tp"] == 0 else self.nothing

    def over_world(self, addend: Tensor) -> float:
        """The sum over all ranks."""
        total = addend.clone()
        if self.groups.world is not None:
            dist.all_reduce(total, group=self.groups.world)
        return total.item()


def build(
    plan: Plan, spec: Spec, groups: Groups, weights: ModelWeights, program: RankProgram | None, mode: Mode
) -> Built:
    """Lower the plan for this rank (unless ``program`` is given), take the weights, release the model."""
    check_backend(spec.cuda_graphs.impl, groups.device)
    is_compiled = compiles(plan, spec.compile, groups)
    differ = differing(plan, groups, spec.initial_weights)
    take_constants(plan, groups, differ)
    for other in plan.shorter:
        take_constants(other, groups, differing(other, groups, spec.initial_weights, kinds={"constant"}))
    is_given = program is not None
    program = program or lower(plan, groups.rank, groups.device)
    require_same_code(plan, program, groups, is_given=is_given)
    check_attention(plan, groups)
    for name, axis in program.axes.items():
        axis.group = groups.over(name)
    if program.count_module is not None:
        program.count_module.to(groups.device)
    buffers = _buffers(plan, groups, mode)
    later = frozenset(name for b in buffers if b.gathers for name in b.by_name)
    fresh = fill(program.stages, weights, groups.mesh, groups.place, groups.device, later)
    if mode == "evaluate":
        without_gradients(program.stages)
    optimizer = _optimizer(plan, spec, groups, program, buffers, mode)
    with optimizer.buffers.weights.one_by_one(plan.to_run()[1].bucket_of(groups.place), writes=True) as opened:
        fill_later(program.stages, weights, groups, later, opened)
        take_weights(plan, program, weights, groups, differ, opened)
    optimizer.sync_main_from_parameters()
    kept = keep(plan, program.stages, weights, groups.rank)
    weights.release()
    for each in plan.of_all_lengths:
        if each.owner is not None:
            each.owner.release()
    give_back_freed()
    if program.gate is not None:
        program.gate.wait = optimizer.buffers.wait_bucket
        program.gate.need = optimizer.buffers.weights.need
    optimizer.buffers.expect(contributions_of(program))
    program.weight_gradients.bind(optimizer.buffers)
    compiled = CompiledPieces.of(plan, program) if is_compiled else None
    taken = {held.name for held in differ if held.kind == "parameter"}  # from rank 0
    layout, fresh = batch_layout(plan, groups), [held for held in fresh if held[1].fqn not in taken]
    return Built(plan, groups, program, layout, optimizer, fresh, kept, compiled, mode)


def executor_of(
    kind: type[AnyExecutor], built: Built, before_backward: Callable[[bool], None], graphs: Graphs | None = None
) -> AnyExecutor:
    """Return the loop over this rank's actions. ``before_backward``: called before each backward and each W."""
    orders, groups = built.plan.schedule.orders, built.groups
    return kind(
        built.program.stages,
        orders[groups.place["pp"]],
        Transport(groups, len(built.plan.stages), orders),
        built.program.random,
        before_backward=before_backward,
        before_forward=None if graphs is None else graphs.before_forward,
        before_weights=before_backward,
        weights=built.program.weight_gradients,
        gradients=built.optimizer.buffers.scattered or None,
    )


def graphs_of(built: Built) -> Graphs | None:
    """Return the CUDA graphs of this rank's regions or steps; None if the plan has none, or nothing trains."""
    section, program, buffers = spec_of(built.plan).cuda_graphs, built.program, built.optimizer.buffers
    order, device = without_weights(built.plan.schedule.orders[built.groups.place["pp"]]), built.groups.device
    if section.impl == "none" or built.mode == "evaluate":
        return None
    if section.impl == "transformer_engine":
        return TransformerEngineGraphs(program, order, device, no_gradient_hooks=buffers.deaf)
    maker = CudaGraphs(device) if section.impl == "local" else Emulation(program.random, device)
    if FULL_ITERATION in section.scope:
        return FullIteration(program, buffers, maker, device)
    return GraphsBySlot(program, order, buffers, maker, device)


def parameters_of(program: RankProgram) -> list[tuple[LocalParameter, nn.Parameter]]:
    """Return (planned parameter, the module's parameter) for all parameters of this rank."""
    return [(p, stage.parameter(p.fqn)) for stage in program.stages for p in stage.parameters]


def contributions_of(program: RankProgram) -> dict[int, int]:
    """Return id of a parameter → number of its gradients in a backward of its stage."""
    modules = [stage.module for stage in program.stages]
    return {
        id(module.get_parameter(name)): times
        for module in modules
        for name, times in contributions(module, module.graph).items()
    }


def spec_of(plan: Plan) -> Spec:
    """Return the plan's spec, without the cluster file, which was read when planning and may be elsewhere."""
    return Spec.load({**plan.spec, "cluster": None})


def batch_layout(plan: Plan, groups: Groups) -> BatchLayout:
    """Return the layout of batches by the spec's inputs, or those with which the model was captured."""
    (decisions, _), spec = plan.to_run(), spec_of(plan)
    read = decisions.batch_inputs
    inputs = {name: (i.sizes, getattr(torch, i.dtype)) for name, i in spec.inputs.items()} or read
    computed = {name: dtype for name, (_, dtype) in read.items()}
    sizes = (spec.batch.global_size, int(spec.batch.micro), groups.mesh.dp)
    assumptions = tuple(decisions.program.assumptions)
    lengths = tuple(row.length for row in plan.lengths)
    facts = computed, decisions.id_ranges, assumptions, lengths, spec.forms
    return BatchLayout(inputs, *sizes, groups.place["dp"], *facts)


def _optimizer(
    plan: Plan, spec: Spec, groups: Groups, program: RankProgram, buffers: tuple[Buffer, ...], mode: Mode
) -> DistributedOptimizer:
    """Return the optimizer of this rank; for an evaluation it updates nothing, and at most gathers sharded weights."""
    shards = plan.to_run()[1]
    residency = Residency(reshards=shards.reshards, kept=shards.kept_by(groups.place["pp"]))
    return DistributedOptimizer(
        parameters_of(program),
        buffers,
        spec.optimizer if mode == "train" else spec.optimizer.model_copy(update={"ema": None}),
        groups={**groups.by_name, "world": groups.world},
        device=groups.device,
        asked=_resting(plan.to_run()[0]),
        own=settings_of(spec.optimizer, plan.parameters),
        exchanges=_exchanges(plan, groups) if mode == "train" else {},
        residency=residency if mode == "train" else Residency(reshards=True),
        chunk_of={id(stage.parameter(p.fqn)): stage.chunk for stage in program.stages for p in stage.parameters},
    )


def _resting(decisions: Decisions) -> dict[str, tuple[int, ...]]:
    """Return parameter → the conditions under which it rests: no row of its expert, another loss than the model's."""
    resting = decisions.resting
    return {**resting, **{name: (*resting.get(name, ()), OWN_LOSS) for name in decisions.read_by_the_loss_alone}}


def _buffers(plan: Plan, groups: Groups, mode: Mode) -> tuple[Buffer, ...]:
    """Return the planned buffers of this rank; for an evaluation only if weights are sharded, without gradients."""
    planned = plan.to_run()[1].buffers_of_rank(groups.place["pp"], groups.place["ep"])
    if mode == "train":
        return planned
    return tuple(b.frozen() for b in planned) if any(b.gathers for b in planned) else ()


def _exchanges(plan: Plan, groups: Groups) -> dict[tuple[int, int], BucketExchange]:
    """Return the exchanges of this rank's buckets that are updated matrix by matrix, by (buffer, bucket)."""
    decisions, shards = plan.to_run()
    ep_rank, exchanges = groups.place["ep"], {}
    for number, buffer in enumerate(shards.buffers_of_rank(groups.place["pp"], ep_rank)):
        homes = homes_of(buffer, plan.mesh, decisions.rules, ep_rank)
        if homes is not None:
            member = Member.of(plan.mesh, groups.rank, homes.axis, groups.over(homes.axis))
            exchanges |= {(number, i): BucketExchange(homes, i, member) for i in range(len(homes.buckets))}
    return exchanges
