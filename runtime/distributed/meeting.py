"""Rendezvous of ranks in the key-value store before any group exists: a mismatch is one error on all ranks, not a hang.

    each rank    writes its seat: host, device, GPU, values that must be equal     one key
    rank 0       reads all seats, writes the verdict                               one key
    each rank    reads the verdict: the same error, or backend and tied stages

Otherwise a node without a GPU would create a gloo group while others create an NCCL group, and all would wait forever.
"""

import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from torch.distributed import Store

from passes.errors import PlanError
from runtime.distributed.agreement import of_kind
from runtime.distributed.devices import ON_THE_CPU
from runtime.distributed.faults.board import SECRET, Board, Signer

StageSet = tuple[int, ...]
LOOK_SECONDS = 1.0  # most seconds between two reads of the board
HEARD = "meshwright/heard"  # key for the number of ranks that have read a failure
_has_warned = False
LATE = timedelta(seconds=10)  # other ranks wait longer by this: rank 0 reports missing ranks at the timeout


@dataclass(frozen=True, slots=True)
class Seat:
    """The facts of one rank for the rendezvous. ``gpu``: unique for each GPU. ``named``: whether the user named this
    device with its index.

    ``identity``: texts that must be equal on all ranks, by name. ``tied``: stages that share a parameter. ``error``:
    the reason that this rank cannot take part (problem, place, fix).
    """

    host: str = ""
    device: str = "cpu"
    gpu: str = ""
    named: bool = False
    identity: dict[str, str] = field(default_factory=dict)
    tied: tuple[StageSet, ...] = ()
    error: tuple[str, str, str] | None = None

    @property
    def device_type(self) -> str:
        return self.device.partition(":")[0]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The joint decision: ``backend`` of the groups for tensors of the device, and the union of tied stage sets; or the
    ``error`` of all ranks (problem, place, fix).
    """

    backend: str = ""
    tied: tuple[StageSet, ...] = ()
    error: tuple[str, str, str] | None = None


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The rendezvous of ``world_size`` ranks in ``store``. ``signer``: of seats and the verdict. ``board``: of failures
    of ranks that will not come.
    """

    store: Store
    rank: int
    world_size: int
    timeout: timedelta
    signer: Signer = field(default_factory=Signer)
    board: Board | None = None

    def meet(self, seat: Seat, pp: int = 1) -> Verdict:
        """Return the same verdict, or raise the same PlanError, on every rank."""
        store, signer = self.store, self.signer
        if self.rank == 0:
            verdict = self._lead(seat, pp)
            store.set("verdict", signer.signed("verdict", verdict))
            if verdict.error is not None:  # the store may end with this rank
                came(store, [f"heard/{r}" for r in range(1, self.world_size) if store.check([_key(r)])], LATE)
        else:
            key = _key(self.rank)
            store.set(key, signer.signed(key, seat))
            if not came(store, ["verdict"], self.timeout + LATE, self.board):
                raise self._absent([0])
            stored = store.get("verdict")
            store.set(f"heard/{self.rank}", "")
            verdict = of_kind(Verdict)(signer.checked("verdict", stored, "the decision of rank 0"))
        if verdict.error is not None:
            raise PlanError.of_words(verdict.error)
        return verdict

    def _lead(self, seat: Seat, pp: int) -> Verdict:
        keys = [_key(rank) for rank in range(1, self.world_size)]
        try:
            if not came(self.store, keys, self.timeout, self.board):
                raise self._absent([rank for rank, key in enumerate(keys, 1) if not self.store.check([key])])
            pairs = enumerate(zip(keys, self.store.multi_get(keys), strict=True), 1)
            others = (self.signer.checked(*pair, f"the seat of rank {rank}") for rank, pair in pairs)
            seats = [seat, *map(of_kind(Seat), others)]
            verdict = judge(seats, pp)
            _warn_without_a_secret(seats, self.signer)
        except PlanError as error:
            return Verdict(error=error.words)
        return verdict

    def _absent(self, ranks: list[int]) -> PlanError:
        what = f"{listed(ranks)} of {self.world_size} did not join within {self.timeout.total_seconds():g} s"
        return PlanError(what, fix="see the output of those ranks: they have ended, or run another program")


def judge(seats: Sequence[Seat], pp: int) -> Verdict:
    """Return the joint decision of the ranks. Raises PlanError, naming ranks, if their facts do not fit together."""
    _raise_first_error(seats)
    for name in dict.fromkeys(name for seat in seats for name in seat.identity):
        require_equal(name, {rank: seat.identity.get(name) for rank, seat in enumerate(seats)}, len(seats))
    types = Counter(seat.device_type for seat in seats)
    if len(types) > 1:
        raise _mixed(seats, types)
    tied = tuple(sorted({stages for seat in seats for stages in seat.tied}))
    shared = _on_one_gpu(seats)
    if shared:
        _check_sharing(seats, shared, pp)
    backend = "nccl" if types.keys() == {"cuda"} and not shared else "gloo"
    return Verdict(backend, tied)


