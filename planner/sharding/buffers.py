"""The gradient buffers of every pp rank: the layout of parameters, the dtypes, and the axes that sum gradients.

buffer      a rank's trainable parameters of one dtype with gradients that need the same sums (over dp, or dp-cp if
            cp > 1, or edp for experts; over tp or etp; over the stages that hold a tied weight); cut into buckets, each
            bucket into one shard for each rank of dp, dp-cp or edp

The runtime allocates exactly these buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import torch

from passes.parameters import LocalParameter
from planner.decisions import Decisions
from planner.sharding import buckets
from planner.sharding.buckets import BufferLayout
from planner.sharding.parameters import parameters_of_rank
from planner.spec.optimizer import OptimizerSpec
from planner.spec.spec import Spec
from planner.spec.update_rules import MATRIX_RULES, moments_of
from planner.updates import UpdateRules

LOW_PRECISION = (torch.bfloat16, torch.float16)
FROZEN = "frozen"  # the rule of a buffer that is not updated


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """Elements [start, end) of a buffer that are reduced together, and their parameters, in buffer order.

    ``homes``: for each matrix of these, the rank of the buffer's ``matrix_axis`` that updates it.
    """

    start: int
    end: int
    parameters: tuple[str, ...]
    homes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class BufferPlan:
    """One contiguous gradient buffer of a pp rank: its parameters of one dtype. Sizes in elements, with padding.

    ``reduced_over``: "dp", or "dp-cp" if cp > 1; "edp" for experts with axes of their own, with the names of ep rank 0.
    ``rule``: the update rule; a rule of matrices gathers them over ``matrix_axis``.
    """

    pp_rank: int
    dtype: str
    gradient_dtype: str
    num_elements: int
    shard_elements: int
    buckets: tuple[BucketPlan, ...]
    reduced_over: str = "dp"
    rule: str = "adamw"
    matrix_axis: str = ""


@dataclass(frozen=True, slots=True)
class OptimizerPlan:
    """The layout of the optimizer. With ``zero`` 1, each rank that shares a buffer updates ``shard_elements`` of it."""

    buffers: tuple[BufferPlan, ...] = ()
    name: str = "adamw"
    zero: int = 1
    alignment: str = "nccl"


@dataclass(frozen=True)
class Buffer:
    """One gradient buffer of ``pp_rank``.

    ``parameters``: as tp and etp rank 0 hold them (shapes and shardings are the same on all). ``gradient_dtype``: of
    the buffer; shards are summed in ``main_dtype``. ``averaged``: keep a running mean of the parameters. ``rule``: the
    update rule of all parameters, which keeps ``moments``. ``zero``: the stage of ZeRO. ``gather``: a smaller dtype in
    which ranks send weights.
    """

    pp_rank: int
    gradient_dtype: torch.dtype
    parameters: tuple[LocalParameter, ...]
    layout: BufferLayout
    averaged: bool = False
    rule: str = "adamw"
    moments: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    zero: int = 1
    gather: torch.dtype | None = None

    @property
    def gather_dtype(self) -> torch.dtype:
        """The dtype in which ranks send weights to one another for a step."""
        return self.dtype if self.gather is None else self.gather

    @property
    def is_frozen(self) -> bool:
        """Whether it holds weights without gradients, which are never updated."""
        return self.rule == FROZEN

    def frozen(self) -> Buffer:
        """Return the same layout without gradients and moments, for an engine that only evaluates."""
        return replace(self, rule=FROZEN, moments=(), averaged=False)

    @property
    def scatters(self) -> bool:
        """Whether a rank keeps only the gradients of its shard: each backward reduce-scatters those of a bucket."""
        return self.zero >= 2 and self.layout.num_ranks > 1 and not self.is_frozen

    @property
    def gathers(self) -> bool:
        """Whether a rank keeps only the weights of its shard: a bucket is gathered while ops read its weights."""
        return self.zero == 3 and self.layout.num_ranks > 1

    @property
    def parameter_bytes(self) -> int:
        return (self.layout.shard_elements() if self.gathers else self.layout.num_elements) * self.dtype.itemsize

    @property
    def gradient_bytes(self) -> int:
        if self.is_frozen:
            return 0
        elements = self.layout.shard_elements() if self.scatters else self.layout.num_elements
        return elements * self.gradient_dtype.itemsize

    @property
    def dtype(self) -> torch.dtype:
        return self.parameters[0].dtype

    @property
    def main_dtype(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def axis(self) -> str:
        """The axis over which its parameters are sharded."""
        return self.parameters[0].axis

    @property
    def reduced_over(self) -> str:
        """The axis of the ranks that share it, over which gradients are summed first; under ZeRO-1 each has a shard."""
        return self.parameters[0].reduced_over

    @property
    def partial_over(self) -> tuple[str, ...]:
        """The groups over which its gradients are summed after that."""
        return self.parameters[0].partial_over

    @property
    def tied_stages(self) -> tuple[int, ...]:
        return self.parameters[0].tied_stages

    @property
    def has_whole_segment(self) -> bool:
        """Whether only the replicated segments of its parameters are summed over ``axis``, not the sharded segments."""
        return self.parameters[0].has_whole_segment

    @cached_property
    def by_name(self) -> dict[str, LocalParameter]:
        return {p.fqn: p for p in self.parameters}

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of one rank's moments, the mean of its weights, if any, and its main parameters and gradients, if the
        buffers are less precise.
        """
        if self.is_frozen:
            return 0
        main = self.main_dtype.itemsize
        copies = (self.dtype != self.main_dtype) + (self.gradient_dtype != self.main_dtype)
        return self.layout.shard_elements() * main * (len(self.moments) + self.averaged + copies)


