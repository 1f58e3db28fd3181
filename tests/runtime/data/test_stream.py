"""Streams of the user's own: packed or taken whole, found again after a resume, ended and refused on all ranks."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from passes.errors import PlanError
from planner.spec.spec import Spec
from runtime.data.batches import BatchLayout
from runtime.data.stream import Stream, StreamEnd
from runtime.training.data import check_source, check_stream, steps_of
from runtime.training.job import Job, spec_of
from runtime.training.loop import run_rank
from tests.tools.examples import examples
from tests.tools.paths import ROOT
from tests.tools.ranks import Ranks

LENGTH = 6
ITEMS = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [10, 11], [12, 13, 14, 15, 16], [17, 18, 19], [20, 21], [22, 23, 24, 25]]
PLAIN = "def items(rank, size):\n    for ids in ITEMS[rank::size]:\n        yield {'ids': ids}\n"
STATEFUL = """
class Kept:
    def __init__(self, ids): self.ids, self.at = ids, 0
    def state_dict(self): return {"at": self.at}
    def load_state_dict(self, state): self.at = state["at"]
    def __iter__(self):
        while self.at < len(self.ids):
            self.at += 1
            yield {"ids": self.ids[self.at - 1]}
def items(rank, size): return Kept(ITEMS[rank::size])
"""
KINDS = {"plain": PLAIN, "state": STATEFUL}


def spec_with(global_size: int = 2, dp: int = 1, **data: Any) -> dict[str, Any]:
    ids = {"shape": [LENGTH], "dtype": "int64", "high": 64}
    return {
        "mesh": {"dp": dp},
        "batch": {"global": global_size, "micro": 1},
        "inputs": {"input_ids": ids, "labels": {"like": "input_ids"}, "position_ids": {"like": "input_ids"}},
        "data": data,
    }


def stream(
    folder: Path, code: str, items: Any = ITEMS, dp: int = 1, rank: int = 0, saved: Any = None, **data: Any
) -> Stream:
    (folder / "own.py").write_text(f"ITEMS = {items!r}\n{code}")
    inputs = {name: ((LENGTH,), torch.int64) for name in ("input_ids", "labels", "position_ids")}
    spec, layout = Spec.load(spec_with(dp * 2, dp, **data)), BatchLayout(inputs, dp * 2, 1, dp, rank)
    made = Stream(f"{folder}/own.py:items", spec, layout, keeps=True)
    made.go_on(saved)
    return made


def rest(made: Stream, step: int = 0) -> list[dict[str, Tensor]]:
    found = []
    try:
        while True:
            found.append(made.batch(step + len(found)))
    except StreamEnd:
        return found


@pytest.mark.parametrize("values", [list, torch.tensor])
def test_a_model_may_name_its_inputs_as_samples_do(tmp_path: Path, values: Any) -> None:
    """An item of one row is a sample, one of several rows is a whole batch."""
    ids = {"shape": [LENGTH], "dtype": "int64", "high": 64}
    inputs = {"ids": ids, "labels": {"like": "ids"}}
    data = {"inputs": inputs, "mesh": {}, "batch": {"global": 2, "micro": 1}, "data": {"packing": False}}
    (tmp_path / "own.py").write_text(
        f"from torch import tensor, ones\nmade = {'list' if values is list else 'tensor'}\n"
        "def samples(rank, size):\n    while True: yield {'ids': made([1, 2, 3]), 'labels': made([-100, 2, 3])}\n"
        "def rows(rank, size):\n    while True: yield {'ids': ones(2, 6).long(), 'labels': ones(2, 6).long()}\n"
    )
    layout = BatchLayout({name: ((LENGTH,), torch.int64) for name in inputs}, 2, 1, 1, 0)
    made = Stream(f"{tmp_path}/own.py:samples", Spec.load(data), layout, keeps=False).batch(0)
    assert made["ids"].tolist() == [[1, 2, 3, 0, 0, 0]] * 2
    assert made["labels"].tolist() == [[-100, 2, 3, -100, -100, -100]] * 2
    whole = Stream(f"{tmp_path}/own.py:rows", Spec.load(data), layout, keeps=False).batch(0)
    assert whole["ids"].tolist() == [[1] * 6] * 2


def test_samples_fill_the_sequences_of_a_step_and_labels_are_those_that_were_asked_for(tmp_path: Path) -> None:
    marked = [
        {"ids": [1, 2, 3], "labels": [-100, 2, 3]},
        {"ids": [4, 5], "supervised": [0, 1]},
        {"ids": [6, 7, 8, 9], "supervised": [False, False, True, True]},
        {"ids": [10, 11], "labels": [10, 11]},
        {"ids": [12, 13], "labels": [-100, 13]},
        {"ids": [14, 15], "labels": [-100, 15]},
    ]
    code = "def items(rank, size): return iter(ITEMS)"
    first, second = rest(stream(tmp_path, code, marked, packing="documents"))[0], None
    assert first["input_ids"].tolist() == [[1, 2, 3, 4, 5, 0], [6, 7, 8, 9, 10, 11]]
    assert first["labels"].tolist() == [[-100, 2, 3, -100, 5, -100], [-100, -100, 8, 9, -100, 11]]
    assert first["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 0, 1]]
    first, second = rest(stream(tmp_path, code, marked, packing=False))[:2]
    assert first["input_ids"].tolist() == [[1, 2, 3, 0, 0, 0], [4, 5, 0, 0, 0, 0]]
    assert second["labels"].tolist() == [[-100, -100, 8, 9, -100, -100], [10, 11, -100, -100, -100, -100]]


def test_windows_of_packing_run_on_over_the_ends_and_ranks_have_their_own_items(tmp_path: Path) -> None:
    (first, second) = rest(stream(tmp_path, PLAIN))
    assert first["input_ids"].flatten().tolist() == list(range(1, 13))
    assert second["input_ids"].flatten().tolist() == list(range(13, 25))
    found = [rest(stream(tmp_path, PLAIN, dp=2, rank=rank, packing=False))[0]["input_ids"] for rank in range(2)]
    assert [each[:, 0].tolist() for each in found] == [[1, 6], [4, 10]]


def test_tensors_by_input_name_are_taken_as_the_rows_of_a_step(tmp_path: Path) -> None:
    code = """
