"""The global batch of a step: the same wherever it is asked for, each sample once an epoch, fed by role, made ahead."""

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from passes.errors import PlanError
from passes.partition.batch.id_ranges import IdRange
from planner.spec.spec import Spec
from runtime.data.batches import BatchLayout, check_here, num_tokens
from runtime.data.token_batches import Permutation, Prefetched, TokenBatches, token_batches
from runtime.data.tokens import Tokens
from tests.tools.texts import by_hand, tokens_of

LENGTH = 4
TOKENS = {"shape": [LENGTH], "dtype": "int64", "high": 256}


def batches(tokens: Tokens | None = None, size: int = 4, **keys: Any) -> TokenBatches:
    inputs = keys.pop("inputs", {"input_ids": TOKENS})
    spec = {"mesh": {}, "batch": {"global": size, "micro": 1}, "inputs": inputs, **keys}
    return token_batches(by_hand(list(range(41))) if tokens is None else tokens, Spec.load(spec))


def test_a_batch_depends_on_seed_and_step_alone() -> None:
    first, again = batches().batch(3)["input_ids"], batches().batch(3)["input_ids"]
    assert torch.equal(first, again)
    assert not torch.equal(first, batches().batch(4)["input_ids"])
    assert not torch.equal(first, batches(seed=2).batch(3)["input_ids"])


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 40), st.integers(0, 2**40))
def test_every_epoch_has_every_sample_once(size: int, num_samples: int, seed: int) -> None:
    found = batches(by_hand(list(range(num_samples * LENGTH + 1))), size, seed=seed)
    num_steps = -(-3 * num_samples // size)
    seen = [pair for step in range(num_steps) for pair in found.indices(step)][: 3 * num_samples]
    assert sorted(seen) == [(epoch, index) for epoch in range(3) for index in range(num_samples)]
    assert [epoch for epoch, _ in seen] == sorted(epoch for epoch, _ in seen)


@settings(deadline=None)
@given(st.integers(1, 12), st.data())
def test_rows_of_shards_are_those_of_the_global_batch(size: int, data: st.DataObject) -> None:
    found, step = batches(size=size), data.draw(st.integers(0, 50))
    cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=3)))
    parts = [found.batch(step, slice(a, b)) for a, b in zip([0, *cuts], [*cuts, size], strict=True) if a < b]
    assert torch.equal(torch.cat([part["input_ids"] for part in parts]), found.batch(step)["input_ids"])


@settings(deadline=None)
@given(st.integers(0, 200))
def test_a_resumed_run_sees_the_samples_of_an_unbroken_one(step: int) -> None:
    unbroken = batches()
    for earlier in range(step % 7):
        unbroken.batch(earlier)
    assert batches().indices(step) == unbroken.indices(step)


def test_inputs_are_fed_by_what_their_names_say() -> None:
    names = ("idx", "targets", "labels", "attention_mask", "token_type_ids", "position_ids")
    batch = batches(inputs={name: TOKENS for name in names}).batch(0)
    assert torch.equal(batch["labels"], batch["idx"])
    assert torch.equal(batch["targets"], batch["idx"] + 1)
    assert batch["attention_mask"].all()
    assert not batch["token_type_ids"].any()
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3]] * 4


@pytest.mark.parametrize("name", ["ids", "token_ids", "tokens", "x"])
def test_each_usual_name_of_ids_is_fed_the_tokens(name: str) -> None:
    assert torch.equal(batches(inputs={name: TOKENS}).batch(3)[name], batches().batch(3)["input_ids"])


def test_the_spec_says_what_other_names_are() -> None:
    inputs = {"query": TOKENS, "input_ids": {"like": "query"}}
    batch = batches(inputs=inputs, data={"inputs": {"query": "next_tokens", "input_ids": "tokens"}}).batch(0)
    assert torch.equal(batch["query"], batch["input_ids"] + 1)