def buffers_of(spec: Spec, decisions: Decisions) -> tuple[Buffer, ...]:
    """Return every buffer of ep rank 0, by pp rank, in the order in which the runtime allocates them."""
    return tuple(buffer for rank in range(decisions.mesh.pp) for buffer in buffers_at(spec, decisions, rank, 0))


def buffers_at(spec: Spec, decisions: Decisions, pp_rank: int, ep_rank: int) -> tuple[Buffer, ...]:
    """Return the buffers of the ranks with this pp and ep rank."""
    mesh = decisions.mesh
    place = {**mesh.place(mesh.rank_of(pp=pp_rank)), "ep": ep_rank}
    sizes = {axis: mesh.size(axis) for axis in (mesh.shared_axis, "edp")}
    held = parameters_of_rank(decisions, pp_rank, place)
    units = units_of(decisions) if spec.optimizer.planned_zero >= 2 else None
    precision, options = spec.precision, BufferOptions(spec.optimizer, sizes, spec.precision.gradients, units)
    buffers = buffers_of_rank(pp_rank, held, options, decisions.rules)
    if precision.gather is None:
        return buffers
    sent = getattr(torch, precision.gather)
    return tuple(replace(b, gather=sent) if b.gathers and sent.itemsize < b.dtype.itemsize else b for b in buffers)


def gradient_size(asked: str | None, itemsize: int) -> int:
    """Return the bytes of an element of a gradient buffer. ``asked``: its dtype in the spec; None: at least float32."""
    return getattr(torch, asked).itemsize if asked else max(4, itemsize)