# ---- in the store


def _key(rank: int) -> str:
    return f"seat/{rank}"


def _warn_without_a_secret(seats: Sequence[Seat], signer: Signer) -> None:
    """Warn, once in a process, if several hosts share a store without a secret."""
    global _has_warned
    num_hosts = len({seat.host for seat in seats})
    if num_hosts > 1 and not signer and not _has_warned:
        _has_warned = True
        print(
            f"warning: {num_hosts} hosts share a store without a secret: any process that reaches it can change "
            f"this run; give every host the same {SECRET}, and use a private network",
            file=sys.stderr,
            flush=True,
        )


def came(store: Store, keys: list[str], timeout: timedelta, board: Board | None = None) -> bool:
    """Return whether ``keys`` were set within ``timeout``. Raises the first failure on the board."""
    try:
        if board is None:
            store.wait(keys, timeout)
            return True
        begin = time.monotonic()
        while not store.check(keys):  # torch prints a warning for each wait that times out
            if (failure := board.first()) is not None:
                board.store.add(HEARD, 1)
                raise failure.plan_error
            if (waited := time.monotonic() - begin) > timeout.total_seconds():
                return False
            time.sleep(min(0.005 + waited / 8, LOOK_SECONDS))
    except RuntimeError:  # any store raises it when time is up or its host is gone
        return False
    return True


# ---- facts that do not fit together


def _raise_first_error(seats: Sequence[Seat]) -> None:
    """Raise the first error in the seats, naming all ranks with the same error."""
    errors = [seat.error for seat in seats]
    first = next((error for error in errors if error is not None), None)
    if first is not None:
        ranks = [rank for rank, error in enumerate(errors) if error == first]
        where = "" if len(ranks) == len(seats) else f"{listed(ranks)}: "
        raise PlanError(where + first[0], where=first[1], fix=first[2])


def require_equal(name: str, values: Mapping[int, str | None], world_size: int) -> None:
    """Raise PlanError if values differ, naming the ranks without the most common value.

    ``values``: by rank, of the ranks to compare.
    """
    shown = {rank: "nothing" if value is None else value for rank, value in values.items()}
    usual, _ = Counter(shown.values()).most_common(1)[0]
    odd = [rank for rank, value in shown.items() if value != usual]
    if odd:
        raise PlanError(
            f"{name} differs between ranks: {listed(odd)} of {world_size} (rank {odd[0]} has {shown[odd[0]]}, "
            f"most have {usual})",
            fix="start every rank with the same model, spec, data, options and versions",
        )


def _mixed(seats: Sequence[Seat], types: Counter[str]) -> PlanError:
    usual, _ = types.most_common(1)[0]
    odd = [rank for rank, seat in enumerate(seats) if seat.device_type != usual]
    first, other = seats[odd[0]], next(seat for seat in seats if seat.device_type == usual)
    return PlanError(
        f"{listed(odd)} of {len(seats)} would run on {first.device} (host {first.host}), the others on {other.device}",
        where="device",
        fix="check that every host shows its GPUs (nvidia-smi, CUDA_VISIBLE_DEVICES, torch with CUDA), or "
        f"{ON_THE_CPU}",
    )


def _on_one_gpu(seats: Sequence[Seat]) -> list[list[int]]:
    """Return the ranks on each GPU that several ranks use."""
    ranks = defaultdict(list)
    for rank, seat in enumerate(seats):
        if seat.gpu:
            ranks[seat.gpu].append(rank)
    return [members for members in ranks.values() if len(members) > 1]


def _check_sharing(seats: Sequence[Seat], shared: Sequence[Sequence[int]], pp: int) -> None:
    """Raise PlanError unless the user named the shared GPU on each of its ranks, and gloo can do all communication.

    NCCL refuses several ranks on one GPU, and gloo sends only host memory.
    """
    first = shared[0]
    what = f"{listed(first)} are on one GPU ({seats[first[0]].device} of host {seats[first[0]].host})"
    if not all(seats[rank].named for ranks in shared for rank in ranks):
        raise PlanError(
            f"{what}: there are more ranks than GPUs, or all ranks see the same GPU",
            where="device",
            fix="launch one rank per GPU, or show each rank its own (CUDA_VISIBLE_DEVICES); to share one on "
            f'purpose, name it on every rank: Engine(plan, device="{seats[first[0]].device}"); or {ON_THE_CPU}',
        )
    if pp > 1:
        what = f"{what} and communicate over gloo, which cannot send activations between pipeline stages from a GPU"
        raise PlanError(what, where="mesh", fix="use pp 1, or one GPU per rank")


def listed(ranks: Sequence[int], most: int = 8) -> str:
    """Return ranks as text for a message."""
    names = ", ".join(map(str, ranks[:most])) + (", …" if len(ranks) > most else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {names}"
