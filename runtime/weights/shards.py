"""Weights: shards of full tensors into this rank's stage modules, and full tensors back from all ranks' shards.

    full [.., n, ..] --pad--> [.., n + padding, ..] --Part.ranges--> shard        and the same way back

A rank reads one full tensor at a time from its source, and keeps only its shard.

To collect full tensors, all ranks walk the rows of the plan in one order. The first of equal copies (over dp or edp, tp
or etp, and the stages of a tied weight) is sent, through host memory, so that no device communicator per sender is
needed and rank 0's device never holds a full tensor. A rank sends when rank 0 asks for the shard, so that copies do not
pile up while rank 0 writes, and no send times out meanwhile.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from passes.base import RankProgram, StageModule
from passes.errors import PlanError
from passes.parameters import LocalParameter
from planner.capture.model.assembly import Assembly
from planner.frozen_plan import Plan
from planner.mesh import Mesh
from planner.sharding.boxes import Box, Part, Ranges, part_of, runs_in
from planner.sharding.parameters import ParameterPlan
from runtime.distributed.agreement import call, wait_for_rank_0
from runtime.distributed.groups import Groups
from runtime.weights.sources import ModelWeights

Opens = Callable[[str], None]  # called with the name of a parameter before it is written


def fill(
    stages: Iterable[StageModule],
    source: ModelWeights,
    mesh: Mesh,
    place: Mapping[str, int],
    device: torch.device,
    later: Collection[str] = (),
) -> list[tuple[StageModule, LocalParameter]]:
    """Give every parameter and buffer of the stage modules its values on ``device``: shards of the rank at ``place``.

    Returns the parameters without values, which are zero until ``initialise`` or a checkpoint fills them: drawing
    values only to overwrite them would take minutes for a large model. The parameters ``later`` stay on meta.
    """
    fresh = []
    for stage in stages:
        for parameter in stage.parameters:
            if source.is_fresh(parameter.fqn):
                fresh.append((stage, parameter))
            if parameter.fqn in later:
                continue
            if source.is_fresh(parameter.fqn):
                local = torch.zeros(parameter.shape, dtype=parameter.dtype, device=device)
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
    stages: Iterable[StageModule], source: ModelWeights, groups: Groups, later: Collection[str], opened: Opens
) -> None:
    """Fill the parameters that ``fill`` left on meta, which have memory now, except those without values."""
    for stage in stages:
        for parameter in stage.parameters:
            if parameter.fqn in later and not source.is_fresh(parameter.fqn):
                opened(parameter.fqn)
                target = stage.parameter(parameter.fqn).data
                target.copy_(_values(source, parameter, part_of(parameter, groups.mesh, groups.place), target.device))


def share(trained: StageModule, other: StageModule, device: torch.device) -> None:
    """Give ``other``, the same stage lowered again, the parameters and buffers of ``trained`` (not copies)."""
    for fqn in (*(parameter.fqn for parameter in other.parameters), *other.buffers):
        held = trained.module.get_parameter if fqn not in other.buffers else trained.module.get_buffer
        _assign(other.module, other.attributes[fqn], held(trained.attributes[fqn]))
    _place_constants(other.module, device)


def without_gradients(stages: Sequence[StageModule]) -> None:
    """Prepare stages that only evaluate: no parameter requires a gradient, and copies of a tied one share a tensor."""
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
    fresh: Iterable[tuple[StageModule, LocalParameter]], source: ModelWeights, groups: Groups, opened: Opens
) -> None:
    """Draw values of the parameters that ``fill`` returned. ``opened(name)``: called before each is written."""
    for stage, parameter in fresh:
        opened(parameter.fqn)
        part = part_of(parameter, groups.mesh, groups.place)
        stage.parameter(parameter.fqn).data.copy_(fresh_shard(source, parameter, part))


def fresh_shard(source: ModelWeights, parameter: LocalParameter, part: Part) -> Tensor:
    """Return this rank's shard on the CPU; if it is one run of rows, as for experts, only these rows are drawn."""
    shape, dtype = tuple(parameter.global_shape), parameter.dtype
    of_rows = part.ranges.get(0, ())
    if len(of_rows) != 1:
        return shard(source.parameter(parameter.fqn, shape, dtype), part)
    start, stop = (min(end, shape[0]) for end in of_rows[0])
    rows = source.rows(parameter.fqn, shape, dtype, (start, stop))
    padding = of_rows[0][1] - of_rows[0][0] - (stop - start)
    rows = torch.cat([rows, rows.new_zeros(padding, *shape[1:])]) if padding else rows
    return _cut(_padded(rows, part, dims={part.placement.dim} - {0}), {d: r for d, r in part.ranges.items() if d != 0})


