"""Weights: shards of full tensors into this rank's stage modules, and full tensors back from all ranks' shards.

    full [.., n, ..] --pad--> [.., n + padding, ..] --Part.ranges--> shard        and the same way back

A rank asks its source for one full tensor at a time and keeps only its shard.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from passes.errors import PlanError
from passes.parameters import LocalParameter
from passes.stage_module import StageModule
from planner.capture.hub.assembly import Assembly
from planner.frozen_plan import Plan
from planner.mesh import Mesh
from planner.sharding.parameters import ParameterPlan
from planner.sharding.parts import Part, Ranges, part_of
from runtime.weights.sources import WeightSource


def fill(
    stages: Iterable[StageModule],
    source: WeightSource,
    mesh: Mesh,
    place: Mapping[str, int],
    device: torch.device,
    later: Collection[str] = (),
) -> list[tuple[StageModule, LocalParameter]]:
    """Give every parameter and buffer of the stage modules its values on ``device``: shards of the rank at ``place``.

    Returns the parameters that have no values yet and are zero, for ``initialise``, or for a checkpoint: to draw fresh
    values only to overwrite them would take minutes for a large model. Those ``later`` stay on meta.
    """
    fresh = []
    for stage in stages:
        for parameter in stage.parameters:
            if parameter.fqn in later:
                if source.is_fresh(parameter.fqn):
                    fresh.append((stage, parameter))
                continue
            if source.is_fresh(parameter.fqn):
                local = torch.zeros(parameter.shape, dtype=parameter.dtype, device=device)
                fresh.append((stage, parameter))
            else:
                local = _values(source, parameter, part_of(parameter, mesh, place), device)
            _assign(stage.module, stage.attributes[parameter.fqn], nn.Parameter(local, parameter.requires_grad))
        for fqn in stage.buffers:
            planned = stage.module.get_buffer(stage.attributes[fqn])
            value = source.buffer(fqn).to(device=device, dtype=planned.dtype, copy=True)
            _assign(stage.module, stage.attributes[fqn], value)
        _place_constants(stage.module, device, {stage.attributes[fqn] for fqn in stage.attributes if fqn in later})
    return fresh


@torch.no_grad()
def fill_later(
    stages: Iterable[StageModule],
    source: WeightSource,
    mesh: Mesh,
    place: Mapping[str, int],
    later: Collection[str],
    opened: Callable[[str], None],
) -> None:
    """Values of the parameters that ``fill`` left on meta, which have memory now, unless they are fresh."""
    for stage in stages:
        for parameter in stage.parameters:
            if parameter.fqn in later and not source.is_fresh(parameter.fqn):
                opened(parameter.fqn)
                target = stage.parameter(parameter.fqn).data
                target.copy_(_values(source, parameter, part_of(parameter, mesh, place), target.device))


def share(trained: StageModule, other: StageModule, device: torch.device) -> None:
    """Give ``other``, the same stage lowered again, the very parameters and buffers of ``trained``."""
    for fqn in (*(parameter.fqn for parameter in other.parameters), *other.buffers):
        held = trained.module.get_parameter if fqn not in other.buffers else trained.module.get_buffer
        _assign(other.module, other.attributes[fqn], held(trained.attributes[fqn]))
    _place_constants(other.module, device)


def without_gradients(stages: Sequence[StageModule]) -> None:
    """Parameters of stages that only evaluate: none has a gradient, and the copies of a tied one are one tensor."""
    first: dict[str, tuple[StageModule, str]] = {}
    for stage in stages:
        stage.module.requires_grad_(False)
        for parameter in stage.parameters:
            attribute = stage.attributes[parameter.fqn]
            owner, name = first.setdefault(parameter.fqn, (stage, attribute))
            if owner is not stage:
                _assign(stage.module, attribute, owner.module.get_parameter(name))


@torch.no_grad()
def initialise(
    fresh: Iterable[tuple[StageModule, LocalParameter]],
    source: WeightSource,
    mesh: Mesh,
    place: Mapping[str, int],
    opened: Callable[[str], None] = lambda name: None,
) -> None:
    """Fresh values for the parameters that ``fill`` left without; ``opened(name)`` is called before each is written."""
    for stage, parameter in fresh:
        opened(parameter.fqn)
        stage.parameter(parameter.fqn).data.copy_(fresh_shard(source, parameter, part_of(parameter, mesh, place)))


def fresh_shard(source: WeightSource, parameter: LocalParameter, part: Part) -> Tensor:
    """This rank's shard, on the CPU: if it is one run of rows, as those of experts are, no other rows are drawn."""
    shape, dtype = tuple(parameter.global_shape), parameter.dtype
    of_rows = part.ranges.get(0, ())
    if len(of_rows) != 1:
        return shard(source.parameter(parameter.fqn, shape, dtype), part)
    start, stop = (min(end, shape[0]) for end in of_rows[0])
    rows = source.rows(parameter.fqn, shape, dtype, (start, stop))
    padding = of_rows[0][1] - of_rows[0][0] - (stop - start)
    rows = torch.cat([rows, rows.new_zeros(padding, *shape[1:])]) if padding else rows
    return _cut(_padded(rows, part, dims={part.placement.dim} - {0}), {d: r for d, r in part.ranges.items() if d != 0})


