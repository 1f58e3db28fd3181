"""The model of PyTorch's caching allocator: sequences with figures worked out by hand, and properties of all."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cost.allocator import caching
from planner.cost.allocator.caching import KIB, MIB, CachingAllocator

Steps = list[tuple[str, int]]  # ("+", bytes), or ("-", which of the tensors so far)


def reserved(steps: Steps, limit: int | None = None) -> int:
    """The most bytes reserved."""
    allocator, made = CachingAllocator(limit), []
    for kind, number in steps:
        if kind == "+":
            made.append(allocator.allocate(number))
        else:
            allocator.free(made[number])
    return allocator.most_reserved


def plus(*sizes: int) -> Steps:
    return [("+", size) for size in sizes]


def minus(*numbers: int) -> Steps:
    return [("-", number) for number in numbers]


CASES: dict[str, tuple[Steps, int | None, int]] = {
    "one byte takes a small segment": (plus(1), None, 2 * MIB),
    "two of 1 MiB share it": (plus(MIB, MIB), None, 2 * MIB),
    "sizes are rounded up to 512 bytes": (plus(*[MIB // 4 - 511] * 8), None, 2 * MIB),
    "the next byte takes another": (plus(MIB, MIB, 1), None, 4 * MIB),
    "a little over 1 MiB is large": (plus(MIB + 1), None, 20 * MIB),
    "small ones find no room in a large segment": (plus(2 * MIB, MIB), None, 22 * MIB),
    "ten of 2 MiB fill a large segment": (plus(*[2 * MIB] * 10), None, 20 * MIB),
    "10 MiB have a segment of their own": (plus(10 * MIB, 10 * MIB), None, 20 * MIB),
    "a segment of its own is rounded up to 2 MiB": (plus(11 * MIB), None, 12 * MIB),
    "its last MiB is not split off": (plus(11 * MIB, MIB + 512), None, 32 * MIB),
    "more than 1 MiB is": (plus(19 * MIB - 512, *[]) + minus(0) + plus(17 * MIB, 2 * MIB), None, 20 * MIB),
    "the smallest block that fits is taken": (
        plus(24 * MIB, 40 * MIB) + minus(0, 1) + plus(23 * MIB, 40 * MIB), None, 64 * MIB,
    ),
    "free neighbours join": (plus(*[6 * MIB] * 3) + minus(0, 2, 1) + plus(19 * MIB), None, 20 * MIB),
    "a live neighbour keeps them apart": (plus(*[6 * MIB] * 3) + minus(0, 2) + plus(9 * MIB), None, 40 * MIB),
    "without a limit freed segments stay": (plus(20 * MIB) + minus(0) + plus(30 * MIB), None, 50 * MIB),
    "at the limit they are returned": (plus(20 * MIB) + minus(0) + plus(30 * MIB), 40 * MIB, 30 * MIB),
    "a segment that is partly live is not": (
        plus(6 * MIB, 6 * MIB) + minus(0) + plus(30 * MIB), 40 * MIB, 50 * MIB,
    ),
    "512 bytes are split off a small block": (plus(MIB, MIB - 512, 512), None, 2 * MIB),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_reserved_bytes_are_those_worked_out_by_hand(case: str) -> None:
    steps, limit, expected = CASES[case]
    assert reserved(steps, limit) == expected


def does_not_join(self: CachingAllocator, block: caching.Block) -> None:
    block.is_live = False
    self._put(block)


def takes_the_largest(self: CachingAllocator, size: int, is_small: bool) -> caching.Block | None:
    free = self._free[is_small]
    return free.pop()[2] if free and free[-1][0] >= size else None


MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "rounds to 1 KiB": lambda patch: patch.setattr(caching, "ROUND", KIB),
    "small up to 2 MiB": lambda patch: patch.setattr(caching, "SMALL", 2 * MIB),
    "small segments of 4 MiB": lambda patch: patch.setattr(caching, "SMALL_SEGMENT", 4 * MIB),
    "large segments of 16 MiB": lambda patch: patch.setattr(caching, "LARGE_SEGMENT", 16 * MIB),
    "own segments from 12 MiB": lambda patch: patch.setattr(caching, "LEAST_OWN", 12 * MIB),
    "own segments rounded to 4 MiB": lambda patch: patch.setattr(caching, "ROUND_OWN", 4 * MIB),
    "free blocks do not join": lambda patch: patch.setattr(CachingAllocator, "free", does_not_join),
    "worst fit": lambda patch: patch.setattr(CachingAllocator, "_best", takes_the_largest),
    "no block is split": lambda patch: patch.setattr(CachingAllocator, "_split", lambda self, block, size: None),
    "nothing is returned": lambda patch: patch.setattr(CachingAllocator, "_release", lambda self: None),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_another_rule_gives_another_figure(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[mutant](monkeypatch)
    assert any(reserved(steps, limit) != expected for steps, limit, expected in CASES.values())


SIZES = st.sampled_from([1, 512, 513, 100 * KIB, MIB, MIB + 1, 3 * MIB, 7 * MIB, 10 * MIB, 11 * MIB, 33 * MIB])


@given(st.lists(st.tuples(SIZES, st.booleans(), st.randoms(use_true_random=False)), max_size=60))
def test_reserved_covers_what_lives_and_all_that_is_freed_joins(steps: list[tuple[int, bool, object]]) -> None:
    allocator, live = CachingAllocator(), list[tuple[caching.Block, int]]()
    for size, frees, random in steps:
        if frees and live:
            allocator.free(live.pop(random.randrange(len(live)))[0])  # pyright: ignore[reportAttributeAccessIssue]
        live.append((allocator.allocate(size), size))
        assert all(block.is_live and block.size >= size for block, size in live)
        assert sum(block.size for block, _ in live) <= allocator.reserved <= allocator.most_reserved
        places = sorted((block.address, block.address + block.size) for block, _ in live)
        assert all(end <= start for (_, end), (start, _) in pairwise(places))
    for block, _ in live:
        allocator.free(block)
    free = [block for blocks in allocator._free.values() for _, _, block in blocks]
    assert all(block.before is None and block.after is None for block in free)
    assert sum(block.size for block in free) == allocator.reserved
    before = allocator.reserved
    for block in sorted(free, key=lambda block: -block.size):
        allocator.allocate(block.size if not block.is_small else MIB)
    assert allocator.reserved == before  # every segment serves again