def test_each_input_has_its_own_dtype() -> None:
    mask = {"shape": [LENGTH], "dtype": "bool"}
    batch = batches(inputs={"x": {**TOKENS, "dtype": "int32"}, "attention_mask": mask}).batch(0)
    assert batch["x"].dtype == torch.int32
    assert batch["attention_mask"].dtype == torch.bool


def test_without_packing_windows_stay_inside_documents() -> None:
    tokens = by_hand([1, 2, 3], [4, 5, 6], padding=9)
    whole, parts = batches(tokens), batches(tokens, data={"packing": False})
    assert whole.objective.num_samples == 1
    assert sorted(parts.batch(0)["input_ids"].tolist()) == [[1, 2, 3, 9]] * 2 + [[4, 5, 6, 9]] * 2


@pytest.mark.parametrize(
    ("keys", "words", "where"),
    [
        ({"inputs": {"pixels": TOKENS}}, "cannot feed the input 'pixels'", "inputs.pixels"),
        ({"data": {"inputs": {"ids": "tokens"}}}, "data.inputs has 'ids', which is not an input", "data.inputs.ids"),
        ({"inputs": {"x": TOKENS, "y": {**TOKENS, "shape": [5]}}}, "the inputs differ: x 4, y 5", "inputs"),
        ({"inputs": {"x": {**TOKENS, "shape": [4, 2]}}}, r"has the shape \[4, 2\]", "inputs.x.shape"),
        (
            {"inputs": {"x": TOKENS, "next_sentence_label": {"shape": [], "dtype": "int64"}}},
            "fed by sentence_order, which this objective does not provide",
            "inputs.next_sentence_label",
        ),
    ],
)
def test_inputs_that_a_text_cannot_feed_are_refused_at_their_key(keys: Any, words: str, where: str) -> None:
    with pytest.raises(PlanError, match=words) as error:
        batches(**keys)
    assert str(error.value.where) == where
    assert error.value.fix


def test_a_bert_is_fed_masked_pairs() -> None:
    inputs = {
        "input_ids": TOKENS | {"shape": [24]},
        "token_type_ids": {"like": "input_ids", "high": 2},
        "attention_mask": {"like": "input_ids", "high": 2},
        "labels": {"like": "input_ids"},
        "sentence_order_label": {"shape": [], "dtype": "int64", "high": 2},
    }
    text = tokens_of(["It rained. We read. Then it stopped.", "One. Two."])
    batch = batches(text, 6, inputs=inputs, data={"objective": "masked"}).batch(0)
    assert {name: list(x.shape) for name, x in batch.items()} == {
        **{name: [6, 24] for name in inputs if name != "sentence_order_label"},
        "sentence_order_label": [6],
    }
    asked = batch["labels"] != -100
    assert asked.any(1).all()
    assert batch["token_type_ids"].any(1).all()
    assert (batch["attention_mask"][asked] == 1).all()


@settings(deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**63 - 1), st.integers(0, 100))
def test_every_value_comes_once(size: int, seed: int, epoch: int) -> None:
    found = Permutation(size, (seed, epoch))(np.arange(size))
    assert sorted(found.tolist()) == list(range(size))


@settings(deadline=None)
@given(st.integers(2**40, 2**62), st.lists(st.integers(0, 2**40 - 1), min_size=2, max_size=20, unique=True))
def test_places_of_a_huge_one_stay_apart_and_inside(size: int, places: list[int]) -> None:
    found = Permutation(size, (1, 2))(np.array(places)).tolist()
    assert len(set(found)) == len(places)
    assert all(0 <= value < size for value in found)


def test_a_place_is_the_same_alone_and_among_others() -> None:
    shuffled = Permutation(1000, (3, 4))
    assert [int(shuffled(np.array([place]))[0]) for place in range(50)] == shuffled(np.arange(50)).tolist()


