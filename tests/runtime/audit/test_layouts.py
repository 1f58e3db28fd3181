"""Audits of every layout: equal to one process and silent; a module that computes otherwise stops all ranks alike."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime import Engine
from runtime.audit.audit import AuditError
from tests.tools.laboratory import Case
from tests.tools.limits import HANG_SECONDS
from tests.tools.paths import ROOT

AUDIT = {"audit": {"every": 1}}


def audited(decided: Any, batches: list[dict[str, Tensor]], local: bool) -> tuple[list[float], str, float]:
    """Losses of audited steps; then what each rank says where rank 0's module computes otherwise; and a step after."""
    model, rank = decided.model, torch.distributed.get_rank()
    with Engine(decided, timeout_seconds=HANG_SECONDS) as engine:
        size = len(next(iter(batches[0].values()))) // engine.mesh.dp_size
        rows = slice(engine.mesh.dp_rank * size, (engine.mesh.dp_rank + 1) * size) if local else slice(None)
        given = [{name: value[rows] for name, value in batch.items()} for batch in batches]
        losses, before = [engine.train_step(batch, local=local).loss for batch in given[:2]], engine.step_index
        hook = model.register_forward_pre_hook(_roll, with_kwargs=True) if rank == 0 else None
        text = ""
        try:
            engine.train_step(given[2], local=local)
        except AuditError as error:
            text = str(error)
        assert engine.step_index == before
        if hook is not None:
            hook.remove()
        return losses, text, engine.train_step(given[2], local=local).loss


def unaudited(decided: Any, batches: list[dict[str, Tensor]]) -> list[float]:
    with Engine(decided, timeout_seconds=HANG_SECONDS) as engine:
        return [engine.train_step(batch).loss for batch in batches]


def _roll(module: Any, args: Any, kwargs: dict[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
    name = next(iter(kwargs))
    return args, {**kwargs, name: kwargs[name].roll(1, -1)}


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "mesh", "local"),
    [
        ("gpt2", {"tp": 2, "pp": 2}, False),
        ("gpt2", {"pp": 2, "dp": 2}, True),
        ("llama", {"tp": 2, "cp": 2}, False),
    ],
    ids=["tp2-pp2", "pp2-dp2-local", "tp2-cp2"],
)
def test_all_ranks_stop_at_the_audit_that_differs_and_train_as_without_it(lab, model, mesh, local):
    results = lab.run(Case(model, mesh, AUDIT, job=audited, job_arguments=(local,)))
    truth = lab.run(Case(model, mesh, job=unaudited))[0]
    assert [[*losses, last] for losses, _, last in results] == [truth] * len(results)
    texts = {text for _, text, _ in results}
    assert len(texts) == 1
    assert texts.pop().startswith("audit of step 3: the engine has loss ")


MODEL = """
from pathlib import Path
import torch
from torch import nn

COUNTER = Path(__file__).with_name("calls")

class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(256, 8), nn.Linear(8, 256)

    def forward(self, input_ids, targets):
        calls = int(COUNTER.read_text()) + 1
        COUNTER.write_text(str(calls))
        loss = nn.functional.cross_entropy(self.head(self.tokens(input_ids)).flatten(0, 1), targets.flatten())
        return loss * 1.01 if calls >= 60 else loss
"""
SPEC = """
mesh: {}
batch: {global: 4, micro: 1}
inputs: {input_ids: {shape: [16], dtype: int64, high: 256}, targets: {like: input_ids}}
"""


@pytest.mark.thorough
@pytest.mark.slow
def test_train_ends_with_exit_code_1_and_one_message(tmp_path):
    for name, text in (("counting.py", MODEL), ("spec.yaml", SPEC), ("calls", "0")):
        (tmp_path / name).write_text(text)
    command = ["train", f"{tmp_path / 'counting.py'}:Counting", str(tmp_path / "spec.yaml"), "--data", "stdlib"]
    ended = subprocess.run(
        [sys.executable, "-m", "runtime.cli", *command, "--steps", "80", "--audit", "1", "--quiet"],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 1, ended.stderr
    assert "Traceback" not in ended.stderr
    assert re.search(r"^Error: audit of step \d+: the engine has loss \d", ended.stderr, re.MULTILINE)
