"""Collectives over memory that ranks of one host share: values, bits, order, and what is told where a rank is gone.

The ranks of most tests are threads with neighbours of their own; those of the last ones are processes with groups.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from planner.mesh import Mesh
from runtime.distributed.faults.failure import is_of_a_peer, is_of_time
from runtime.distributed.launch import launch
from runtime.distributed.meeting import Seat, judge
from runtime.distributed.opening import open_groups
from runtime.distributed.shared_memory import collectives, rounds
from runtime.distributed.shared_memory.group import BACKEND
from runtime.distributed.shared_memory.neighbours import OFF, Neighbours, shared_host
from runtime.distributed.shared_memory.rounds import (
    AHEAD,
    NUM_BYTES,
    NUM_SLOTS,
    SLOT_BYTES,
    Exchange,
    Round,
    Rounds,
    Slot,
)

SECONDS = timedelta(seconds=20)
SLOT = SLOT_BYTES // 4  # elements of float32
FLOATS = torch.empty(0)
KINDS = ("all_reduce", "reduce_scatter", "all_gather")


class Rank:
    """One member of a group, as the process group has it."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.neighbours = Neighbours(store, rank, size, NUM_BYTES, SECONDS)
        self.rounds = Rounds(self.neighbours, lambda place: f"rank {place}")

    def begin(self, kind: str, given: Tensor, reduce: Any = torch.add) -> tuple[Exchange, Tensor]:
        """The exchange, and where its result will be."""
        if kind == "all_reduce":
            out = given.clone()
            made = collectives.all_reduce(out, reduce, self.rank, self.size)
        elif kind == "reduce_scatter":
            out = given.new_empty(given.numel() // self.size)
            made = collectives.reduce_scatter(out, given, reduce, self.rank, self.size)
        else:
            out = given.new_empty(given.numel() * self.size)
            made = collectives.all_gather(out, given, self.size)
        exchange = Exchange(f"{kind} of {given.numel()}", made)
        self.rounds.begin(exchange)
        return exchange, out


def together(size: int, work: Callable[[Rank], Any]) -> list[Any]:
    """What ``work`` gives on each rank of a group of threads; an error is given in its place."""
    store = dist.HashStore()

    def run(rank: int) -> Any:
        own = Rank(store, rank, size)
        try:
            return work(own)
        except RuntimeError as error:
            return error
        finally:
            own.neighbours.close()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def given_to(rank: int, numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return (torch.randn(numel, generator=generator) * 100).to(dtype)


def expected(kind: str, inputs: list[Tensor], rank: int, reduce: Any = torch.add) -> Tensor:
    """In the order of ranks."""
    if kind == "all_gather":
        return torch.cat(inputs)
    total = inputs[0].clone()
    for other in inputs[1:]:
        total = reduce(total, other)
    return total if kind == "all_reduce" else total.chunk(len(inputs))[rank]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("numel", [0, 12, 3 * 2**13, SLOT, SLOT + 1, 3 * SLOT + 12], ids=str)
def test_every_rank_has_the_bits_of_the_sum_in_the_order_of_ranks(size: int, numel: int):
    sizes = {kind: numel // size * size if kind == "reduce_scatter" else numel for kind in KINDS}

    def work(own: Rank) -> list[Tensor]:
        found = []
        for kind in KINDS:
            exchange, out = own.begin(kind, given_to(own.rank, sizes[kind]))
            own.rounds.finish(exchange)
            found.append(out)
        return found

    for rank, found in enumerate(together(size, work)):
        for kind, out in zip(KINDS, found, strict=True):
            inputs = [given_to(other, sizes[kind]) for other in range(size)]
            assert torch.equal(out, expected(kind, inputs, rank)), (rank, kind)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int64], ids=str)
@pytest.mark.parametrize("op", [dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN], ids=str)
def test_reductions_of_other_dtypes(dtype: torch.dtype, op: Any):
    reduce, numel = collectives.reduction(op), 3 * 2**13

    def work(own: Rank) -> Tensor:
        exchange, out = own.begin("all_reduce", given_to(own.rank, numel, dtype), reduce)
        own.rounds.finish(exchange)
        return out

    inputs = [given_to(rank, numel, dtype) for rank in range(3)]
    assert all(torch.equal(out, expected("all_reduce", inputs, 0, reduce)) for out in together(3, work))


def test_an_operation_that_is_not_known_here_is_left_to_gloo():
    assert collectives.reduction(dist.ReduceOp.PRODUCT) is None


@pytest.mark.parametrize("seed", range(6))
def test_many_that_are_under_way_at_once_and_waited_for_in_any_order(seed: int):
    """Ranks come late at random, so that one is often as far ahead of another as it may."""
    draw = random.Random(seed)
    size = draw.choice([2, 3])
    calls = [(draw.choice(KINDS), draw.choice([6, 600, SLOT - 2, SLOT * 3 // 2]) // 6 * 6) for _ in range(30)]

    def work(own: Rank) -> list[Tensor]:
        late, same = random.Random(100 * seed + own.rank), random.Random(seed)
        begun: list[tuple[Exchange, Tensor]] = []
        for number, (kind, numel) in enumerate(calls):
            if late.random() < 0.3:
                time.sleep(late.random() * 0.01)
            begun.append(own.begin(kind, given_to(own.rank, numel, seed=number)))
            if same.random() < 0.5:
                own.rounds.finish(same.choice(begun)[0])
        for exchange, _ in reversed(begun):
            own.rounds.finish(exchange)
        return [out for _, out in begun]

    for rank, found in enumerate(together(size, work)):
        for number, ((kind, numel), out) in enumerate(zip(calls, found, strict=True)):
            inputs = [given_to(other, numel, seed=number) for other in range(size)]
            assert torch.equal(out, expected(kind, inputs, rank)), (rank, number, kind)


def test_what_fits_is_put_when_it_begins_and_a_rank_goes_no_further_ahead():
    """The other rank begins nothing until this one has begun all it has: beginning waits for nobody."""
    gate = threading.Event()
    num_rounds = 3 * AHEAD

    def work(own: Rank) -> tuple[int, Tensor]:
        if own.rank == 1:
            assert gate.wait(20)
        exchange, out = own.begin("all_reduce", given_to(own.rank, num_rounds * SLOT))
        put = len(exchange.put)
        gate.set()
        own.rounds.finish(exchange)
        return put, out

    inputs = [given_to(rank, num_rounds * SLOT) for rank in range(2)]
    for put, out in together(2, work):
        assert put == AHEAD
        assert torch.equal(out, inputs[0] + inputs[1])


@pytest.mark.parametrize("num_slots", [NUM_SLOTS, AHEAD], ids=["as many as there are", "too few"])
def test_a_slot_is_free_when_it_is_written_again(num_slots: int, monkeypatch: pytest.MonkeyPatch):
    """Rank 1 reads a round only when rank 0 has put the one that is as far ahead as it goes; with fewer slots than
    there are, that one would stand where the first did."""
    monkeypatch.setattr(rounds, "NUM_SLOTS", num_slots)
    ahead = threading.Event()

    def work(own: Rank) -> list[int]:
        read: list[int] = []

        def put(number: int, slot: Slot) -> None:
            slot.first(1, FLOATS)[0] = number
            if own.rank == 0 and number == AHEAD:
                ahead.set()

        def take(slots: Sequence[Slot]) -> None:
            if own.rank == 1:
                assert ahead.wait(20)
            read.append(int(slots[0].first(1, FLOATS)))

        own_rounds = (Round(partial(put, number), take) for number in range(3 * NUM_SLOTS))
        exchange = Exchange("numbers", own_rounds)
        own.rounds.begin(exchange)
        own.rounds.finish(exchange)
        return read

    _, read = together(2, work)
    assert (read == list(range(3 * NUM_SLOTS))) is (num_slots == NUM_SLOTS)


def test_the_own_part_may_lie_in_the_whole():
    def work(own: Rank) -> tuple[Tensor, Tensor]:
        whole = given_to(own.rank, 3 * 1000)
        part = whole.view(3, -1)[own.rank]
        scatter = Exchange("in place", collectives.reduce_scatter(part, whole, torch.add, own.rank, 3))
        own.rounds.begin(scatter)
        own.rounds.finish(scatter)
        scattered = part.clone()
        gather = Exchange("in place", collectives.all_gather(whole, part, 3))
        own.rounds.begin(gather)
        own.rounds.finish(gather)
        return scattered, whole

    inputs = [given_to(rank, 3 * 1000) for rank in range(3)]
    for rank, (scattered, whole) in enumerate(together(3, work)):
        assert torch.equal(scattered, expected("reduce_scatter", inputs, rank))
        assert torch.equal(whole, expected("all_reduce", inputs, rank))


# ---- what goes wrong


def test_ranks_that_come_to_different_collectives_hear_of_it():
    def work(own: Rank) -> None:
        exchange, _ = own.begin("all_reduce", given_to(own.rank, 12 + own.rank))
        own.rounds.finish(exchange)

    first, second = together(2, work)
    assert str(first) == "rank 1 came to another collective than this rank's all_reduce of 12"
    assert str(second) == "rank 0 came to another collective than this rank's all_reduce of 13"


def test_a_rank_that_ended_is_named_as_a_peer_that_is_gone():
    def work(own: Rank) -> None:
        if own.rank == 0:
            exchange, _ = own.begin("all_gather", given_to(0, 12))
            own.rounds.finish(exchange)

    error, _ = together(2, work)
    assert str(error) == "connection closed by peer: rank 1 ended before all_gather of 12"
    assert is_of_a_peer(error)
    assert not is_of_time(error)


def test_a_rank_that_does_not_come_ends_the_wait_in_time():
    late = threading.Event()

    def work(own: Rank) -> None:
        if own.rank == 1:
            late.wait(20)
            return
        own.neighbours.sockets[1].settimeout(0.1)  # the ranks have met by now, however long that took
        exchange, _ = own.begin("all_reduce", given_to(0, 12))
        try:
            own.rounds.finish(exchange)
        finally:
            late.set()

    error, _ = together(2, work)
    assert str(error) == "timed out in all_reduce of 12: rank 1 did not come"
    assert is_of_time(error)


# ---- who shares memory


def test_ranks_share_memory_where_they_are_on_one_host_and_on_the_cpu():
    seats = [Seat("a", memory="one"), Seat("b", memory="two"), Seat("a", memory="one"), Seat("c")]
    assert judge(seats, 1).memories == (0, 1, 0, -1)
    gpus = [Seat("a", f"cuda:{number}", f"gpu {number}", memory="one") for number in range(2)]
    assert judge(gpus, 1).memories == ()


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch):
    assert shared_host() == shared_host() != ""
    monkeypatch.setenv(OFF, "0")
    assert shared_host() == ""


def _sums(shares: bool) -> dict[str, Any]:
    if not shares and os.environ["RANK"] == "1":
        os.environ[OFF] = "0"  # one that cannot is enough
    groups = open_groups(Mesh(tp=2, pp=2), {}, [], timeout_seconds=60)
    own = given_to(groups.rank, 2 * SLOT)
    work = dist.all_reduce(own, group=groups.tp, async_op=True)
    total = torch.tensor([1.0 * groups.rank])
    dist.all_reduce(total, op=dist.ReduceOp.PRODUCT, group=groups.tp)  # gloo's, on the same group
    work.wait()
    parts = [torch.empty(1) for _ in range(2)]
    dist.all_gather(parts, total, group=groups.tp)
    found = {"tp": dist.get_backend(groups.tp), "pp": dist.get_backend(groups.pp), "sum": own, "gathered": parts}
    groups.close()
    return found


@pytest.mark.parametrize("shares", [True, False])
def test_the_groups_of_a_mesh_share_memory_where_all_their_ranks_can(shares: bool):
    found = launch(_sums, 4, shares, timeout_seconds=100)
    assert [r["tp"] for r in found] == ([BACKEND] * 4 if shares else ["gloo", "gloo", BACKEND, BACKEND])
    assert [r["pp"] for r in found] == ["gloo"] * 4
    for rank, r in enumerate(found):
        first = rank // 2 * 2
        assert torch.equal(r["sum"], given_to(first, 2 * SLOT) + given_to(first + 1, 2 * SLOT))
        assert torch.cat(r["gathered"]).tolist() == [first * (first + 1.0)] * 2


def _left_to_gloo() -> float:
    groups = open_groups(Mesh(tp=2), {}, [], timeout_seconds=30)
    total = 0.0
    for number in range(600):
        rows, came = torch.full((2, 64), float(number)), torch.empty(2, 64)
        dist.all_to_all_single(came, rows, [1, 1], [1, 1], group=groups.tp)
        dist.all_reduce(came, group=groups.tp)
        total += float(came.mean())
    groups.close()
    return total


def test_what_is_left_to_gloo_waits_without_the_interpreters_lock():
    """Else a thread of gloo that lets go of a tensor and the next exchange wait for each other, sooner or later."""
    assert launch(_left_to_gloo, 2, timeout_seconds=60) == [599.0 * 600] * 2


def _dies() -> None:
    groups = open_groups(Mesh(tp=2), {}, [], timeout_seconds=60)
    dist.all_reduce(torch.ones(4), group=groups.tp)
    if groups.rank == 1:
        os._exit(3)
    dist.all_reduce(torch.ones(4), group=groups.tp)


def test_a_process_that_is_gone_ends_the_wait_of_its_peer_at_once():
    with pytest.raises(Exception, match="rank 1"):  # not that time was up: the group waits longer than the launch
        launch(_dies, 2, timeout_seconds=50)
