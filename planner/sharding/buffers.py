"""The gradient buffers of every pp rank: the places of parameters, their precision, and the axes of their sums.

buffer      a rank's trainable parameters of one dtype with gradients that need the same sums (over dp, with a cp over
            dp-cp, or edp for experts; over tp or etp; over the stages that hold a tied weight); cut into buckets, each
            bucket into one shard for each rank of dp, dp-cp or edp

The runtime allocates these buffers and no others.
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
FROZEN = "frozen"  # in place of an update rule


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """Elements [start, end) of a buffer that are reduced together, and the parameters in them, in buffer order.

    ``homes``: of each of their matrices, in that order, the rank of the buffer's ``matrix_axis`` that updates it.
    """

    start: int
    end: int
    parameters: tuple[str, ...]
    homes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class BufferPlan:
    """One contiguous gradient buffer of a pp rank: its parameters of one dtype. Sizes in elements, with padding.

    ``reduced_over``: "dp", or "dp-cp" if cp > 1; "edp" for experts with axes of their own, and the names are
    then those of ep rank 0. ``rule`` updates it; one of matrices gathers them over ``matrix_axis``.
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
    """The layout of the optimizer: ``zero`` 1 gives each rank that shares a buffer ``shard_elements`` of it."""

    buffers: tuple[BufferPlan, ...] = ()
    name: str = "adamw"
    zero: int = 1
    alignment: str = "nccl"


@dataclass(frozen=True)
class Buffer:
    """One buffer of ``pp_rank``. ``gradient_dtype`` is that of the buffer; shards are summed in ``main_dtype``.
    ``averaged``: a running mean of its parameters is kept. ``rule`` updates all of them, and keeps ``moments``.
    ``zero``: what ranks that share it keep a shard of. ``gather``: a smaller dtype in which weights are sent.

    ``parameters``: as the first tp and etp rank holds them (shapes and cuts are the same on all).
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
        """Whether it has weights alone, which nothing updates."""
        return self.rule == FROZEN

    def frozen(self) -> Buffer:
        """The same parameters at the same places, without gradients and moments: for an engine that only evaluates."""
        return replace(self, rule=FROZEN, moments=(), averaged=False)

    @property
    def scatters(self) -> bool:
        """Whether ranks keep the gradients of their shards alone: each backward sums and scatters those of a bucket."""
        return self.zero >= 2 and self.layout.num_ranks > 1 and not self.is_frozen

    @property
    def gathers(self) -> bool:
        """Whether ranks keep the weights of their shards alone: a bucket is whole while ops read its weights."""
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
        """The axis over which its parameters are cut."""
        return self.parameters[0].axis

    @property
    def reduced_over(self) -> str:
        """The axis of the ranks that share it: their gradients are summed first; under ZeRO-1 each has its shard."""
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
        """Over its axis only the replicated segments of its parameters are summed, not the sharded ones beside them."""
        return self.parameters[0].has_whole_segment

    @cached_property
    def by_name(self) -> dict[str, LocalParameter]:
        return {p.fqn: p for p in self.parameters}

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of one rank's moments, of a mean of the weights if there is one, and of its main parameters and
        gradients if the buffers are less precise.
        """
        if self.is_frozen:
            return 0
        main = self.main_dtype.itemsize
        copies = (self.dtype != self.main_dtype) + (self.gradient_dtype != self.main_dtype)
        return self.layout.shard_elements() * main * (len(self.moments) + self.averaged + copies)


def buffers_of(spec: Spec, decisions: Decisions) -> tuple[Buffer, ...]:
    """Every buffer, by pp rank, in the order in which the runtime makes them, as ep rank 0 has them."""
    return tuple(buffer for rank in range(decisions.mesh.pp) for buffer in buffers_at(spec, decisions, rank, 0))


