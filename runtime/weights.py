"""Weights: shards of full tensors into this rank's stage modules, and full tensors back from all ranks' shards.

    full [.., n, ..] --pad--> [.., n + padding, ..] --Placement.slices(tp, rank)--> shard        and the same way back

A rank asks its source for one full tensor at a time and keeps only its shard.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from passes.base import LocalParameter, StageModule
from planner.errors import PlanError
from planner.frozen_plan import Plan
from planner.spec import Spec
from planner.types import Placement
from runtime.groups import Groups


class WeightSource(Protocol):
    """Where full tensors come from, by the user's dotted names."""

    def parameter(self, fqn: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor: ...

    def buffer(self, fqn: str) -> Tensor: ...


class ModelWeights:
    """The values that the user's module holds now. Raises PlanError for a tensor on the meta device."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._buffers = dict(model.named_buffers(remove_duplicate=False))

    def parameter(self, fqn: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return _real(self._parameters[fqn].detach(), f"parameter {fqn}")

    def buffer(self, fqn: str) -> Tensor:
        return _real(self._buffers[fqn].detach(), f"buffer {fqn}")


class InitialWeights(ModelWeights):
    """Fresh weights for parameters on the meta device; what the model really holds is taken as it is.

    N(0, std) for matrices, divided by sqrt(number of residual writes) for those that write into the residual; 1 for
    the scales of norms and 0 for biases. Seeded by (seed, fqn): the values do not depend on the layout.
    """

    def __init__(
        self, model: nn.Module, roles: Mapping[str, str], *, seed: int, std: float, residual_scale: bool
    ) -> None:
        super().__init__(model)
        num_residual = sum(role == "residual" for role in roles.values())
        self._roles = roles
        self._seed = seed
        self._std = {"": std, "residual": std / math.sqrt(num_residual) if num_residual and residual_scale else std}

    def parameter(self, fqn: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        held = self._parameters[fqn]
        if not held.is_meta:
            return held.detach()
        role = self._roles.get(fqn, "")
        if role in ("scale", "bias"):
            return torch.full(shape, 1.0 if role == "scale" else 0.0, dtype=dtype)
        digest = hashlib.sha256(f"{self._seed}/{fqn}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        # Drawn in float32 whatever the parameter's dtype: layouts and precisions start from the same weights.
        return torch.randn(shape, generator=generator, dtype=torch.float32).mul_(self._std[role]).to(dtype)


def weight_source(plan: Plan, spec: Spec) -> WeightSource:
    """The weights of the model that was planned, fresh ones where it stands on meta. Raises PlanError if it is gone."""
    model = getattr(plan.source, "model", None)
    if model is None:
        loaded = plan.source is None
        raise PlanError(
            "a loaded plan holds no model"
            if loaded
            else "the planned model is gone: the first Engine took its weights",
            fix="plan the model again"
            + ("" if loaded else ", or keep it alive while several engines take weights from it"),
        )
    if not any(parameter.is_meta for parameter in model.parameters()):
        return ModelWeights(model)
    program, initial = plan.source.program, spec.initialization  # pyright: ignore[reportAttributeAccessIssue]
    roles = parameter_roles(program.graph.graph, program.parameters)
    return InitialWeights(model, roles, seed=spec.seed, std=initial.std, residual_scale=initial.residual_scale)


def parameter_roles(graph: fx.Graph, parameters: Mapping[str, str]) -> dict[str, str]:
    """What each parameter of a captured graph is for, by fqn: "scale", "bias", "residual", or "" for other weights."""
    return {parameters[n.name]: _role(n) for n in graph.nodes if n.op == "placeholder" and n.name in parameters}


def _role(node: fx.Node) -> str:
    uses = [(user, position) for user in node.users for position, arg in enumerate(user.args) if arg is node]
    names = [(getattr(user.target, "_opname", str(user.target)), position) for user, position in uses]
    if any("norm" in name for name, _ in names):
        # the weight stands before the bias in every norm's arguments
        first = min(p for name, p in names if "norm" in name)
        user = next(user for user, p in uses if p == first)
        earlier = [
            a for a in user.args[:first] if isinstance(a, fx.Node) and a.op == "placeholder" and a.meta["val"].ndim == 1
        ]
        return "bias" if earlier else "scale"
    if node.meta["val"].ndim <= 1:
        return "scale" if any(name.startswith("mul") for name, _ in names) else "bias"
    return "residual" if any(_writes_residual(user) for user, _ in uses) else ""


_PASSED = (
    "view",
    "reshape",
    "_unsafe_view",
    "dropout",
    "native_dropout",
    "getitem",
    "add",
    "transpose",
    "t",
    "to",
    "_to_copy",
)


def _writes_residual(node: fx.Node) -> bool:
    """Whether the output of this linear reaches, through views, dropout and its bias, a sum of two activations."""
    name = getattr(node.target, "_opname", "")
    if name in ("t", "transpose"):
        return any(_writes_residual(user) for user in node.users)
    if name not in ("linear", "addmm", "matmul", "mm"):
        return False
    while len(node.users) == 1:
        (user,) = node.users
        name = getattr(user.target, "_opname", getattr(user.target, "__name__", ""))
        if name not in _PASSED:
            return False
        if name == "add" and all(isinstance(a, fx.Node) and a.op != "placeholder" for a in user.args[:2]):
            return True
        node = user
    return False


def fill(stages: Iterable[StageModule], source: WeightSource, tp: int, tp_rank: int, device: torch.device) -> None:
    """Give every parameter and buffer of the stage modules its values on ``device``: this rank's shards."""
    for stage in stages:
        for parameter in stage.parameters:
            full = source.parameter(parameter.fqn, parameter.global_shape, parameter.dtype)
            if tuple(full.shape) != tuple(parameter.global_shape):
                raise PlanError(
                    f"parameter {parameter.fqn} is {list(full.shape)}, the plan has {list(parameter.global_shape)}",
                    fix="give the model that was planned",
                )
            local = shard(full, parameter.placement, tp, tp_rank)
            # A copy always: the rank's weights must not alias the user's model.
            local = local.to(device=device, dtype=parameter.dtype, copy=True).contiguous()
            assert tuple(local.shape) == tuple(parameter.shape), (
                f"{parameter.fqn}: {local.shape} is not {parameter.shape}"
            )
            _assign(stage.module, stage.attributes[parameter.fqn], nn.Parameter(local, parameter.requires_grad))
        for fqn in stage.buffers:
            planned = stage.module.get_buffer(stage.attributes[fqn])
            value = source.buffer(fqn).to(device=device, dtype=planned.dtype, copy=True)
            _assign(stage.module, stage.attributes[fqn], value)
        _place_constants(stage.module, device)


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


def assemble(shards: Sequence[Tensor], placement: Placement, global_shape: Sequence[int]) -> Tensor:
    """The full tensor of all tp ranks' shards, without padding."""
    if not placement.is_sharded:
        return shards[0].clone()
    size = global_shape[placement.dim]
    padded = list(global_shape)
    padded[placement.dim] = size + placement.padding
    full = shards[0].new_empty(padded)
    for tp_rank, part in enumerate(shards):
        offset = 0
        for start, stop in placement.slices(len(shards), tp_rank):
            full.narrow(placement.dim, start, stop - start).copy_(part.narrow(placement.dim, offset, stop - start))
            offset += stop - start
    return full.narrow(placement.dim, 0, size).contiguous()


class _Entry(NamedTuple):
    """A shard that a rank sends to rank 0."""

    fqn: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    placement: Placement
    global_shape: tuple[int, ...]


def collect(groups: Groups, held: Sequence[tuple[LocalParameter, int, Tensor]]) -> dict[str, Tensor]:
    """Full tensors on the CPU of rank 0, ``{}`` elsewhere. Every rank calls it with (parameter, stage, local tensor).

    One dp rank sends, for a tied parameter its first stage, for a tensor that is whole on every tp rank the first.
    """
    own = {p.fqn: (p, tensor) for p, stage, tensor in reversed(held) if _sends(groups, p, stage)}
    entries = [_Entry(p.fqn, tuple(t.shape), t.dtype, p.placement, p.global_shape) for p, t in own.values()]
    tensors = [t.detach().contiguous() for _, t in own.values()]
    if groups.world is None:
        return {e.fqn: assemble([t.cpu()], e.placement, e.global_shape) for e, t in zip(entries, tensors, strict=True)}
    listed: list[Any] = [None] * groups.mesh.world_size
    dist.all_gather_object(listed, entries, group=groups.world)
    if groups.rank != 0:
        for tensor in tensors:
            dist.send(tensor, 0, group=groups.world)
        return {}
    shards: dict[str, list[tuple[int, Tensor]]] = {}
    described: dict[str, _Entry] = {}
    for rank, theirs in enumerate(listed):
        for index, entry in enumerate(theirs):
            if rank == 0:
                tensor = tensors[index]
            else:
                tensor = torch.empty(entry.shape, dtype=entry.dtype, device=groups.device)
                dist.recv(tensor, rank, group=groups.world)
            described[entry.fqn] = entry
            shards.setdefault(entry.fqn, []).append((groups.mesh.coordinate(rank)["tp"], tensor.cpu()))
    return {fqn: assemble(_in_tp_order(shards[fqn]), e.placement, e.global_shape) for fqn, e in described.items()}


def _in_tp_order(shards: Iterable[tuple[int, Tensor]]) -> list[Tensor]:
    return [tensor for _, tensor in sorted(shards, key=lambda item: item[0])]


def _sends(groups: Groups, parameter: LocalParameter, stage: int) -> bool:
    first = not parameter.tied_stages or stage == min(parameter.tied_stages)
    return groups.dp_rank == 0 and first and (parameter.placement.is_sharded or groups.tp_rank == 0)


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
    unfilled = [name for name, value in (*module.named_parameters(), *module.named_buffers()) if value.is_meta]
    assert not unfilled, f"no values for {unfilled}"


def _real(tensor: Tensor, what: str) -> Tensor:
    if tensor.is_meta:
        raise PlanError(
            f"{what} has no values: the model was built on the meta device",
            fix="build buffers for real (parameters may stay on meta), or load weights with load_pretrained(dir)",
        )
    return tensor