def test_seeds_and_epochs_give_other_orders() -> None:
    orders = {tuple(Permutation(100, key)(np.arange(100)).tolist()) for key in ((1, 0), (1, 1), (2, 0), (0, 1))}
    assert len(orders) == 4


def test_the_order_is_the_same_on_every_machine() -> None:
    """What a run saw before a resume must be what it would see now."""
    assert Permutation(12, (1234, 0))(np.arange(12)).tolist() == [0, 2, 8, 9, 7, 10, 3, 6, 1, 5, 4, 11]


def test_neighbours_are_shuffled_well() -> None:
    """Of a good shuffle, the correlation of place and value is about 1/sqrt(n)."""
    found = Permutation(10_000, (1, 1))(np.arange(10_000))
    assert abs(np.corrcoef(np.arange(10_000), found)[0, 1]) < 0.05
    assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 0.05


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


# ---- The batch's rows reach the right dp rank and microbatch


CPU = torch.device("cpu")


def layout(dp_rank: int = 1) -> BatchLayout:
    return BatchLayout({"x": ((2,), torch.int64)}, 8, 2, 2, dp_rank)


def rows(size: int) -> dict[str, torch.Tensor]:
    return {"x": torch.arange(size).view(-1, 1).expand(size, 2).contiguous()}


def first_column(microbatches) -> list[list[int]]:
    return [m["x"][:, 0].tolist() for m in microbatches]


def test_dp_rank_1_takes_the_second_half_in_microbatches_2_and_3():
    assert first_column(layout().microbatches(rows(8), ["x"], CPU)) == [[4, 5], [6, 7]]
    assert layout().first_microbatch == 2


def test_a_local_batch_is_all_this_ranks():
    layout().check(rows(4), local=True)
    assert first_column(layout().microbatches(rows(4), ["x"], CPU, local=True)) == [[0, 1], [2, 3]]


def test_the_loss_counts_over_every_microbatch_of_the_global_batch():
    assert first_column(layout().all_microbatches(rows(8), ["x"], CPU)) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_a_stage_that_reads_no_input_has_empty_microbatches():
    assert layout().microbatches(rows(8), [], CPU) == [{}, {}]


def test_a_global_batch_given_as_local_is_refused():
    with pytest.raises(PlanError, match=r"has shape \[8, 2\], the plan expects \[4, 2\]") as caught:
        layout().check(rows(8), local=True)
    assert "the 4 sequences of this dp rank" in caught.value.fix


def test_a_value_that_is_no_tensor_is_refused():
    with pytest.raises(PlanError, match=r"batch\['x'\] is a list"):
        layout().check({"x": [1, 2]})  # pyright: ignore[reportArgumentType]


def test_tokens_are_the_elements_of_the_first_integer_input():
    assert num_tokens({"image": torch.zeros(4, 9), "ids": torch.zeros(4, 3, dtype=torch.int64)}) == 12
    assert num_tokens({"image": torch.zeros(4, 9)}) == 4


@pytest.mark.gpu
def test_microbatches_come_to_a_gpu_from_pinned_memory_with_their_values():
    batch = rows(8)
    placed = layout().microbatches(batch, ["x"], torch.device("cuda", 0))
    assert all(m["x"].is_cuda for m in placed)
    assert first_column(placed) == first_column(layout().microbatches(batch, ["x"], CPU))
    assert not batch["x"].is_pinned()


def test_of_several_ranks_the_one_with_a_bad_id_is_named():
    rows_of_table = IdRange(0, 3, None, ((0, 2),), "the embedding wte", "rows")
    strict = replace(layout(), ids={"x": (rows_of_table,)})
    with pytest.raises(
        PlanError, match=r"^rank 5: batch\['x'\] holds 3 at \[3, 0\]; the embedding wte has rows 0 to 2"
    ):
        check_here(strict, rows(4), 5, 8, local=True)
    with pytest.raises(PlanError, match=r"^batch\['x'\] holds 3"):
        check_here(strict, rows(4), 0, 1, local=True)
