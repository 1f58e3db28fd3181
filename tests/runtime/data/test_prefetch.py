"""Batches made ahead are those that would be made when asked for; a failure is told where its batch is asked for."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from runtime.data.token_batches import Prefetched


class Numbers:
    """The batch of a step is its number. Owns which threads made which."""

    def __init__(self, fails_at: int = -1) -> None:
        self.fails_at = fails_at
        self.made: list[tuple[int, str]] = []

    def batch(self, step: int) -> dict[str, Tensor]:
        self.made.append((step, threading.current_thread().name))
        if step == self.fails_at:
            raise OSError("the disk is gone")
        return {"x": torch.tensor(step)}


def seen(batches: Prefetched, *steps: int) -> list[int]:
    return [int(batches.batch(step)["x"]) for step in steps]


def test_batches_come_in_their_order_from_the_thread() -> None:
    numbers = Numbers()
    with Prefetched(numbers, 3, 9) as batches:
        assert seen(batches, *range(3, 9)) == [*range(3, 9)]
    assert numbers.made == [(step, "batches") for step in range(3, 9)]


def test_other_steps_are_made_when_asked_for() -> None:
    with Prefetched(Numbers(), 0, 5) as batches:
        assert seen(batches, 0, 7, 1, 0, 3, 2) == [0, 7, 1, 0, 3, 2]


def test_only_a_few_are_made_ahead_and_an_end_in_between_is_at_once() -> None:
    numbers = Numbers()
    with Prefetched(numbers, 0, 1000) as batches:
        assert seen(batches, 0) == [0]
    assert len(numbers.made) <= 5
    assert not any(thread.name == "batches" for thread in threading.enumerate())


def test_what_the_thread_raises_is_raised_for_its_batch() -> None:
    with Prefetched(Numbers(fails_at=1), 0, 5) as batches:
        assert seen(batches, 0) == [0]
        with pytest.raises(OSError, match="the disk is gone"):
            batches.batch(1)
