"""Streams of the library `datasets`: their states are positions, and a resume is bitwise; directories with splits."""

import json
from pathlib import Path

import pytest

from passes.errors import PlanError
from runtime.data.text.documents import rows_of
from runtime.training.loop import run_rank
from tests.runtime.data.test_stream import MODEL, job_in, rest, stream

datasets = pytest.importorskip("datasets")

CODE = """
import os
os.environ["HF_HUB_OFFLINE"] = "1"
from datasets import load_dataset
from datasets.distributed import split_dataset_by_node
def items(rank, size):
    files = [{0!r} + f"/{{n}}.jsonl" for n in range(3)]
    rows = load_dataset("json", data_files=files, split="train", streaming=True, cache_dir={0!r})
    rows = rows.map(lambda row: {{"ids": [ord(c) for c in row["text"]]}}, remove_columns=["text"])
    return split_dataset_by_node(rows, rank, size)
def shuffled(rank, size):
    yield from items(rank, size).shuffle(seed=1, buffer_size=5)
"""


def code_for(folder: Path) -> str:
    for number, letter in enumerate("abc"):
        lines = (json.dumps({"text": letter * (1 + k % 4) + str(k)}) + "\n" for k in range(7))
        (folder / f"{number}.jsonl").write_text("".join(lines))
    return CODE.format(str(folder))


def test_a_resume_by_its_state_gives_the_same_rest_and_ranks_share_the_rows(tmp_path: Path) -> None:
    code, found = code_for(tmp_path), []
    for rank in range(2):
        whole = stream(tmp_path, code, dp=2, rank=rank, packing="documents")
        batches = rest(whole)
        assert len(batches) > 1
        found += [i for batch in batches for i in batch["input_ids"].flatten().tolist() if i]
        for at in range(1, len(batches)):
            saved = {"positions": json.loads(json.dumps([whole._positions[at]] * 2))}
            assert saved["positions"][0]["state"]
            again = rest(stream(tmp_path, code, dp=2, rank=rank, saved=saved, packing="documents"), at)
            assert [{n: v.tolist() for n, v in b.items()} for b in again] == [
                {n: v.tolist() for n, v in b.items()} for b in batches[at:]
            ]
    assert set(map(ord, "abc0123456")) == set(found)


@pytest.mark.parametrize("function", ["items", "shuffled"])
def test_a_resumed_training_has_the_losses_of_an_unbroken_one(tmp_path: Path, function: str) -> None:
    job = job_in(tmp_path, function)
    (tmp_path / "model.py").write_text(MODEL + code_for(tmp_path))
    whole = run_rank(job).rows
    assert len(whole) == 5  # of 21 samples, five steps of four
    (tmp_path / "resumed").mkdir()
    for number in (2, 5):
        job = job_in(tmp_path, function, num_steps=number, save=str(tmp_path / "saves"), resume="auto")
        (tmp_path / "model.py").write_text(MODEL + code_for(tmp_path))
        found = run_rank(job).rows
    assert [row.loss for row in found] == [row.loss for row in whole[2:]]


def test_a_directory_with_splits_is_read_by_split_or_one_error_that_names_them(tmp_path: Path) -> None:
    made = {name: datasets.Dataset.from_list([{"a": n, "b": None}]) for n, name in enumerate(("train", "test"))}
    datasets.DatasetDict(made).save_to_disk(str(tmp_path / "both"))
    datasets.DatasetDict({"only": made["train"]}).save_to_disk(str(tmp_path / "one"))

    def rows(name: str, split: str | None) -> list[object]:
        return [row.value for row in rows_of([tmp_path / name], split, lambda num_bytes: None)]

    assert rows("both", "test") == [{"a": 1}]
    assert rows("one", None) == [{"a": 0}]
    for split in (None, "validation"):
        with pytest.raises(PlanError, match="has the splits train, test") as error:
            rows("both", split)
        assert error.value.where == "--split"
