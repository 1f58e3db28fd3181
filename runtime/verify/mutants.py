"""Programs with one collective removed, which a comparison with one process must detect.

Collectives are numbered over all stages, in the order of each stage's graph. Removing one changes no shape: sums stay
partial, and shards of other ranks are replaced by this rank's own.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from passes.base import RankProgram, StageModule
from passes.errors import PlanError
from passes.ops import collectives, context, meeting, slots
from passes.ops.attention import causal_attention
from passes.ops.axis import AxisHandle
from passes.ops.documents import Masked
from passes.ops.gathered_attention import gathered_attention
from passes.ops.linear import column_linears, gathered_linears
from passes.ops.meeting import Meeting
from passes.ops.recompute import BlockCall
from passes.ops.slots import placed, share_of
from passes.ops.vocabulary import vocabulary_cross_entropy
from passes.types.types import Placement
from planner.frozen_plan import Plan
from planner.lower import lower


def without_collective(plan: Plan, rank: int, number: int) -> RankProgram:
    """Return this rank's program without collective ``number``. Raises PlanError if there are fewer."""
    mine, total = None, 0
    for stage, program in _all_stages(plan, rank):
        nodes = exchanges(stage)
        if total <= number < total + len(nodes):
            module, node = nodes[number - total]
            node.target = STAND_INS[node.target]
            module.recompile()
        total += len(nodes)
        mine = program if plan.mesh.pp_rank_of(program.stages[0].index) == plan.mesh.coordinate(rank)["pp"] else mine
    if number >= total:
        fix = f"choose 0 to {total - 1}" if total else "use tp, cp or ep > 1"
        raise PlanError(f"there is no collective {number} to remove", where="remove_collective", fix=fix)
    assert mine is not None
    return mine


def num_collectives(plan: Plan) -> int:
    """Return the number of collectives in the lowered graphs of all stages."""
    return sum(len(exchanges(stage)) for stage, _ in _all_stages(plan, 0))


def exchanges(stage: StageModule) -> list[tuple[fx.GraphModule, fx.Node]]:
    """Return the nodes of a stage that communicate over tp, cp, ep or etp, each with its graph.

    Nodes in recomputed blocks come last, without those that communicate only in a backward.
    """
    reruns = [getattr(stage.module, str(n.target)) for n in stage.module.graph.nodes if n.op == "get_attr"]
    nodes = [(stage.module, node) for node in stage.module.graph.nodes if node.target in STAND_INS]
    for call in reruns:
        if isinstance(call, BlockCall):
            inner = (n for n in call.module.graph.nodes if n.target in STAND_INS and n.target not in _OF_BACKWARD)
            nodes += [(call.module, node) for node in inner]
    return nodes


def _all_stages(plan: Plan, rank: int) -> Iterator[tuple[StageModule, RankProgram]]:
    """Yield every stage in order, lowered for the rank of its pp rank with the other coordinates of ``rank``."""
    mesh = plan.mesh
    place = mesh.coordinate(rank)
    programs = [lower(plan, mesh.rank_of(**{**place, "pp": pp})) for pp in range(mesh.pp)]
    for index in range(mesh.pp * mesh.vpp):
        program = programs[mesh.pp_rank_of(index)]
        yield program.stages[mesh.chunk_of(index)], program


def _through(x: Tensor, axis: AxisHandle, owned: bool = False) -> Tensor:
    return x.view_as(x)


def _repeated(x: Tensor, axis: AxisHandle, cut: Placement) -> Tensor:
    pieces = x.split([stop - start for start, stop in cut.slices(axis.size, 0)], cut.dim)
    times = [axis.size if segment.sharded else 1 for segment in cut.segments]
    whole = torch.cat([piece for piece, n in zip(pieces, times, strict=True) for _ in range(n)], cut.dim)
    return whole.narrow(cut.dim, 0, sum(cut.sizes))


def _own_part(x: Tensor, axis: AxisHandle, cut: Placement) -> Tensor:
    return collectives.part(x, cut, axis.size, axis.rank)


def _unshared_loss(logits: Tensor, target: Tensor, axis: AxisHandle, *args: Any, **kwargs: Any) -> Tensor:
    alone = AxisHandle(axis.name, 1, 0)
    return vocabulary_cross_entropy(
        logits, target.remainder(logits.shape[1]), alone, logits.shape[1], *args[1:], **kwargs
    )


