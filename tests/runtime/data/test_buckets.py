"""Batches of several lengths: every document once an epoch, in the shortest sequences that hold it; mixtures."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from passes.errors import PlanError
from planner.spec.inputs import InputSpec
from planner.spec.spec import Spec
from runtime.commands.train import LaunchOptions, job_of
from runtime.data.buckets import BLOCK, BucketBatches, MixedBatches, batches_of, ranges
from runtime.data.objectives.next_token import Packed
from runtime.data.objectives.samples import Within
from runtime.data.token_batches import TokenBatches
from runtime.data.tokens import Tokenization, Tokens
from runtime.training.data import read_mixture
from runtime.training.job import Job
from runtime.training.options import TrainOptions
from tests.tools.texts import by_hand

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


INPUTS = {"ids": InputSpec(shape=(4,), dtype="int64")}


def text(first: int, num_tokens: int) -> TokenBatches:
    """Sample i begins with the token first + 4 i."""
    ids = np.arange(first, first + num_tokens, dtype=np.int64)
    marks, ends = np.zeros(num_tokens, np.uint8), np.array([num_tokens])
    tokens = Tokens(ids, ends, marks, np.array([1]), Tokenization("bytes", 1 << 40), "a test", "id")
    return TokenBatches(Packed(tokens, 4), INPUTS, {"ids": "tokens"}, 512, 7)


def mixture() -> MixedBatches:
    return MixedBatches([text(0, 4 * BLOCK), text(1 << 30, 4 * BLOCK)], [0.7, 0.3], 7)


def test_a_block_holds_exactly_the_shares_and_each_sample_once():
    mixed, steps = mixture(), BLOCK // 512
    places = [place for step in range(steps) for place in mixed.places(step)]
    counts = Counter(index for index, _ in places)
    assert counts == {0: round(0.7 * BLOCK), 1: round(0.3 * BLOCK)}
    assert len(set(places)) == len(places)
    assert {number for index, number in places if index == 1} == set(range(counts[1]))
    following = {number for step in range(steps, steps + 4) for index, number in mixed.places(step) if index == 1}
    assert min(following) >= counts[1], "the next block goes on in each text"


def test_every_step_has_about_the_shares():
    shares = [np.mean([index == 0 for index, _ in mixture().places(step)]) for step in range(20)]
    assert 0.6 < min(shares) < max(shares) < 0.8


def test_a_batch_is_the_samples_of_its_texts_at_any_step_and_for_any_rows():
    mixed = mixture()
    whole = mixture().batch(300)
    assert torch.equal(whole["ids"][100:120], mixed.batch(300, slice(100, 120))["ids"])
    firsts = whole["ids"][:, 0]
    from_second = [index == 1 for index, _ in mixed.places(300)]
    assert (firsts >= 1 << 30).tolist() == from_second
    assert len(set(firsts.tolist())) == 512


def test_a_share_that_no_block_can_hold_is_refused():
    with pytest.raises(PlanError, match="too small"):
        MixedBatches([text(0, 64), text(0, 64)], [1.0, 1e-9], 7)


def test_shares_are_read_from_the_options(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd=name.txt").write_text("text")
    assert read_mixture(["stdlib"]) == ("stdlib", ())
    assert read_mixture(["odd=name.txt"]) == ("odd=name.txt", ())
    assert read_mixture(["a.txt=0.7", "odd=name.txt=3e-1"]) == ("a.txt", (("a.txt", 0.7), ("odd=name.txt", 0.3)))
    for given in (["a.txt", "b.txt=1"], ["a.txt=0", "b.txt=1"], ["a.txt=-1"], ["a.txt=nan", "b=1"]):
        with pytest.raises(PlanError) as error:
            read_mixture(given)
        assert error.value.where == "--data"


def job_in(path: Path, mixture: str, *data: str) -> Job:
    """Of `meshwright train` with these options of --data, and this mixture in the spec."""
    path.write_text(f"{{mesh: {{}}, batch: {{global: 2, micro: 2}},\ndata: {{mixture: {mixture}}}}}")
    return job_of("model.py:build", path, LaunchOptions(list(data) or None), TrainOptions())


def test_a_mixture_of_the_spec_is_that_of_the_options_which_win(tmp_path, monkeypatch):
    (tmp_path / "specs").mkdir()
    (tmp_path / "here.txt").write_text("text")
    (tmp_path / "specs" / "beside.txt").write_text("text")
    monkeypatch.chdir(tmp_path)
    spec = tmp_path / "specs" / "spec.yaml"
    asked = job_in(spec, "{here.txt: 0.7, beside.txt: 3e-1, stdlib: 1}")
    beside = tmp_path / "specs" / "beside.txt"
    assert asked == job_in(spec, "{}", "here.txt=0.7", f"{beside}=0.3", "stdlib=1")
    assert job_in(spec, "{here.txt: 0.7}", "stdlib") == job_in(spec, "{}", "stdlib")
    with pytest.raises(PlanError, match=r"data\.mixture: no file or directory none\.txt") as error:
        job_in(spec, "{none.txt: 1}")
    assert str(error.value.where) == "spec.yaml:2"
    with pytest.raises(PlanError, match="no text to train on"):
        job_in(spec, "{}")
    with pytest.raises(PlanError, match=r"data\.mixture"):
        job_in(spec, "{here.txt: 0}")
