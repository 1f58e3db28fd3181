"""Mixtures: shares are exact in each block, no sample comes twice in an epoch of its text, and any step is found."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from planner import PlanError
from planner.spec.inputs import InputSpec
from runtime.commands.train import Given, job_of
from runtime.data.buckets import BLOCK, MixedBatches
from runtime.data.objectives.next_token import Packed
from runtime.data.token_batches import TokenBatches
from runtime.data.tokens import Tokenization, Tokens
from runtime.training.data import read_mixture
from runtime.training.job import Job
from runtime.training.options import TrainOptions

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
    return job_of("model.py:build", path, Given(list(data) or None), TrainOptions())


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
