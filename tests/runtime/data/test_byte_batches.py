"""Text as bytes: the same global batch on every rank, fed by the names of the spec's inputs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from planner.errors import PlanError
from planner.spec.sections import InputSpec
from runtime.data.byte_batches import ByteBatches, read_text

TOKENS = InputSpec(shape=(8,), dtype="int64", high=256)


def batches(text=None, seed=1, **inputs):
    text = np.arange(200, dtype=np.uint8) if text is None else text
    return ByteBatches(text, inputs or {"input_ids": TOKENS}, 4, seed)


def test_standard_library_is_a_text_of_its_own():
    text = read_text("stdlib")
    assert text.dtype == np.uint8
    assert len(text) > 1_000_000


def test_directory_is_read_in_sorted_order(tmp_path):
    (tmp_path / "b").write_text("two")
    (tmp_path / "a").write_text("one")
    assert read_text(str(tmp_path)).tobytes() == b"onetwo"


def test_batch_depends_on_seed_and_step_alone():
    first, again = batches().batch(3)["input_ids"], batches().batch(3)["input_ids"]
    assert torch.equal(first, again)
    assert not torch.equal(first, batches().batch(4)["input_ids"])
    assert not torch.equal(first, batches(seed=2).batch(3)["input_ids"])


def test_labels_are_the_window_and_targets_the_next_bytes():
    batch = batches(input_ids=TOKENS, labels=TOKENS, targets=TOKENS).batch(0)
    assert batch["input_ids"].shape == (4, 8)
    assert torch.equal(batch["labels"], batch["input_ids"])
    assert torch.equal(batch["targets"], batch["input_ids"] + 1)


def test_masks_and_positions_are_filled_in_their_own_dtype():
    batch = batches(
        input_ids=TOKENS,
        attention_mask=InputSpec(shape=(8,), dtype="bool"),
        position_ids=InputSpec(shape=(8,), dtype="int32"),
    ).batch(0)
    assert batch["attention_mask"].dtype == torch.bool
    assert batch["attention_mask"].all()
    assert batch["position_ids"].tolist() == [list(range(8))] * 4


def test_every_byte_of_the_text_can_be_drawn():
    text = np.arange(9, dtype=np.uint8)
    assert batches(text).batch(0)["input_ids"].tolist() == [list(range(8))] * 4


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: read_text("no_such_file"), "no file or directory no_such_file"),
        (lambda: batches(np.zeros(8, np.uint8)), "holds 8 bytes, a sequence takes 9"),
        (lambda: batches(pixel_values=InputSpec(shape=(8,), dtype="float32")), "cannot feed the input 'pixel_values'"),
        (lambda: batches(input_ids=InputSpec(shape=(8,), dtype="int64", high=100)), "tokens up to 255"),
    ],
)
def test_unfit_data_gets_one_clear_error(make, words):
    with pytest.raises(PlanError, match=words):
        make()


def test_empty_file_is_refused(tmp_path):
    (tmp_path / "empty").touch()
    with pytest.raises(PlanError, match="no bytes"):
        read_text(str(tmp_path / "empty"))
