"""Samples with 1 to 900 labels train as plain PyTorch does with those labels, on every layout."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn

from examples.gpt import GPT
from planner.spec.inputs import DataSpec
from runtime.data.objectives.next_token import next_token
from runtime.data.token_writer import TokenWriter
from runtime.data.tokens import LABEL, ROW, Piece, Tokens
from runtime.training.job import Job
from runtime.training.loop import run_rank
from tests.tools.paths import ROOT
from tests.tools.ranks import Ranks
from tests.tools.simulated_mesh import equals_one_process
from tests.tools.texts import by_hand

LENGTH, VOCABULARY = 1024, 64
LABELS = (1, 900, 37, 300)
LAYOUTS = ({}, {"tp": 2}, {"cp": 2}, {"dp": 2}, {"tp": 2, "dp": 2})


def build() -> GPT:
    torch.manual_seed(3)
    return GPT(VOCABULARY, LENGTH, 16, 1, 2).double()


def samples() -> Tokens:
    draw = np.random.default_rng(1)
    made = by_hand(*[draw.integers(3, VOCABULARY, 40 + n).tolist() for n in LABELS], vocabulary_size=VOCABULARY)
    marks = np.zeros(len(made.ids), np.uint8)
    for end, number in zip(made.ends, LABELS, strict=True):
        marks[end - number : end] = LABEL
    marks[[0, *made.ends[:-1]]] |= ROW
    return replace(made, marks=marks, is_supervised=True)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh", LAYOUTS, ids=str)
def test_losses_and_gradients_are_those_of_plain_pytorch(mesh: dict[str, int]) -> None:
    tokens = samples()
    objective = next_token(tokens, LENGTH, DataSpec(packing=False), 1)
    rows = [objective.sample(i, 0) for i in range(len(LABELS))]
    stacked = {name: np.stack([row[role] for row in rows]) for name, role in ROLES.items()}
    batch = {name: torch.from_numpy(rows) for name, rows in stacked.items()}
    equals_one_process(
        build, batch, mesh, loss=1e-6, each=(1e-6, 1e-9), alone=lambda model: loss_of_labels(model, tokens)
    )


def loss_of_labels(model: nn.Module, tokens: Tokens) -> Tensor:
    """Of the labels of each sample alone."""
    total = torch.zeros((), dtype=torch.float64)
    for end, number, size in zip(tokens.ends, LABELS, np.diff(tokens.ends, prepend=0), strict=True):
        ids = torch.from_numpy(np.asarray(tokens.ids[end - size : end]))
        logits, _ = model(ids[None], torch.full_like(ids[None], -100))
        total = total + F.cross_entropy(logits[0, -number - 1 : -1], ids[-number:], reduction="sum")
    return total / sum(LABELS)


ROLES = {"input_ids": "tokens", "targets": "next_tokens"}


MODEL = f"""
import sys, torch
sys.path.insert(0, {str(ROOT)!r})
from examples.gpt import GPT
def build():
    torch.manual_seed(3)
    return GPT({VOCABULARY}, {LENGTH}, 16, 2, 2).double()
"""
STEPS = 3


def job_in(folder: Path, mesh: dict[str, int], size: int = len(LABELS), zero: int = 1, **more: Any) -> Job:
    """Steps of plain descent over ``size`` of the samples, in float64."""
    (folder / "model.py").write_text(MODEL)
    made = samples()
    with TokenWriter(folder / "sft.tokens", made.tokenization, {}) as writer:
        for begin, end in zip([0, *made.ends[:-1]], made.ends, strict=True):
            marks = np.asarray(made.marks[begin:end])
            writer.add([Piece(np.asarray(made.ids[begin:end]), marks, int((marks & LABEL > 0).sum()), has_end=True)])
        writer.finish({})
    ids = {"shape": [LENGTH], "dtype": "int64", "high": VOCABULARY}
    spec = {
        "mesh": mesh,
        "batch": {"global": size, "micro": 1},
        "inputs": {"input_ids": ids, "targets": {"like": "input_ids"}},
        "data": {"packing": False},
        "precision": {"parameters": "float64"},
        "optimizer": {"name": "sgd", "lr": 0.5, "zero": zero, "weight_decay": 0.0, "clip_grad_norm": None},
    }
    (folder / "spec.yaml").write_text(yaml.safe_dump(spec))
    job = Job(f"{folder}/model.py:build", f"{folder}/spec.yaml", str(folder / "sft.tokens"), STEPS, quiet=True)
    return replace(job, **more)


def losses_of_plain_pytorch() -> list[float]:
    torch.manual_seed(3)
    model, tokens, found = GPT(VOCABULARY, LENGTH, 16, 2, 2).double(), samples(), []
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of_labels(model, tokens)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "zero"),
    [
        ({"dp": 2}, 3),
        pytest.param({"pp": 2}, 1, marks=pytest.mark.thorough),
        pytest.param({"tp": 2, "pp": 2}, 1, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_runs_train_on_the_same_losses_as_plain_pytorch(tmp_path: Path, mesh: dict[str, int], zero: int) -> None:
    size = math.prod(mesh.values())
    rows = Ranks(size, "processes").run(run_rank, job_in(tmp_path, mesh, zero=zero))[0].rows
    assert [row.loss for row in rows] == pytest.approx(losses_of_plain_pytorch(), rel=1e-6)


@pytest.mark.thorough
def test_labels_are_the_same_behind_a_resume_inside_an_epoch(tmp_path: Path) -> None:
    whole = run_rank(job_in(tmp_path, {"dp": 1}, size=2, num_steps=5)).rows
    for number in (1, 5):
        save = str(tmp_path / "saves")
        found = run_rank(job_in(tmp_path, {"dp": 1}, size=2, num_steps=number, save=save, resume="auto")).rows
    assert [row.loss for row in found] == [row.loss for row in whole[1:]]
