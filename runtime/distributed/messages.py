"""Values that ranks share at each update, in the all-reduce of the norm: no additional collective.

    [flags: stop, orders;  digest of the batch of rank 0, 1, …;  usual seconds of work of rank 0, 1, …;
     seconds of work in the last run of rank 0, 1, …;  seconds of that run …;  bytes of memory …]

    Each rank fills its own elements; the others are zeros.

Digests must be equal on all ranks for a global batch, and on the ranks of one dp coordinate for local rows. If they
differ, no rank updates anything. All values are integers in float64.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from passes.errors import PlanError
from planner.mesh import Mesh
from planner.sharding.shards import NOTES_OF_A_RANK
from runtime.distributed.stopping import ORDERS

_DIGEST_BYTES = 6  # fits into an integer in float64
_MOST_FLOATS = 1 << 14  # evenly spaced elements of each floating tensor of a batch


@dataclass(frozen=True, slots=True)
class Told:
    """The values of all ranks; tuples have one figure per rank, 0 if unknown. ``has_orders``: rank 0 has orders.

    ``usual_seconds``: of a usual run over the actions, without waits for other stages. ``working_seconds``,
    ``pipeline_seconds``: of the last run, without and with those waits; only for pipelines of several ranks.
    ``memory_bytes``: the peak so far.
    """

    stop_requested: bool = False
    has_orders: bool = False
    usual_seconds: tuple[float, ...] = ()
    working_seconds: tuple[float, ...] = ()
    pipeline_seconds: tuple[float, ...] = ()
    memory_bytes: tuple[float, ...] = ()

    @classmethod
    def of(cls, notes: Sequence[float]) -> Self:
        """Return the values in ``notes``, the sums of all addends; defaults if it is empty."""
        size = len(notes) // NOTES_OF_A_RANK
        if not size:
            return cls()
        _, *lists = [tuple(notes[1 + i * size : 1 + (i + 1) * size]) for i in range(NOTES_OF_A_RANK)]
        return cls(int(notes[0]) % ORDERS > 0, int(notes[0]) >= ORDERS, *lists)


def digest_of(batch: Mapping[str, Tensor]) -> int:
    """Return a digest of all integers in host memory; if a batch has none, of some thousand floats of each tensor.

    Floats beside integers are ignored, as in the check of the first batch: their last bits may differ between hosts.
    Tensors on a device are not read.
    """
    on_host = {n: v for n, v in batch.items() if v.device.type == "cpu" and not isinstance(v, FakeTensor)}
    here = {name: value.detach() for name, value in on_host.items()}
    integers = {n: v for n, v in here.items() if not (v.is_floating_point() or v.is_complex())}
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    floats = {n: v.reshape(-1)[:: max(1, v.numel() // _MOST_FLOATS)] for n, v in here.items() if not integers}
    for _, value in sorted((integers or floats).items()):
        with suppress(RuntimeError):  # a placeholder tensor has no content
            content: Any = value.contiguous().view(-1).view(torch.uint8).numpy()
            digest.update(content)
    return 1 + int.from_bytes(digest.digest(), "little")


class Notes:
    """The values of one rank. ``is_local``: whether the last batch is. ``places``: (pp, dp) of each rank.
    ``pipelines``: the first rank in the pipeline of each rank.
    """

    def __init__(self, mesh: Mesh, rank: int, device: torch.device) -> None:
        self.rank, self.device, self.size = rank, device, mesh.world_size
        self.digest, self.is_local = 0, False
        coordinates = [mesh.coordinate(r) for r in range(self.size)]
        self.pipelines = [mesh.rank_of(**{**at, "pp": 0}) for at in coordinates]
        self.places = [(at["pp"], at["dp"]) for at in coordinates]
        self._of_dp: dict[int, list[int]] = {}
        for r, at in enumerate(coordinates):
            self._of_dp.setdefault(at["dp"], []).append(r)
        self._first_of_dp = torch.tensor([self._of_dp[dp][0] for _, dp in self.places], device=device)

    def take(self, batch: Mapping[str, Tensor], *, is_local: bool) -> None:
        """Note the batch of the next update."""
        self.is_local = is_local
        if self.size > 1:
            self.digest = digest_of(batch)

    def here(self, asks: int, own: Sequence[float] = ()) -> Tensor:
        """Return this rank's addend, on the device; the host does not wait for it.

        ``asks``: the flags of this process. ``own``: its figures, in the order of the tuples of ``Told``.
        """
        notes = torch.zeros(1 + NOTES_OF_A_RANK * self.size, dtype=torch.float64, device=self.device)
        if asks:
            notes[0].fill_(float(asks))
        for place, figure in enumerate((float(-self.digest if self.is_local else self.digest), *own)):
            if figure:
                notes[1 + place * self.size + self.rank].fill_(figure)
        return notes

    def differ(self, sums: Tensor) -> Tensor:
        """Return whether batches differ, as a tensor on the device. ``sums``: ends with the sums of all addends."""
        digests = self._digests(sums)
        are_local = digests < 0
        like = digests[self._first_of_dp] if self.is_local else digests[:1]
        return (digests != like).any() | (are_local != are_local[:1]).any()

    def check(self, sums: Sequence[float], step: int) -> None:
        """Raise PlanError, the same on every rank, if batches differ."""
        digests = list(self._digests(sums))
        kinds = {digest < 0 for digest in digests}
        if len(kinds) > 1:
            raise _differ(step, "some ranks passed local=True, others did not")
        for members in map(self._of_dp.__getitem__, sorted(self._of_dp)) if kinds == {True} else [range(self.size)]:
            usual, _ = Counter(digests[r] for r in members).most_common(1)[0]
            odd = [r for r in members if digests[r] != usual]
            if odd:
                others = next(r for r in members if digests[r] == usual)
                names = f"rank{'s' if len(odd) > 1 else ''} {', '.join(map(str, odd))}"
                raise _differ(step, f"{names} had another batch than rank {others}")

    def _digests(self, sums: Any) -> Any:
        first = len(sums) - NOTES_OF_A_RANK * self.size
        return sums[first : first + self.size]


def _differ(step: int, how: str) -> PlanError:
    fix = "give every rank the same global batch, or each dp rank its own rows with train_step(batch, local=True)"
    return PlanError(f"the batch of step {step} is not the same on all ranks: {how}", where="batch", fix=fix)