import torch
def items(rank, size):
    for k in range(3):
        yield {n: torch.full((2, 6), 10 * rank + k) for n in ("input_ids", "labels", "position_ids")}
"""
    found = rest(stream(tmp_path, code, dp=2, rank=1))
    assert [int(each["labels"][1, 5]) for each in found] == [10, 11, 12]


@examples(40)
@given(
    st.lists(st.integers(2, 15), min_size=1, max_size=25),
    st.sampled_from([True, False, "documents"]),
    st.sampled_from(sorted(KINDS)),
    st.integers(0, 5),
)
def test_a_resume_at_any_step_gives_the_same_rest_and_no_token_comes_twice(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], packing: Any, kind: str, at: int
) -> None:
    numbers, folder = iter(range(1, 1000)), tmp_path_factory.mktemp("stream")
    items = [[next(numbers) for _ in range(size)] for size in sizes]
    whole = stream(folder, KINDS[kind], items, packing=packing)
    found, position = [], None
    try:
        while True:
            if len(found) == at:
                position = json.loads(json.dumps(whole._positions.get(at, whole._first)))
            found.append(whole.batch(len(found)))
    except StreamEnd:
        pass
    tokens = [i for batch in found for i in batch["input_ids"].flatten().tolist() if i]
    assert len(tokens) == len(set(tokens))
    if packing == "documents":  # nothing is lost but the last step
        pieces = [ids[k : k + LENGTH] for ids in items for k in range(0, len(ids), LENGTH)]
        assert sorted(tokens) == [i for piece in pieces if len(piece) > 1 for i in piece][: len(tokens)]
    if position is not None:
        again = rest(stream(folder, KINDS[kind], items, saved={"positions": [position]}, packing=packing), at)
        assert [{n: v.tolist() for n, v in b.items()} for b in again] == [
            {n: v.tolist() for n, v in b.items()} for b in found[at:]
        ]


def test_another_dp_size_skips_the_items_that_were_taken_or_is_refused_for_states(tmp_path: Path) -> None:
    def positions(code: str) -> dict[str, Any]:
        ranks = [stream(tmp_path, code, dp=2, rank=rank, packing=False) for rank in range(2)]
        for each in ranks:
            each.batch(0)
        return {"positions": [each._positions[1] for each in ranks]}

    alone = stream(tmp_path, PLAIN, saved=positions(PLAIN), packing=False)
    assert "taken by 2 dp ranks, are skipped by 1" in alone.told
    assert alone.batch(1)["input_ids"][:, 0].tolist() == [12, 17]  # two dp ranks had taken two each
    with pytest.raises(PlanError, match="holds states of a stream for 2 dp ranks, this run has 1"):
        stream(tmp_path, STATEFUL, saved=positions(STATEFUL), packing=False)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("yield {'ids': [1, 2]}; raise KeyError('gone')", "item 1 of .*own.py:items, for dp rank 0 of 1: KeyError"),
        ("yield {'ids': [1, 2]}; raise SystemExit(3)", "item 1 of .*SystemExit"),
        ("raise OSError('none')\n    yield", "item 0 of .*none"),
        ("return 3", "is not iterable"),
        ("yield [1, 2]", "item 0 of .* is a list, not a dict"),
        ("yield {'text': 'a'}", "has text, neither ids with labels or supervised, nor input_ids, labels, position_ids"),
        ("yield {'ids': [[1, 2]]}", r"has ids of the shape \[1, 2\]"),
        ("yield {'ids': [1.5]}", "float64, not integers in a row"),
        ("yield {'ids': []}", r"has ids of the shape \[0\]"),
        ("yield {'ids': [1, 2], 'labels': [-100]}", "has labels that are not those of its ids"),
        ("yield {'ids': [1, 2], 'labels': [-100, 3]}", "has labels that are not those of its ids"),
        ("yield {'ids': [1, 2], 'supervised': [1, 0]}", "has no label behind its first token"),
        ("yield {'ids': [1] * 9}", "item 0 of .* has 9 tokens, a sequence 6"),
        ("yield {n: [1] for n in ('input_ids', 'labels', 'position_ids')}", "has values that are no tensors"),
        ("yield {n: torch.zeros(1, 6) for n in ('input_ids', 'labels', 'position_ids')}", r"has shape \[1, 6\]"),
    ],
)
def test_an_error_of_the_stream_names_the_item_and_the_line(tmp_path: Path, body: str, words: str) -> None:
    code = f"import torch\ndef items(rank, size):\n    {body}\n"
    made = stream(tmp_path, code, packing="documents", overlong="refuse")
    with pytest.raises(PlanError, match=words) as error:
        rest(made)
    if "raise" in body:
        assert "own.py:4" in str(error.value)


def test_a_state_that_json_does_not_hold_is_refused(tmp_path: Path) -> None:
    code = STATEFUL.replace('{"at": self.at}', "{'at': object()}")
    with pytest.raises(PlanError, match="not JSON serializable"):
        rest(stream(tmp_path, code, packing=False))


MODEL = f"""
import sys, torch
sys.path.insert(0, {str(ROOT)!r})
from examples.gpt import GPT
def build():
    torch.manual_seed(0)
    return GPT(length={LENGTH}, width=16, num_layers=2, num_heads=2, dropout=0.0)