def _own_tokens(x: Tensor, dim: int, axis: AxisHandle) -> Tensor:
    """Return this rank's tokens instead of those of all ranks."""
    return torch.cat([x] * axis.size, dim)


def _own_keys(q: Tensor, k: Tensor, v: Tensor, mask: Any, axis: AxisHandle, *_: Any, **options: Any) -> Tensor:
    if options.pop("is_causal", False):
        return causal_attention(q, _own_tokens(k, 2, axis), _own_tokens(v, 2, axis), axis, **options)
    k, v = (_own_tokens(t, 2, axis) for t in (k, v))
    for name in ("kernel", "documents"):
        options.pop(name, None)
    whole = Masked(mask, options.pop("rows", None), options.pop("inputs", ())).whole if mask is not None else None
    return F.scaled_dot_product_attention(q, k, v, whole, **options)


def _unsummed_gradient(x: Tensor, axis: AxisHandle, *args: Any) -> Any:
    return column_linears(x, AxisHandle(axis.name, 1, 0), *args)


def _ungathered(x: Tensor, axis: AxisHandle, cut: Placement, again: bool, *args: Any) -> Any:
    return column_linears(_repeated(x, axis, cut), AxisHandle(axis.name, 1, 0), *args)


def _own_rows(rows: Tensor, here: Meeting) -> Tensor:
    """Return as many rows as this rank should receive, from those that it should send."""
    return _as_many(rows[slice(*here.share)], int(here.counts.sum()))


def _given_by_none(rows: Tensor, here: Meeting) -> Tensor:
    start, stop = here.share
    own = _as_many(rows, stop - start)
    before, after = (own.new_zeros(n, *own.shape[1:]) for n in (start, here.num_rows - stop))
    return torch.cat([before, own, after])


def _own_tokens_as_rows(tokens: Tensor, here: Meeting) -> Tensor:
    """Return as many rows as this rank should receive, from its own tokens."""
    return tokens[torch.arange(int(here.counts.sum()), device=tokens.device) % len(tokens)]


def _summed_by_none(rows: Tensor, here: Meeting, dtype: torch.dtype) -> Tensor:
    assert here.tokens is not None
    return _as_many(rows.to(dtype), here.tokens.num_tokens)


def _own_slots(
    x: Tensor, experts: int, slots: int, counts: Any, tp: AxisHandle, ep: AxisHandle, etp: AxisHandle, *_: Any
) -> Tensor:
    """Return the slots of this rank for its own experts, repeated in place of the slots of other ranks."""
    own = share_of(x, slots, tp).narrow(experts, 0, x.shape[experts] // ep.size)
    return torch.cat([own] * ep.size * etp.size, slots)


def _returned_by_none(
    x: Tensor, experts: int, slots: int, tp: AxisHandle, ep: AxisHandle, etp: AxisHandle, size: int
) -> Tensor:
    own = x.narrow(slots, 0, x.shape[slots] // ep.size // etp.size)
    return placed(torch.cat([own] * ep.size, experts), slots, tp, size)


def _as_many(rows: Tensor, num_rows: int) -> Tensor:
    return torch.cat([rows, rows.new_zeros(max(0, num_rows - len(rows)), *rows.shape[1:])])[:num_rows]


STAND_INS: dict[Any, Callable[..., Any]] = {
    collectives.f: _through,
    collectives.g: _through,
    collectives.g_f: _through,
    collectives.slice_part: _own_part,
    collectives.gather: _repeated,
    collectives.collect: _repeated,
    collectives.scatter: _own_part,
    vocabulary_cross_entropy: _unshared_loss,
    column_linears: _unsummed_gradient,
    gathered_linears: _ungathered,
    meeting.dispatch: _own_rows,
    meeting.give_back: _given_by_none,
    meeting.dispatch_tokens: _own_tokens_as_rows,
    meeting.combine: _summed_by_none,
    context.gather_sequence: _own_tokens,
    gathered_attention: _own_keys,
    slots.send_slots: _own_slots,
    slots.return_slots: _returned_by_none,
}
_OF_BACKWARD = {collectives.f, collectives.slice_part, column_linears}  # exchange nothing in a forward
