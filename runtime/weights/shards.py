"""Weights: shards of full tensors into this rank's stage modules, and full tensors back from all ranks' shards.

    full [.., n, ..] --pad--> [.., n + padding, ..] --Placement.slices(tp, rank)--> shard        and the same way back

A rank asks its source for one full tensor at a time and keeps only its shard.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from passes.stage_module import StageModule
from planner.errors import PlanError
from planner.frozen_plan import Plan
from planner.placement.types import Placement
from planner.sharding.parameters import LocalParameter
from runtime.weights.sources import WeightSource


def fill(
    stages: Iterable[StageModule], source: WeightSource, tp: int, tp_rank: int, device: torch.device
) -> list[tuple[StageModule, LocalParameter]]:
    """Give every parameter and buffer of the stage modules its values on ``device``: this rank's shards.

    Returns the parameters that have no values yet and are zero, for ``initialise``, or for a checkpoint: to draw fresh
    values only to overwrite them would take minutes for a large model.
    """
    fresh = []
    for stage in stages:
        for parameter in stage.parameters:
            if source.is_fresh(parameter.fqn):
                local = torch.zeros(parameter.shape, dtype=parameter.dtype, device=device)
                fresh.append((stage, parameter))
            else:
                local = _values(source, parameter, tp, tp_rank, device)
            _assign(stage.module, stage.attributes[parameter.fqn], nn.Parameter(local, parameter.requires_grad))
        for fqn in stage.buffers:
            planned = stage.module.get_buffer(stage.attributes[fqn])
            value = source.buffer(fqn).to(device=device, dtype=planned.dtype, copy=True)
            _assign(stage.module, stage.attributes[fqn], value)
        _place_constants(stage.module, device)
    return fresh


@torch.no_grad()
def initialise(
    fresh: Iterable[tuple[StageModule, LocalParameter]], source: WeightSource, tp: int, tp_rank: int
) -> None:
    """Fresh values for the parameters that ``fill`` left without."""
    for stage, parameter in fresh:
        stage.parameter(parameter.fqn).data.copy_(fresh_shard(source, parameter, tp, tp_rank))


def fresh_shard(source: WeightSource, parameter: LocalParameter, tp: int, tp_rank: int) -> Tensor:
    """This rank's shard, on the CPU: where it is one run of rows, nothing else is drawn."""
    placement, shape, dtype = parameter.placement, tuple(parameter.global_shape), parameter.dtype
    slices = placement.slices(tp, tp_rank) if placement.is_sharded else ()
    if placement.dim != 0 or len(slices) != 1:
        return shard(source.parameter(parameter.fqn, shape, dtype), placement, tp, tp_rank)
    start, stop = (min(end, shape[0]) for end in slices[0])
    rows = source.rows(parameter.fqn, shape, dtype, (start, stop))
    padding = parameter.shape[0] - (stop - start)
    return torch.cat([rows, rows.new_zeros(padding, *shape[1:])]) if padding else rows


def _values(source: WeightSource, parameter: LocalParameter, tp: int, tp_rank: int, device: torch.device) -> Tensor:
    full = source.parameter(parameter.fqn, parameter.global_shape, parameter.dtype)
    if tuple(full.shape) != tuple(parameter.global_shape):
        raise PlanError(
            f"parameter {parameter.fqn} is {list(full.shape)}, the plan has {list(parameter.global_shape)}",
            fix="give the model that was planned",
        )
    # A copy always: the rank's weights must not alias the user's model.
    local = shard(full, parameter.placement, tp, tp_rank).to(device=device, dtype=parameter.dtype, copy=True)
    assert tuple(local.shape) == tuple(parameter.shape), f"{parameter.fqn}: {local.shape} is not {parameter.shape}"
    return local.contiguous()


@dataclass(frozen=True, slots=True)
class Kept:
    """What rank 0 keeps whole, since no stage computes with it or nothing updates it, and a checkpoint holds it.

    ``parameters``: those that do not reach the loss. ``buffers``: the persistent ones. ``texts``: config files by name,
    of the directory that was loaded.
    """

    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    texts: dict[str, Any] = field(default_factory=dict)


def keep(plan: Plan, stages: Iterable[StageModule], source: WeightSource, rank: int) -> Kept:
    """Copies for rank 0 on the CPU; nothing elsewhere."""
    if rank != 0:
        return Kept()
    held = {parameter.fqn for stage in stages for parameter in stage.parameters}
    rows = [row for row in plan.parameters if 0 in row.stages and row.name not in held]
    dtypes = {row.name: getattr(torch, row.dtype) for row in rows}
    parameters = {
        row.name: source.parameter(row.name, row.shape, dtypes[row.name]).to("cpu", dtypes[row.name], copy=True)
        for row in rows
    }
    persistent = plan.to_run()[0].hub.persistent_buffers
    cast = plan.spec.get("precision", {}).get("parameters")
    buffers = {name: source.buffer(name).to("cpu", copy=True) for name in persistent}
    return Kept(
        parameters, {n: b.to(getattr(torch, cast)) if cast and b.is_floating_point() else b for n, b in buffers.items()}
    )


def shard(full: Tensor, placement: Placement, tp: int, tp_rank: int) -> Tensor:
    """The part of a full tensor that one tp rank holds."""
    if not placement.is_sharded:
        return full
    if placement.padding:
        padded = list(full.shape)
        padded[placement.dim] = placement.padding
        full = torch.cat([full, full.new_zeros(padded)], placement.dim)
    parts = [full.narrow(placement.dim, start, stop - start) for start, stop in placement.slices(tp, tp_rank)]
    return torch.cat(parts, placement.dim) if len(parts) > 1 else parts[0]


def _assign(module: nn.Module, attribute: str, value: Tensor) -> None:
    path, _, name = attribute.rpartition(".")
    owner = module.get_submodule(path)
    if isinstance(value, nn.Parameter):
        setattr(owner, name, value)
    else:
        owner._buffers[name] = value


def _place_constants(module: nn.Module, device: torch.device) -> None:
    """Buffers that lowering made itself (constants of the graph) hold their values already: they only move."""
    for owner in module.modules():
        for name, value in owner._buffers.items():
            if value is not None and not value.is_meta:
                owner._buffers[name] = value.to(device)
    for name, value in (*module.named_parameters(), *module.named_buffers()):
        if value.is_meta:
            raise PlanError(
                f"the constant {name} of the model has no values: the model was built on the meta device",
                fix="build the model inside `with planner.meta_parameters():`, which leaves other tensors real",
            )
