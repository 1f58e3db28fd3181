"""Batches of several lengths: every document once an epoch, in the shortest sequences that hold it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from passes.errors import PlanError
from planner.spec.spec import Spec
from runtime.data.buckets import BucketBatches, batches_of, ranges
from runtime.data.objectives.samples import Within
from runtime.data.tokens import Tokens
from tests.tools.hand_tokens import by_hand

LENGTHS = [4, 8, 16]


def spec_of(packing: Any = False, **more: Any) -> list[Spec]:
    names = ["input_ids", "labels", *(["position_ids"] if packing == "documents" else [])]
    inputs = {name: {"shape": [LENGTHS], "dtype": "int64"} for name in names}
    spec = Spec.load({"mesh": {}, "batch": {"tokens": 32, "micro": 1}, "inputs": inputs, "data": {"packing": packing}})
    return [spec.at(place) for place in range(3)]


def documents(seed: int, count: int = 90, longest: int = 16) -> Tokens:
    """Document i holds the id i + 1 alone."""
    sizes = np.random.default_rng(seed).integers(2, longest + 1, count)
    return by_hand(*([i + 1] * int(n) for i, n in enumerate(sizes)))


def made(tokens: Tokens, packing: Any = False) -> BucketBatches:
    found = batches_of([tokens], [], spec_of(packing))
    assert isinstance(found, BucketBatches)
    return found


def seen(batches: BucketBatches, steps: range) -> Counter[int]:
    found = Counter[int]()
    for step in steps:
        batch = batches.batch(step)
        for row in batch["input_ids"].tolist():
            found.update({i for i in row if i})
    return found


@pytest.mark.parametrize("packing", [False, "documents"])
def test_a_document_lies_in_the_shortest_sequences_that_hold_it(packing: Any) -> None:
    tokens = documents(1)
    sizes = np.diff(tokens.ends, prepend=0)
    batches = made(tokens, packing)
    for step in range(batches.num_batches):
        ids = batches.batch(step)["input_ids"]
        assert len(ids) == batches.size_of(step) == 32 // ids.shape[1]
        for document in set(ids.flatten().tolist()) - {0}:
            assert ids.shape[1] == min(n for n in LENGTHS if n >= sizes[document - 1])


def test_every_document_comes_once_an_epoch_of_its_length() -> None:
    batches = made(documents(2))
    found = seen(batches, range(64 * batches.num_batches))
    assert set(found) == set(range(1, 91))
    assert max(found.values()) - min(found.values()) <= 4  # of 64: shares in whole batches, and the last epoch


def test_a_step_does_not_depend_on_those_before() -> None:
    batches, again = made(documents(3)), made(documents(3))
    later = [batches.batch(step)["input_ids"] for step in range(40)]
    assert all(torch.equal(again.batch(step)["input_ids"], later[step]) for step in (39, 0, 17))
    assert len({batches.place(step) for step in range(40)}) == 40


def test_a_cycle_mixes_the_lengths() -> None:
    batches = made(documents(4, 400))
    size = batches.num_batches
    places = [batches.place(step)[0] for step in range(32 * size)]
    assert all(sorted(set(places[i : i + size])) == [0, 1, 2] for i in range(0, 32 * size, size))
    assert places[:size] != sorted(places[:size])
    assert places[:size] != places[size : 2 * size]


def test_rows_of_ranks_are_those_of_the_global_batch() -> None:
    batches = made(documents(5))
    whole = batches.batch(7)["input_ids"]
    half = len(whole) // 2
    parts = [batches.batch(7, rows)["input_ids"] for rows in (slice(0, half), slice(half, 2 * half))]
    assert torch.equal(torch.cat(parts), whole)


def test_a_length_without_documents_has_no_batch() -> None:
    batches = made(documents(6, longest=4))
    assert len(batches.of_lengths) == 1
    assert batches.batch(0)["input_ids"].shape == (8, 4)


def test_longer_documents_are_of_the_greatest_length() -> None:
    assert list(ranges(LENGTHS)) == [Within(0, 4), Within(4, 8), Within(8, None)]
    batches = made(documents(7, longest=40))
    longest = [b for s in range(batches.num_batches) if (b := batches.batch(s)["input_ids"]).shape[1] == 16]
    assert longest


def test_several_texts_keep_their_shares_of_each_length() -> None:
    """The first text has short documents, the second long ones: steps of a length are in their shares."""
    short, long = documents(8, 200, 4), by_hand(*([7] * 15 for _ in range(200)))
    batches = batches_of([short, long], [3.0, 1.0], spec_of())
    assert isinstance(batches, BucketBatches)
    of_short = sum(batches.size_of(s) for s in range(batches.num_batches) if batches.place(s)[0] == 0)
    total = sum(batches.size_of(s) for s in range(batches.num_batches))
    assert of_short / total == pytest.approx(0.75, abs=0.03)


def test_windows_over_the_ends_of_documents_have_one_length() -> None:
    with pytest.raises(PlanError, match="no batch would be of another"):
        batches_of([documents(9)], [], spec_of(packing=True))
