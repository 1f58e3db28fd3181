"""The global batch of a step: the same wherever it is asked for, each sample once an epoch, fed by role."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from passes.errors import PlanError
from planner.spec.spec import Spec
from runtime.data.token_batches import TokenBatches, token_batches
from runtime.data.tokens import Tokens
from tests.runtime.data.conftest import by_hand
from tests.tools.texts import tokens_of

Make = Callable[..., Tokens]
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


def test_without_packing_windows_stay_inside_documents(make_tokens: Make) -> None:
    tokens = make_tokens([1, 2, 3], [4, 5, 6], padding=9)
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
