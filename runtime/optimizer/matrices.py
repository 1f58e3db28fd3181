"""Updates of whole matrices: each is gathered on its home rank (planner.sharding.homes), orthogonalised, and sent back.

    shard of the update   -- all-to-all, bfloat16 -->   matrices of this home   -- orthogonal -->   -- all-to-all -->

The gather of the next bucket runs beside the arithmetic of this one.

The orthogonal factor of a matrix, and the factor of its learning rate, are those of torch.optim.Muon: Newton-Schulz
iterations in bfloat16 (Jordan et al. 2024), which bring singular values between about 0.7 and 1.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, EPS, _adjust_lr, _zeropower_via_newtonschulz

from planner.mesh import Mesh
from planner.sharding.homes import MatrixHomes, Sent
from planner.spec.update_rules import NEWTON_SCHULZ_STEPS

# [a, b] → bfloat16 [a, b]; a matrix of bfloat16 is overwritten.
orthogonal = partial(
    _zeropower_via_newtonschulz,
    ns_coefficients=(DEFAULT_A, DEFAULT_B, DEFAULT_C),
    ns_steps=NEWTON_SCHULZ_STEPS,
    eps=EPS,
)


@dataclass(frozen=True)
class Member:
    """``mesh``, and the ranks of the group that shares a buffer's matrices, in its order: their places on the mesh."""

    mesh: Mesh
    places: tuple[Mapping[str, int], ...]
    index: int
    group: Any

    @classmethod
    def of(cls, mesh: Mesh, rank: int, axis: str, group: Any) -> Member:
        """The rank's place in the group over ``axis``."""
        if not axis:
            return cls(mesh, (mesh.place(rank),), 0, None)
        ranks = next(ranks for ranks in mesh.groups_over(axis) if rank in ranks)
        return cls(mesh, tuple(mesh.place(r) for r in ranks), ranks.index(rank), group)


class BucketExchange:
    """Owns no tensor: where this rank's parts of a bucket's matrices lie, and those of all ranks that it is home to."""

    def __init__(self, homes: MatrixHomes, bucket: int, member: Member) -> None:
        self._group, self._size = member.group, len(member.places)
        of_bucket, here = homes.buckets[bucket], member.index
        self._shapes = {i: homed.matrix.shape for i, homed in enumerate(of_bucket) if homed.home == here}
        self._all_shapes = [torch.Size(homed.matrix.shape) for homed in of_bucket]
        own = list(homes.sent(bucket, member.mesh, member.places[here]))
        to = [of_bucket[sent.index].home for sent in own]
        self._sent = [[s for s, home in zip(own, to, strict=True) if home == rank] for rank in range(self._size)]
        self._received = [list(homes.sent(bucket, member.mesh, place, (here,))) for place in member.places]

    def gather(self, update: Tensor) -> tuple[Tensor, Any]:
        """Start to bring the parts in ``update``, this rank's flat shard, to their homes."""
        parts = [_view(update, sent).reshape(-1) for of_rank in self._sent for sent in of_rank]
        packed = torch.cat(parts).bfloat16() if parts else update.new_empty(0, dtype=torch.bfloat16)
        return self._exchange(packed, self._sent, self._received)

    def orthogonalised(self, gathered: Tensor) -> Tensor:
        """Return the parts of all ranks, in the same order, of the matrices' orthogonal factors."""
        whole = {index: gathered.new_empty(shape) for index, shape in self._shapes.items()}
        for sent, part in self._parts(gathered, self._received):
            target = whole[sent.index][sent.place]
            target.copy_(part.view(target.shape))
        for index, matrix in whole.items():
            whole[index] = orthogonal(matrix)
        parts = [whole[sent.index][sent.place].reshape(-1) for of_rank in self._received for sent in of_rank]
        return torch.cat(parts) if parts else gathered

    def scatter(self, parts: Tensor) -> tuple[Tensor, Any]:
        """Start to send the parts back to their ranks."""
        return self._exchange(parts, self._received, self._sent)

    def put(self, scattered: Tensor, update: Tensor, adjust_lr: str) -> None:
        """Write the parts to their places in ``update``, times the factor of the learning rate."""
        for sent, part in self._parts(scattered, self._sent):
            target = _view(update, sent)
            target.copy_(part.view(target.shape)).mul_(_adjust_lr(1.0, adjust_lr, self._all_shapes[sent.index]))

    def _exchange(self, packed: Tensor, out: Sequence[Sequence[Sent]], back: Sequence[Sequence[Sent]]) -> Any:
        if self._size == 1:
            return packed, None
        sizes = [[sum(s.num_elements for s in of_rank) for of_rank in way] for way in (back, out)]
        came = packed.new_empty(sum(sizes[0]))
        return came, dist.all_to_all_single(came, packed, *sizes, group=self._group, async_op=True)

    def _parts(self, flat: Tensor, ordered: Sequence[Sequence[Sent]]) -> Iterator[tuple[Sent, Tensor]]:
        at = 0
        for sent in (sent for of_rank in ordered for sent in of_rank):
            stop = at + sent.num_elements
            yield sent, flat[at:stop]
            at = stop


def orthogonalise(pairs: Sequence[tuple[BucketExchange, Tensor]], adjust_lr: str) -> None:
    """Replace the matrices in the updates, flat shards of buckets, by their orthogonal factors, in place."""
    going = [exchange.gather(update) for exchange, update in pairs[:1]]
    back: tuple[BucketExchange, Tensor, Tensor, Any] | None = None
    for number, (exchange, update) in enumerate(pairs):
        going += [nxt.gather(shard) for nxt, shard in pairs[number + 1 : number + 2]]
        gathered, work = going.pop(0)
        _finish(work)
        parts, work = exchange.scatter(exchange.orthogonalised(gathered))
        _put(back, adjust_lr)
        back = exchange, parts, update, work
    _put(back, adjust_lr)


def _put(back: tuple[BucketExchange, Tensor, Tensor, Any] | None, adjust_lr: str) -> None:
    if back is not None:
        exchange, parts, update, work = back
        _finish(work)
        exchange.put(parts, update, adjust_lr)


def _finish(work: Any) -> None:
    if work is not None:
        work.wait()


def _view(flat: Tensor, sent: Sent) -> Tensor:
    return flat[sent.start : sent.stop].view(sent.shape)[sent.inner]
