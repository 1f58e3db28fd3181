"""All ranks start with the same weights: those of rank 0, if a model was built without a seed.

    fingerprint of every tensor     rank 0's to all, then the lowest rank that differs: two small exchanges
    broadcast                       sends only the tensors that differ, one full tensor at a time; ranks keep shards
    require_equal                   raises one error on all ranks

Parameters on meta are equal on all ranks: their values come from the seed of the spec.

A fingerprint is a number that is equal for equal bits, and practically never equal for others:

    words of 8 bytes as rows of 1024:   Σ_i (2i + 1)·Σ_j w_ij   +   K·Σ_j (2j + 1)·Σ_i w_ij        modulo 2^64

Integer sums do not depend on the device or the order. It allocates no copy of the tensor.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from passes.base import RankProgram, StageModule
from passes.errors import PlanError
from passes.parameters import LocalParameter
from planner.frozen_plan import Plan
from planner.sharding.boxes import part_of
from runtime.distributed.groups import Groups
from runtime.weights.shards import shard
from runtime.weights.sources import ModelWeights

Fresh = list[tuple[StageModule, LocalParameter]]
_WIDTH, _WORD = 1024, 8
_MIX = -7046029254386353131  # 0x9E3779B97F4A7C15, odd: columns do not cancel rows


@dataclass(frozen=True, slots=True)
class InitialTensor:
    """A tensor of the model before the first step. ``kind``: parameter, buffer or constant."""

    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def held_tensors(plan: Plan) -> list[InitialTensor]:
    """Return the plan's parameters, and the buffers and constants of the captured graph: the same on every rank."""
    rows = [InitialTensor("parameter", p.name, tuple(p.shape), getattr(torch, p.dtype)) for p in plan.parameters]
    program = plan.to_run()[0].program
    buffers = {fqn: program.node(node).meta["val"] for node, fqn in sorted(program.buffers.items())}
    rows += [InitialTensor("buffer", fqn, tuple(value.shape), value.dtype) for fqn, value in buffers.items()]
    constants = sorted(program.constants.items())
    return rows + [InitialTensor("constant", name, tuple(value.shape), value.dtype) for name, value in constants]


def differing(
    plan: Plan, groups: Groups, mode: str, kinds: Collection[str] = ("parameter", "buffer", "constant")
) -> list[InitialTensor]:
    """Return the tensors of these ``kinds`` that differ between a rank and rank 0. All ranks must call it.

    Raises PlanError on every rank if ``mode`` is require_equal and a tensor differs.
    """
    if groups.world is None:
        return []
    held, world_size = [h for h in held_tensors(plan) if h.kind in kinds], groups.mesh.world_size
    if not held:
        return []
    own = torch.tensor(list(_fingerprints(plan, held)), dtype=torch.int64, device=groups.device)
    first = own.clone()
    dist.broadcast(first, 0, group=groups.world)
    odd = torch.where(own == first, world_size, groups.rank)
    dist.all_reduce(odd, dist.ReduceOp.MIN, group=groups.world)
    unequal = [(tensor, rank) for tensor, rank in zip(held, odd.tolist(), strict=True) if rank < world_size]
    if unequal and mode == "require_equal":
        (tensor, rank), others = unequal[0], len(unequal) - 1
        more = f" (and {others} more)" if others else ""
        raise PlanError(
            f"rank {rank} starts with other weights than rank 0: {tensor.kind} {tensor.name}{more}",
            where="initial_weights",
            fix="call torch.manual_seed with the same number on every rank before building the model, or set "
            "initial_weights: broadcast",
        )
    return [tensor for tensor, _ in unequal]


def take_constants(plan: Plan, groups: Groups, differ: list[InitialTensor]) -> None:
    """Copy rank 0's constants into the captured graph, before passes shard and fold them."""
    for held in differ:
        if held.kind == "constant":
            constants = plan.to_run()[0].program.constants
            constants[held.name] = _from_rank_0(held, constants[held.name], groups).to(constants[held.name].device)