def buffers_at(spec: Spec, decisions: Decisions, pp_rank: int, ep_rank: int) -> tuple[Buffer, ...]:
    """The buffers of the ranks with this pp and ep rank."""
    mesh = decisions.mesh
    place = {**mesh.place(mesh.rank_of(pp=pp_rank)), "ep": ep_rank}
    sizes = {axis: mesh.size(axis) for axis in (mesh.shared_axis, "edp")}
    held = parameters_of_rank(decisions, pp_rank, place)
    units = units_of(decisions) if spec.optimizer.planned_zero >= 2 else None
    precision = spec.precision
    found = buffers_of_rank(pp_rank, held, spec.optimizer, sizes, precision.gradients, decisions.rules, units)
    if precision.gather is None:
        return found
    sent = getattr(torch, precision.gather)
    return tuple(replace(b, gather=sent) if b.gathers and sent.itemsize < b.dtype.itemsize else b for b in found)


def gradient_size(asked: str | None, itemsize: int) -> int:
    """Bytes of an element of a buffer of gradients. ``asked``: its dtype in the spec; else at least float32."""
    return getattr(torch, asked).itemsize if asked else max(4, itemsize)


def buffers_of_rank(
    pp_rank: int,
    held: Iterable[LocalParameter],
    optimizer: OptimizerSpec,
    sizes: Mapping[str, int],
    gradients: str | None = None,
    rules: UpdateRules | None = None,
    units: Mapping[str, object] | None = None,
) -> tuple[Buffer, ...]:
    """The buffers of one rank's parameters, in the model's order. ``sizes``: of the axes that gradients are reduced
    over.

    ``gradients``: their dtype, as the spec asks for it. Left out, they are float32 for parameters of half precision,
    else of the parameter's own dtype. ``rules``: left out, that of the section for all. ``units``: of parameters that
    share a bucket, with zero 2 and 3.
    """
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
    made = []
    for group in groups.values():
        members = tuple(group.values())
        is_frozen = not members[0].requires_grad
        if members[0].tied_stages and not is_frozen:  # stages list them in other orders; layouts are to be equal
            members = tuple(sorted(members, key=lambda p: p.fqn))
        own = torch.float32 if members[0].dtype in LOW_PRECISION else members[0].dtype
        dtype = getattr(torch, gradients) if gradients else own
        if units is not None and members[0].tied_stages and not is_frozen:
            units = {**units, **{p.fqn: p.fqn for p in members}}  # stages read them at other places
        layout = _layout(optimizer, sizes[members[0].reduced_over], members, units)
        rule = FROZEN if is_frozen else rules.of(members[0].fqn)
        moments = () if is_frozen else moments_of(rule, optimizer)
        averaged = optimizer.ema is not None and not is_frozen
        made.append(Buffer(pp_rank, dtype, members, layout, averaged, rule, moments, optimizer.planned_zero))
    return tuple(made)


def _layout(
    optimizer: OptimizerSpec,
    num_ranks: int,
    members: tuple[LocalParameter, ...],
    units: Mapping[str, object] | None = None,
) -> BufferLayout:
    sharded = optimizer.planned_zero >= 1
    return buckets.lay_out(
        ((p.fqn, prod(p.shape)) for p in members),
        num_ranks if sharded else 1,
        alignment=optimizer.alignment if sharded else "none",  # nothing is cut, so nothing needs to be aligned
        bucket_size=optimizer.bucket_size or buckets.default_bucket_size(num_ranks, optimizer.alignment),
        units=units,
    )


Home = tuple[int, bool]  # (index of a block, whether it is behind that block and in none)


def units_of(decisions: Decisions) -> dict[str, tuple[Home, ...]]:
    """Dotted name of each parameter → the places of its readers, in their order; the same for all of one unit."""
    homes, program = homes_of_ops(decisions), decisions.program
    found: dict[str, set[Home]] = {}
    for node in program.graph.graph.find_nodes(op="placeholder"):
        if node.name in program.parameters:
            calls = (homes[user.name] for user in node.users if user.op == "call_function")
            found.setdefault(program.parameters[node.name], set()).update(calls)
    return {name: tuple(sorted(of_name)) for name, of_name in found.items()}


def homes_of_ops(decisions: Decisions) -> dict[str, Home]:
    """Op → its block, or the last block before it."""
    block_of, last, found = decisions.blocks.block_of(), -1, dict[str, Home]()
    for node in decisions.program.graph.graph.nodes:
        if node.op != "call_function":
            continue
        own = block_of.get(node.name)
        last = last if own is None else max(last, own)
        found[node.name] = (last, True) if own is None else (own, False)
    return found
