"""Rounds: each rank puts something into its memory, tells the others, and reads what they put.

    put     into a slot of this rank's memory, then a byte to each other rank
    take    once a byte of each has come, from the same slot of theirs

A rank goes at most ``AHEAD`` rounds ahead of what it has read, and has twice as many slots. So a slot is free when it
is written again: all have put round r - AHEAD, which this rank has read, and before that they had read round
r - 2·AHEAD. No rank has to say that it has read.

The byte is a sum of what the collective is, so that ranks that come to different ones hear of it, instead of reading
each other's memory wrongly. The system calls that carry it order the memory of the ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from mmap import mmap
from typing import NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from runtime.distributed.shared_memory.neighbours import Neighbours

AHEAD = 2
SLOT_BYTES = 1 << 19
NUM_SLOTS = 2 * AHEAD
NUM_BYTES = NUM_SLOTS * SLOT_BYTES


class Slot(NamedTuple):
    """A part of a rank's memory, from the byte ``start``."""

    memory: mmap
    start: int

    def first(self, count: int, like: Tensor) -> Tensor:
        """``count`` elements of the dtype of ``like``: a view that nobody keeps, so that no tensor stays alive."""
        if not count:
            return like.new_empty(0)
        return torch.frombuffer(self.memory, dtype=like.dtype, count=count, offset=self.start)


@dataclass(frozen=True, slots=True)
class Round:
    """``put``: into this rank's slot. ``take``: from the slots of all ranks in their order, this one's among them.

    ``waits``: what it puts comes of the round before.
    """

    put: Callable[[Slot], None]
    take: Callable[[Sequence[Slot]], None]
    waits: bool = False


@dataclass(eq=False)
class Exchange:
    """A collective that is under way. ``name``: what it is, the same on all ranks."""

    name: str
    rounds: Iterator[Round]
    put: deque[Round] = field(default_factory=deque)
    next: Round | None = None

    def __post_init__(self) -> None:
        self.byte = bytes([crc32(self.name.encode()) & 0xFF])
        self.next = next(self.rounds, None)

    @property
    def is_done(self) -> bool:
        return self.next is None and not self.put


class Rounds:
    """Owns: the collectives that are under way, oldest first; the bytes of each rank that nobody has asked for yet."""

    def __init__(self, neighbours: Neighbours, name_of: Callable[[int], str]) -> None:
        """``name_of``: how a message names the rank at a place of the group."""
        self._neighbours, self._name_of = neighbours, name_of
        self._told: dict[int, deque[int]] = {rank: deque() for rank in neighbours.sockets}
        self._under_way: deque[Exchange] = deque()
        self._num_put = self._num_read = 0

    @torch.no_grad()
    def begin(self, exchange: Exchange) -> None:
        """Put what can be put now; the rest is put and read where it is waited for."""
        if not exchange.is_done:
            self._under_way.append(exchange)
            self._put()

    @torch.no_grad()
    def finish(self, exchange: Exchange) -> None:
        """Wait for ``exchange``, and with it for all that began before. Raises RuntimeError where a rank is gone."""
        while not exchange.is_done:
            self._read()
            self._put()

    def _put(self) -> None:
        for exchange in self._under_way:
            while exchange.next is not None:
                if self._num_put == self._num_read + AHEAD or (exchange.next.waits and exchange.put):
                    return
                exchange.next.put(self._slot(self._neighbours.rank, self._num_put))
                self._tell(exchange)
                exchange.put.append(exchange.next)
                exchange.next = next(exchange.rounds, None)
                self._num_put += 1

    def _read(self) -> None:
        exchange = self._under_way[0]
        for rank in self._told:
            self._hear(rank, exchange)
        exchange.put.popleft().take([self._slot(rank, self._num_read) for rank in range(self._neighbours.size)])
        self._num_read += 1
        if exchange.is_done:
            self._under_way.popleft()

    def _slot(self, rank: int, number: int) -> Slot:
        return Slot(self._neighbours.memories[rank], number % NUM_SLOTS * SLOT_BYTES)

    def _tell(self, exchange: Exchange) -> None:
        for rank, peer in self._neighbours.sockets.items():
            try:
                peer.sendall(exchange.byte)
            except ConnectionError as error:
                raise self._gone(rank, exchange) from error

    def _hear(self, rank: int, exchange: Exchange) -> None:
        """The byte of the oldest round that is not read; more may come with it."""
        told = self._told[rank]
        if not told:
            try:
                told.extend(self._neighbours.sockets[rank].recv(64))
            except TimeoutError as error:
                raise RuntimeError(f"timed out in {exchange.name}: {self._name_of(rank)} did not come") from error
            except ConnectionError as error:
                raise self._gone(rank, exchange) from error
        if not told:
            raise self._gone(rank, exchange)
        if told.popleft() != exchange.byte[0]:
            raise RuntimeError(f"{self._name_of(rank)} came to another collective than this rank's {exchange.name}")

    def _gone(self, rank: int, exchange: Exchange) -> RuntimeError:
        return RuntimeError(f"connection closed by peer: {self._name_of(rank)} ended before {exchange.name}")
