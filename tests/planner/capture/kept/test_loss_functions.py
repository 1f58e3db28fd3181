"""A capture with a loss of the user's is cached; another function, other code or another model is captured anew."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.tools.kept_captures import Processes

MODEL = """
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, ids):
        return self.head(self.embed(ids))

def build():
    return Model()
"""
LOSS = """
import helper
from torch.nn import functional as F

def loss(logits, batch):
    return helper.SCALE * F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

def twice(logits, batch):
    return 2 * loss(logits, batch)
"""
FILES = {"model.py": MODEL, "losses/model.py": LOSS, "losses/helper.py": "SCALE = 2\n"}  # files of one name
INPUTS = {"ids": {"shape": [8], "dtype": "int64", "high": 16}, "labels": {"like": "ids"}}
SPEC: dict[str, Any] = {
    "mesh": {"tp": 2},
    "batch": {"global": 4, "micro": 2},
    "inputs": INPUTS,
    "loss": "losses/model.py:loss",
}
CHANGES: dict[str, dict[str, Any]] = {
    "its file": {"files": FILES | {"losses/model.py": LOSS.replace("helper.SCALE", "3")}},
    "a file that it imports": {"files": FILES | {"losses/helper.py": "SCALE = 4\n"}},
    "another function": {"spec": {"loss": "losses/model.py:twice"}},
}
UNCERTAIN = {"files": FILES | {"losses/model.py": LOSS.replace("import helper", "import helper, time")}}


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    directory = tmp_path_factory.mktemp("kept")
    (directory / "losses").mkdir()
    found = Processes(directory, SPEC)
    first = found.plan(files=FILES)
    assert first.is_captured
    assert first.is_kept, first.told
    yield found
    found.end()


@pytest.mark.thorough
def test_the_second_process_reads_it(processes: Processes):
    again = processes.plan(files=FILES)
    assert {line.partition(":")[0] for line in again.told} == {"read"}  # at two sizes of the batch


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_captured_anew(processes: Processes, name: str):
    answer = processes.plan(**{"files": FILES, **CHANGES[name]})
    assert answer.is_captured, answer.told
    assert answer.is_kept, answer.told


def test_a_loss_that_may_depend_on_more_is_captured_each_time(processes: Processes):
    answer = processes.plan(**UNCERTAIN)
    assert answer.is_captured
    assert not answer.is_kept