def _values(source: ModelWeights, parameter: LocalParameter, part: Part, device: torch.device) -> Tensor:
    full = source.parameter(parameter.fqn, parameter.global_shape, parameter.dtype)
    if tuple(full.shape) != tuple(parameter.global_shape):
        raise PlanError(
            f"parameter {parameter.fqn} is {list(full.shape)}, the plan has {list(parameter.global_shape)}",
            fix="use the planned model",
        )
    # always a copy: the rank's weights must not alias the user's model
    local = shard(full, part).to(device=device, dtype=parameter.dtype, copy=True)
    assert tuple(local.shape) == tuple(parameter.shape), f"{parameter.fqn}: {local.shape} is not {parameter.shape}"
    return local.contiguous()


@dataclass(frozen=True, slots=True)
class Kept:
    """Full tensors that rank 0 keeps for checkpoints, because no stage computes with them or nothing updates them.

    ``parameters``: those that do not reach the loss. ``buffers``: persistent ones. ``texts``: config files of the
    loaded directory, by name; ``names``, on every rank: stored name → how the model's tensors make the stored one.
    """

    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    texts: dict[str, Any] = field(default_factory=dict)
    names: dict[str, Assembly] = field(default_factory=dict)

    @property
    def tensors(self) -> dict[str, Tensor]:
        return self.parameters | self.buffers


@dataclass(frozen=True)
class RankWeights:
    """The weights of a plan on one rank: those of its stages, and on rank 0 the ``kept`` tensors beside them."""

    plan: Plan
    program: RankProgram
    groups: Groups
    kept: Kept


def keep(plan: Plan, stages: Iterable[StageModule], source: ModelWeights, rank: int) -> Kept:
    """Return copies on the CPU of rank 0 of the tensors to keep; nothing on other ranks."""
    if rank != 0:
        return Kept()
    held = {parameter.fqn for stage in stages for parameter in stage.parameters}
    ep = plan.mesh.ep, plan.mesh.place(0)["ep"]  # parameters of other experts lie on other ranks of the stage
    near = [row for row in plan.parameters if row.expert is None or row.expert.is_held(*ep)]
    rows = [row for row in near if 0 in row.stages and row.name not in held]
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


def shard(full: Tensor, part: Part) -> Tensor:
    """Return the part of a full tensor that one rank holds."""
    return _cut(_padded(full, part, dims={part.placement.dim}), part.ranges)


def _padded(full: Tensor, part: Part, dims: Collection[int]) -> Tensor:
    """Return the tensor with the padding of its placement, if the padded dim is one of ``dims``."""
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
    """Move the constants of the graph to ``device``. Raises PlanError for a tensor on meta that is not in ``later``."""
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


Runs = list[tuple[tuple[slice, ...], tuple[slice, ...]]]  # elements of a box, in a rank's part and in the box