def numbers(rank, size):
    for k in range(rank, 13, size):
        yield {{"ids": [(7 * k + i) % 60 for i in range(2 + k % 5)]}}
def breaks(rank, size):
    yield from list(numbers(rank, size))[:3]
    if rank: raise ValueError("the third is bad")
    yield from numbers(rank, size)
def drawn(rank, size):
    import os
    for k in range(99): yield {{"ids": [k % 50, int(os.environ["RANK"]), 1]}}
"""


def job_in(folder: Path, function: str = "numbers", mesh: dict[str, int] | None = None, **more: Any) -> Job:
    (folder / "model.py").write_text(MODEL)
    spec = spec_with(4, **more.pop("data", {"packing": False})) | {"mesh": mesh or {"dp": 1}}
    del spec["inputs"]["labels"], spec["inputs"]["position_ids"]
    spec["inputs"]["targets"] = {"like": "input_ids"}
    spec["inputs"]["input_ids"]["high"] = 256
    (folder / "spec.yaml").write_text(yaml.safe_dump(spec))
    job = Job(f"{folder}/model.py:build", f"{folder}/spec.yaml", f"{folder}/model.py:{function}", 9, quiet=True)
    return replace(job, **more)


@pytest.mark.thorough
def test_its_end_ends_the_training_and_a_resume_goes_on_bitwise(tmp_path: Path) -> None:
    whole = run_rank(job_in(tmp_path)).rows
    assert len(whole) == 3  # of 13 samples, three steps of four
    for number in (1, 3):
        save = str(tmp_path / "saves")
        found = run_rank(job_in(tmp_path, num_steps=number, save=save, resume="auto")).rows
    assert [row.loss for row in found] == [row.loss for row in whole[1:]]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"compare": True}, "is a stream, which is read only once"),
        ({"data": {"validation": 0.5}}, "is a stream, which is read only once"),
        ({"mixture": (("MODEL:numbers", 0.5),)}, "is a stream, which cannot be part of a mixture"),
    ],
)
def test_options_that_a_stream_does_not_serve_are_refused(tmp_path: Path, more: dict[str, Any], words: str) -> None:
    job = job_in(tmp_path, **more)
    job = replace(job, mixture=tuple((job.data, share) for _, share in job.mixture))
    with pytest.raises(PlanError, match=words):
        check_stream(job, spec_of(job)) if not job.mixture else check_source(job)
    with pytest.raises(PlanError, match=r"--epochs needs data of a known size"):
        steps_of(replace(job, mixture=()), 2.0)
    with pytest.raises(PlanError, match="no 'none' in"):
        check_source(replace(job, mixture=(), data=job.data.replace("numbers", "none")))


def outcomes(jobs: list[Job]) -> list[Any]:
    """Of each job on this rank: its losses, or the words of its error."""
    found: list[Any] = []
    for job in jobs:
        try:
            found.append(len(run_rank(job).rows))
        except PlanError as error:
            found.append(str(error))
    return found


@pytest.mark.thorough
@pytest.mark.slow
def test_ranks_end_fail_and_differ_together(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("ends", "breaks", "drawn", "resumed")]
    for folder in folders:
        folder.mkdir()
    save = str(tmp_path / "saves")
    jobs = [
        job_in(folders[0], "numbers", {"dp": 2}),
        job_in(folders[1], "breaks", {"dp": 2}),
        job_in(folders[2], "drawn", {"tp": 2}),
        job_in(folders[3], "numbers", {"dp": 2}, num_steps=1, save=save),
        job_in(folders[3], "numbers", {"dp": 2}, num_steps=9, save=save, resume="auto"),
    ]
    first, second = Ranks(2, "processes").run(outcomes, jobs)
    assert first[0] == 3  # one rank has seven items, the other six
    assert first[1].endswith(second[1])
    assert "rank 1: item 3 of" in first[1]
    assert "the third is bad" in first[1]
    assert "model.py:14" in first[1]
    assert first[2] == second[2]
    assert "ranks 0 and 1 are of dp rank 0, but" in first[2]
    assert first[3:] == [1, 2]