@dataclass(frozen=True)
class BufferOptions:
    """``sizes``: of the axes over which gradients are reduced. ``gradients``: their dtype; None: float32 for parameters
    of half precision, else the parameter's dtype. ``units``: name → unit of the parameters that share a bucket, with
    zero 2 and 3.
    """

    optimizer: OptimizerSpec
    sizes: Mapping[str, int]
    gradients: str | None = None
    units: Mapping[str, object] | None = None

    def gradient_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the gradients of parameters of ``dtype``."""
        if self.gradients:
            return getattr(torch, self.gradients)
        return torch.float32 if dtype in LOW_PRECISION else dtype

    def layout(self, members: tuple[LocalParameter, ...], *, is_shared: bool) -> BufferLayout:
        """Return the layout of a buffer. ``is_shared``: stages share its parameters, and read them at other ops."""
        optimizer, num_ranks, units = self.optimizer, self.sizes[members[0].reduced_over], self.units
        if units is not None and is_shared:
            units = {p.fqn: p.fqn for p in members}
        sharded = optimizer.planned_zero >= 1
        return buckets.lay_out(
            ((p.fqn, prod(p.shape)) for p in members),
            num_ranks if sharded else 1,
            alignment=optimizer.alignment if sharded else "none",  # nothing is sharded, so nothing needs alignment
            bucket_size=optimizer.bucket_size or buckets.default_bucket_size(num_ranks, optimizer.alignment),
            units=units,
        )


def buffers_of_rank(
    pp_rank: int, held: Iterable[LocalParameter], options: BufferOptions, rules: UpdateRules | None = None
) -> tuple[Buffer, ...]:
    """Return the buffers of one rank's parameters, in the model's order. ``rules``: default: the section's for all."""
    optimizer = options.optimizer
    rules = rules or UpdateRules(optimizer.name)
    groups: dict[tuple[object, ...], dict[str, LocalParameter]] = {}
    for p in held:
        if not p.requires_grad and optimizer.planned_zero == 3:
            groups.setdefault((p.dtype, p.reduced_over, FROZEN), {}).setdefault(p.fqn, p)
        elif p.requires_grad:
            rule = rules.of(p.fqn)
            key = (p.dtype, p.reduced_over, p.partial_over, p.tied_stages, p.has_whole_segment, rule)
            key += (p.placement.is_sharded,) if rule in MATRIX_RULES else ()  # other ranks hold parts of a matrix
            groups.setdefault(key, {}).setdefault(p.fqn, p)
    return tuple(_buffer(pp_rank, tuple(group.values()), options, rules) for group in groups.values())


def _buffer(pp_rank: int, members: tuple[LocalParameter, ...], options: BufferOptions, rules: UpdateRules) -> Buffer:
    optimizer, first = options.optimizer, members[0]
    is_frozen, is_shared = not first.requires_grad, bool(first.tied_stages) and first.requires_grad
    if is_shared:  # stages list them in different orders, but need equal layouts
        members = tuple(sorted(members, key=lambda p: p.fqn))
    rule = FROZEN if is_frozen else rules.of(members[0].fqn)
    return Buffer(
        pp_rank,
        options.gradient_dtype(first.dtype),
        members,
        options.layout(members, is_shared=is_shared),
        averaged=optimizer.ema is not None and not is_frozen,
        rule=rule,
        moments=() if is_frozen else moments_of(rule, optimizer),
        zero=optimizer.planned_zero,
    )


Home = tuple[int, bool]  # (index of a block, whether the op is outside, behind that block)


def units_of(decisions: Decisions) -> dict[str, tuple[Home, ...]]:
    """Return name → homes of the ops that read the parameter, sorted; parameters of equal homes are one unit."""
    homes, program = homes_of_ops(decisions), decisions.program
    readers: dict[str, set[Home]] = {}
    for node in program.graph.graph.find_nodes(op="placeholder"):
        if node.name in program.parameters:
            calls = (homes[user.name] for user in node.users if user.op == "call_function")
            readers.setdefault(program.parameters[node.name], set()).update(calls)
    return {name: tuple(sorted(of_name)) for name, of_name in readers.items()}


def homes_of_ops(decisions: Decisions) -> dict[str, Home]:
    """Return op → its block, or the last block before it."""
    block_of, last, found = decisions.blocks.block_of(), -1, dict[str, Home]()
    for node in decisions.program.graph.graph.nodes:
        if node.op != "call_function":
            continue
        own = block_of.get(node.name)
        last = last if own is None else max(last, own)
        found[node.name] = (last, True) if own is None else (own, False)
    return found