class OwnParameters(Mapping[str, Tensor]):
    """This rank's part of each parameter, by name. ``opened``: called with a name before its tensor is read."""

    def __init__(self, tensors: Mapping[str, Tensor], opened: Opens) -> None:
        self._tensors, self._opened = tensors, opened

    def __getitem__(self, name: str) -> Tensor:
        self._opened(name)
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def collect(
    plan: Plan,
    own: Mapping[str, Tensor],
    dtypes: Mapping[str, torch.dtype],
    groups: Groups,
    kept: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Return full tensors on the CPU of rank 0, in the model's order and under all names; ``{}`` on other ranks.

    ``own``: this rank's shards by name. ``dtypes``: the dtype to send of each row; rows without one are taken from
    ``kept``. All ranks must call it with the same dtypes.
    """
    tensors = {}
    for row in plan.parameters:
        tensor = whole(row, own, dtypes[row.name], groups) if row.name in dtypes else (kept or {}).get(row.name)
        if tensor is not None:
            tensors |= dict.fromkeys((row.name, *row.aliases), tensor)
    return tensors


def whole(row: ParameterPlan, own: Mapping[str, Tensor], dtype: torch.dtype, groups: Groups) -> Tensor | None:
    """Return the full tensor of one row on the CPU of rank 0, None on other ranks."""
    target = torch.empty(row.shape, dtype=dtype, device="cpu" if groups.rank == 0 else "meta")
    fetch(row, own, Box.whole(row.shape), target, groups)
    return target if groups.rank == 0 else None


def fetch(row: ParameterPlan, own: Mapping[str, Tensor], box: Box, target: Tensor, groups: Groups) -> None:
    """Copy ``box`` of one row to ``target`` on rank 0. All ranks must call it for the same boxes in one order."""
    own.get(row.name)  # on every rank that has a part: ranks that shard it have to gather it together
    parts = senders_of(row, groups.mesh)
    runs = {rank: [(s, b.slices_in(box)) for s, b in runs_in(part.ranges, box)] for rank, part in parts.items()}
    if groups.rank == 0:
        _receive({rank: of_rank for rank, of_rank in runs.items() if of_rank}, row, own, target, groups)
    elif runs.get(groups.rank):
        held = own[row.name].detach()
        wait_for_rank_0(groups)
        sent = [held[local].reshape(-1).cpu() for local, _ in runs[groups.rank]]
        dist.send(torch.cat(sent) if len(sent) > 1 else sent[0].contiguous(), 0, group=groups.host)


def _receive(
    runs: Mapping[int, Runs], row: ParameterPlan, own: Mapping[str, Tensor], target: Tensor, groups: Groups
) -> None:
    """Receive the runs on rank 0: post all receives, then wait for them."""
    others = [rank for rank in runs if rank != 0]
    sizes = {rank: [target[place].numel() for _, place in of_rank] for rank, of_rank in runs.items()}
    parts = {rank: torch.empty(sum(sizes[rank]), dtype=target.dtype) for rank in others}
    works: list[Any] = [dist.irecv(parts[rank], rank, group=groups.host) for rank in others]
    call(groups, others)
    for work in works:
        work.wait()
    for rank, of_rank in runs.items():
        received = parts[rank].split(sizes[rank]) if rank else [own[row.name].detach()[local] for local, _ in of_rank]
        for (_, place), values in zip(of_rank, received, strict=True):
            target[place].copy_(values.view_as(target[place]) if rank else values)


def senders_of(row: ParameterPlan, mesh: Mesh) -> dict[int, Part]:
    """Return rank → part of the first rank that holds each part: for all tp coordinates, or those of etp and ep."""
    pp, axis, expert = mesh.pp_rank_of(min(row.stages)), row.axis, row.expert
    cuts = range(mesh.size(axis) if row.dim is not None else 1)
    if expert is None:
        ranks = [mesh.rank_of(tp=tp, pp=pp) for tp in cuts]
    else:
        owners = range(mesh.ep) if expert.dim >= 0 else [expert.owner(mesh.ep)]
        ranks = [mesh.expert.rank_of({"tp": etp, "ep": ep, "dp": 0, "pp": pp}) for ep in owners for etp in cuts]
    return {rank: part_of(row, mesh, mesh.place(rank)) for rank in ranks}
