"""PyTorch's caching allocator for CUDA (c10/cuda/CUDACachingAllocator.cpp), as arithmetic on one stream.

    size        rounded up to 512 bytes
    pool        small: at most 1 MiB, from segments of 2 MiB; large: from segments of 20 MiB for less than 10 MiB, else
                of the size rounded up to 2 MiB
    block       the smallest free one of the pool that is large enough, by address among equals; none: a new segment
    split       if at least 512 bytes (small), or more than 1 MiB (large), are left
    freed       the block joins free neighbours of its segment; segments stay reserved
    no room     all segments without a live block are returned to the device, and the request is tried again

Reserved bytes are those of all segments. Options of PYTORCH_ALLOC_CONF, which change these rules, are not modelled.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

KIB, MIB = 1 << 10, 1 << 20
ROUND = 512  # kMinBlockSize
SMALL = MIB  # kSmallSize: the most bytes of a block of the small pool
SMALL_SEGMENT = 2 * MIB  # kSmallBuffer
LARGE_SEGMENT = 20 * MIB  # kLargeBuffer
LEAST_OWN = 10 * MIB  # kMinLargeAlloc: from here on a segment is made for the request
ROUND_OWN = 2 * MIB  # kRoundLarge


@dataclass(eq=False, slots=True)
class Block:
    """``size`` bytes at ``address``; its neighbours in the segment. Addresses only order blocks of equal size."""

    address: int
    size: int
    is_small: bool
    before: Block | None = None
    after: Block | None = None
    is_live: bool = False


class CachingAllocator:
    """Owns segments and their blocks. ``limit``: bytes that the device has; None: as many as are wanted.

    ``reserved`` and ``most_reserved``: bytes of segments, now and at most. A request that does not fit is served
    nevertheless, so that ``most_reserved`` says how much would have been needed.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.reserved = self.most_reserved = 0
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}
        self._next = 0

    def allocate(self, num_bytes: int) -> Block:
        """A live block for a tensor of ``num_bytes`` > 0."""
        size = _rounded(num_bytes, ROUND)
        is_small = size <= SMALL
        block = self._best(size, is_small) or self._segment(size, is_small)
        block.is_live = True
        left = block.size - size
        if left >= ROUND if is_small else left > SMALL:
            self._split(block, size)
        return block

    def free(self, block: Block) -> None:
        """Return a live block to its pool."""
        block.is_live = False
        if block.before is not None and not block.before.is_live:
            block = self._joined(block.before, block, taken=block.before)
        if block.after is not None and not block.after.is_live:
            block = self._joined(block, block.after, taken=block.after)
        self._put(block)

    def _best(self, size: int, is_small: bool) -> Block | None:
        free = self._free[is_small]
        at = bisect_left(free, (size, -1))
        return free.pop(at)[2] if at < len(free) else None

    def _segment(self, size: int, is_small: bool) -> Block:
        own = LARGE_SEGMENT if size < LEAST_OWN else _rounded(size, ROUND_OWN)
        total = SMALL_SEGMENT if is_small else own
        if self.limit is not None and self.reserved + total > self.limit:
            self._release()
        self.reserved += total
        self.most_reserved = max(self.most_reserved, self.reserved)
        self._next += total
        return Block(self._next - total, total, is_small)

    def _release(self) -> None:
        for is_small, blocks in self._free.items():
            parts = [entry for entry in blocks if entry[2].before is not None or entry[2].after is not None]
            self.reserved -= sum(size for size, _, _ in blocks) - sum(size for size, _, _ in parts)
            self._free[is_small] = parts

    def _split(self, block: Block, size: int) -> None:
        rest = Block(block.address + size, block.size - size, block.is_small, block, block.after)
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        self._put(rest)

    def _joined(self, first: Block, second: Block, *, taken: Block) -> Block:
        """``first`` with the bytes of ``second`` behind it. ``taken``: the one that is in the list of free blocks."""
        free = self._free[taken.is_small]
        del free[bisect_left(free, (taken.size, taken.address))]
        first.size += second.size
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        return first

    def _put(self, block: Block) -> None:
        insort(self._free[block.is_small], (block.size, block.address, block))


def _rounded(num_bytes: int, to: int) -> int:
    return -(-num_bytes // to) * to