@torch.no_grad()
def take_weights(
    plan: Plan,
    program: RankProgram,
    source: ModelWeights,
    groups: Groups,
    differ: list[InitialTensor],
    opened: Callable[[str], None],
) -> None:
    """Copy rank 0's parameters and buffers into the stage modules, one at a time. ``opened(name)``: called before the
    weights of a parameter are replaced."""
    for held in differ:
        if held.kind == "parameter":
            full = source.parameter(held.name, held.shape, held.dtype) if groups.rank == 0 else None
            full = _from_rank_0(held, full, groups)
            places = ((stage, p) for stage in program.stages for p in stage.parameters if p.fqn == held.name)
            for stage, parameter in places:
                local = shard(full, part_of(parameter, groups.mesh, groups.place))
                opened(held.name)
                stage.parameter(held.name).data.copy_(local)
        elif held.kind == "buffer":
            full = _from_rank_0(held, source.buffer(held.name) if groups.rank == 0 else None, groups)
            for target in buffers_of(plan, program, held.name):
                target.copy_(full)


def _fingerprints(plan: Plan, held: list[InitialTensor]) -> Iterator[int]:
    decisions, model = plan.to_run()[0], plan.model
    assert model is not None, "the model was released before its weights were compared"
    values = {
        "parameter": dict(model.named_parameters(remove_duplicate=False)),
        "buffer": dict(model.named_buffers(remove_duplicate=False)),
        "constant": decisions.program.constants,
    }
    return (fingerprint(values[tensor.kind][tensor.name]) for tensor in held)


def _from_rank_0(held: InitialTensor, value: Tensor | None, groups: Groups) -> Tensor:
    """Return the full tensor on this rank's device. It is sent as bytes, because no backend sends every dtype."""
    if groups.rank == 0 and value is not None:
        full = value.detach().to(device=groups.device, dtype=held.dtype, copy=True).contiguous()
        mismatch = tuple(full.shape) != held.shape
        assert not mismatch, f"{held.name}: {list(full.shape)} is not {list(held.shape)}"
    else:
        full = torch.empty(held.shape, dtype=held.dtype, device=groups.device)
    dist.broadcast(full.view(-1).view(torch.uint8), 0, group=groups.world)
    return full


def buffers_of(plan: Plan, program: RankProgram, fqn: str) -> Iterator[Tensor]:
    """Yield this rank's copies of a buffer of the model: in its stages, and in the graph of loss denominators."""
    for stage in program.stages:
        if fqn in stage.buffers:
            yield stage.module.get_buffer(stage.attributes[fqn])
    if program.count_module is not None:
        counted = dict(program.count_module.named_buffers())
        names = [node for node, name in plan.to_run()[0].program.buffers.items() if name == fqn and node in counted]
        yield from (counted[node] for node in names)


@torch.no_grad()
def fingerprint(tensor: Tensor) -> int:
    """Return the fingerprint of a tensor; 0 for one without values (meta, fake, empty)."""
    if tensor.is_meta or isinstance(tensor, FakeTensor) or not tensor.numel():
        return 0
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    data = tensor.detach().resolve_conj().contiguous().view(-1).view(torch.uint8)
    size = data.numel() // _WORD * _WORD
    rest = data[size:].to(torch.int64)
    if data.storage_offset() % _WORD:
        data = data.clone()
    words = data[:size].view(torch.int64)
    body = words[: words.numel() // _WIDTH * _WIDTH].view(-1, _WIDTH)
    parts = (body.sum(1), body.sum(0) * _MIX, words[body.numel() :] * 3, rest * 5)
    weighted = ((part * (2 * torch.arange(part.numel(), device=part.device) + 1)).sum() for part in parts)
    return sum(map(int, weighted)) % (1 << 64) - (1 << 63)


def fingerprint_of_model(model: nn.Module) -> dict[str, int]:
    """Return dotted name → fingerprint of every parameter and buffer."""
    named: Iterable[tuple[str, Tensor]] = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    return {name: fingerprint(tensor) for name, tensor in named}