def _values(source: WeightSource, parameter: LocalParameter, part: Part, device: torch.device) -> Tensor:
    full = source.parameter(parameter.fqn, parameter.global_shape, parameter.dtype)
    if tuple(full.shape) != tuple(parameter.global_shape):
        raise PlanError(
            f"parameter {parameter.fqn} is {list(full.shape)}, the plan has {list(parameter.global_shape)}",
            fix="use the planned model",
        )
    # A copy always: the rank's weights must not alias the user's model.
    local = shard(full, part).to(device=device, dtype=parameter.dtype, copy=True)
    assert tuple(local.shape) == tuple(parameter.shape), f"{parameter.fqn}: {local.shape} is not {parameter.shape}"
    return local.contiguous()


@dataclass(frozen=True, slots=True)
class Kept:
    """The tensors that rank 0 keeps in full for checkpoints, since no stage computes with them or nothing updates them.

    ``parameters``: those that do not reach the loss. ``buffers``: the persistent ones. Of the directory that was
    loaded, ``texts``: config files by name; ``names``, on every rank: stored name → how the model's tensors make it.
    """

    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    texts: dict[str, Any] = field(default_factory=dict)
    names: dict[str, Assembly] = field(default_factory=dict)


def keep(plan: Plan, stages: Iterable[StageModule], source: WeightSource, rank: int) -> Kept:
    """Copies for rank 0 on the CPU; nothing elsewhere."""
    if rank != 0:
        return Kept()
    held = {parameter.fqn for stage in stages for parameter in stage.parameters}
    rows = [row for row in plan.parameters if 0 in row.stages and row.name not in held and _is_near(row, plan)]
    dtypes = {row.name: getattr(torch, row.dtype) for row in rows}
    parameters = {
        row.name: source.parameter(row.name, row.shape, dtypes[row.name]).to("cpu", dtypes[row.name], copy=True)
        for row in rows
    }
    persistent = plan.hub.persistent_buffers
    cast = plan.spec.get("precision", {}).get("parameters")
    buffers = {name: source.buffer(name).to("cpu", copy=True) for name in persistent}
    return Kept(
        parameters, {n: b.to(getattr(torch, cast)) if cast and b.is_floating_point() else b for n, b in buffers.items()}
    )


def _is_near(row: ParameterPlan, plan: Plan) -> bool:
    """Whether rank 0 would hold the parameter if it is of rank 0's stage: an expert's own may lie on another rank."""
    return row.expert is None or row.expert.is_held(plan.mesh.ep, plan.mesh.place(0)["ep"])


def shard(full: Tensor, part: Part) -> Tensor:
    """The part of a full tensor that one rank holds."""
    return _cut(_padded(full, part, dims={part.placement.dim}), part.ranges)


def _padded(full: Tensor, part: Part, dims: Collection[int]) -> Tensor:
    """The tensor with the padding of its placement, if that is on one of ``dims``."""
    dim, padding = part.placement.dim, part.placement.padding
    if not padding or dim not in dims:
        return full
    return torch.cat([full, full.new_zeros([padding if d == dim else n for d, n in enumerate(full.shape)])], dim)


def _cut(full: Tensor, ranges: Ranges) -> Tensor:
    for dim, of_dim in ranges.items():
        runs = [full.narrow(dim, start, stop - start) for start, stop in of_dim]
        full = torch.cat(runs, dim) if len(runs) > 1 else runs[0]
    return full


def _assign(module: nn.Module, attribute: str, value: Tensor) -> None:
    path, _, name = attribute.rpartition(".")
    owner = module.get_submodule(path)
    if isinstance(value, nn.Parameter):
        setattr(owner, name, value)
    else:
        owner._buffers[name] = value


def _place_constants(module: nn.Module, device: torch.device, later: Collection[str] = ()) -> None:
    """Buffers that lowering made itself (constants of the graph) hold their values already: they only move."""
    for owner in module.modules():
        for name, value in owner._buffers.items():
            if value is not None and not value.is_meta:
                owner._buffers[name] = value.to(device)
    for name, value in (*module.named_parameters(), *module.named_buffers()):
        if value.is_meta and name not in later:
            raise PlanError(
                f"the constant {name} of the model has no values: the model was built on the meta device",
                fix="build the model inside `with meshwright.meta_parameters():`, which keeps other tensors real",
            )
