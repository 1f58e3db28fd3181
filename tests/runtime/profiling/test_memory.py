"""What the plan predicts is what ranks hold, and the command says so."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from examples.gpt import GPT
from planner import plan
from planner.capture.model.reference import load_model
from planner.frozen_plan import Plan
from planner.spec.spec import Spec
from runtime.engine.engine import Engine
from runtime.profiling.memory import MemoryWatch, compare_memory, held_tensors, measured
from runtime.report.memory_rows import Compared, MemoryReport
from runtime.verify.batches import random_batch
from tests.tools.limits import HANG_SECONDS
from tests.tools.paths import ROOT

MODEL = """
import sys
sys.path.insert(0, {root!r})
from examples.gpt import GPT

def build():
    return GPT(vocabulary=256, length=32, width=32, num_layers=4, num_heads=2, dropout={dropout})
"""
GATED = """
import torch
from torch import nn
from torch.nn import functional as F

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(32))
        self.gate, self.up, self.down = nn.Linear(32, 128), nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x):
        y = x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * self.scale
        return x + self.down(self.gate(y) * torch.sigmoid(self.gate(y)) * self.up(y))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, 32), nn.Linear(32, 256)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, input_ids, targets):
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())

def build():
    torch.manual_seed(0)
    return Net()
"""
SPEC = """
mesh: {{{mesh}}}
batch: {{global: 16, micro: 2}}
inputs: {{input_ids: {{shape: [32], dtype: int64, high: 256}}, targets: {{like: input_ids}}}}
"""


def written(directory: Path, mesh: str, more: str = "", dropout: float = 0.1) -> tuple[str, str]:
    (directory / "tiny.py").write_text(MODEL.format(root=str(ROOT), dropout=dropout))
    (directory / "spec.yaml").write_text(SPEC.format(mesh=mesh) + more)
    return f"{directory / 'tiny.py'}:build", str(directory / "spec.yaml")


@pytest.mark.thorough
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_one_process_holds_what_the_plan_predicts(tmp_path: Path, recompute: str) -> None:
    report = compare_memory(*written(tmp_path, "tp: 1", f"recompute: {recompute}\n"))
    assert report.passed, str(report)
    by_name = {row.category: row for row in report.rows}
    assert abs(by_name["at the peak"].difference) < 0.01
    assert "AS PREDICTED" in str(report)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_compiled_pieces_save_what_the_plan_predicts(tmp_path: Path, recompute: str) -> None:
    more = f"recompute: {recompute}\ncompile: true\n"
    _, spec = written(tmp_path, "tp: 1", more)
    (tmp_path / "gated.py").write_text(GATED)
    report = compare_memory(model := f"{tmp_path / 'gated.py'}:build", spec)
    assert report.passed, str(report)
    op_by_op = compare_memory(model, written(tmp_path, "tp: 1", f"recompute: {recompute}\n")[1])
    by_name, without = ({row.category: row for row in each.rows} for each in (report, op_by_op))
    assert by_name["activations"].measured <= without["activations"].measured
    assert recompute != "none" or by_name["activations"].measured < 0.9 * without["activations"].measured


@pytest.mark.thorough
def test_an_engine_that_evaluates_holds_parameters_and_one_microbatch(tmp_path: Path) -> None:
    reference, spec_path = written(tmp_path, "tp: 1")
    report = compare_memory(reference, spec_path, evaluates=True)
    assert report.passed, str(report)
    assert [row.category for row in report.rows] == ["parameters", "activations", "keys and values"]
    training = plan(load_model(reference), Spec.load(spec_path))
    (row,), (alone,) = training.memory, training.evaluation_memory()
    assert alone.total == sum(each.predicted for each in report.rows[:2])
    assert alone.parameters <= row.parameters
    assert alone.total < 0.4 * row.total


@pytest.mark.thorough
def test_an_audit_is_no_part_of_the_step_that_is_measured(tmp_path: Path) -> None:
    report = compare_memory(*written(tmp_path, "tp: 1", "audit: {every: 1}\n", dropout=0.0))
    assert report.passed, str(report)
    assert len(report.actions) == 2 * 8


INTERLEAVED = "pipeline: {schedule: interleaved_1f1b}\ntensor_parallel: {sequence_parallel: true}\n"
MESSAGES = 16384  # bytes of two between stages, of four where tp cuts them
WAITING = "pipeline: {schedule: zero_bubble}\n"  # what a backward puts aside for its W is held too


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "more"),
    [("tp: 2, pp: 2, vpp: 2", INTERLEAVED), ("pp: 2, dp: 2", ""), ("tp: 2, pp: 2", WAITING)],
    ids=["tp2-pp2-vpp2-sp", "pp2-dp2", "tp2-pp2-waiting"],
)
def test_ranks_of_a_pipeline_hold_what_the_plan_predicts(tmp_path: Path, mesh: str, more: str) -> None:
    report = compare_memory(*written(tmp_path, mesh, more))
    assert report.passed, str(report)
    assert len({row.rank for row in report.rows}) == 4
    peaks = [row for row in report.rows if row.category == "at the peak"]
    assert all(abs(row.difference) < 0.03 for row in peaks), str(report)
    assert {action.rank for action in report.actions} == {0, 1, 2, 3}
    told = [(a.measured, a.predicted) for a in report.actions if a.predicted is not None]
    assert bool(told) == (more != WAITING)
    # messages that another rank has not taken over yet may be held at the end of an action, or not
    assert all(-1024 <= measured - predicted <= MESSAGES for measured, predicted in told), told


FROZEN = """

def build_frozen():
    model = build()
    model.blocks[0].requires_grad_(False)
    return model
"""


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["tp: 2", "dp: 2"])
def test_frozen_weights_that_ranks_could_share_are_counted_once(tmp_path: Path, mesh: str) -> None:
    """Zero 3 lays frozen parameters out in a buffer; with one rank of dp it has all of each."""
    reference, spec_path = written(tmp_path, mesh, "optimizer: {zero: 3}\n")
    with (tmp_path / "tiny.py").open("a") as file:
        file.write(FROZEN)
    report = compare_memory(reference.replace(":build", ":build_frozen"), spec_path)
    assert report.passed, str(report)
    assert all(row.measured == row.predicted for row in report.rows if row.category == "parameters")


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_values_that_are_gathered_again_are_as_predicted(tmp_path: Path, recompute: str) -> None:
    more = f"tensor_parallel: {{sequence_parallel: true}}\nrecompute: {recompute}\n"
    report = compare_memory(*written(tmp_path, "tp: 2", more))
    assert report.passed, str(report)
    peaks = [row for row in report.rows if row.category == "at the peak"]
    assert len(peaks) == 2
    assert all(abs(row.difference) < 0.005 for row in peaks), str(report)


@pytest.mark.thorough
def test_a_plan_that_tells_too_little_is_seen(tmp_path: Path) -> None:
    model_ref, spec_path = written(tmp_path, "tp: 1")
    spec, model = Spec.load(spec_path), load_model(model_ref)
    made = plan(model, spec)
    (row,) = made.memory
    for part in ("gradients", "activations"):
        less = replace(row, **{part: int(getattr(row, part) * 0.95)}, total=-1)
        report = MemoryReport(tuple(measured(replace(made, memory=(less,)), two(spec, made)).rows), (), ())
        assert [row.category for row in report.rows if not row.passed] == [part]
        assert "DIFFERS FROM THE PLAN" in str(report)


def two(spec: Spec, made: Plan) -> list:
    return [random_batch(spec, made, seed) for seed in range(2)]


def test_a_difference_is_a_part_of_what_was_measured() -> None:
    assert Compared(0, "activations", 97, 100, 0.03).passed
    assert not Compared(0, "activations", 104, 100, 0.03).passed
    assert Compared(0, "at the peak", 200, 100).passed
    assert MemoryReport((Compared(0, "gradients", 99, 100, 0.01),), (), ()).to_dict()["rows"][0]["difference"] == -0.01


OF_ONE_RANK = {
    "mesh": {"tp": 1},
    "batch": {"global": 4, "micro": 2},
    "inputs": {"input_ids": {"shape": [8], "dtype": "int64", "high": 32}, "targets": {"like": "input_ids"}},
}
EXTRA = 1 << 20


def kept(patch: pytest.MonkeyPatch, until: str = "") -> list[int]:
    """Bytes at each action of a step. A thread holds ``EXTRA`` bytes of each forward ``until`` the watch has "waited"
    for it, or the step's "end"."""
    spec = Spec.load(OF_ONE_RANK)
    decided = plan(GPT(vocabulary=32, length=8, width=8, num_layers=1, num_heads=2), spec)
    batch = random_batch(spec, decided, 0)
    threads: list[threading.Thread] = []
    let_go = threading.Event()

    def wait(_: float) -> None:
        if until == "waited":
            let_go.set()
            for thread in threads:
                thread.join(HANG_SECONDS)

    patch.setattr("runtime.profiling.memory.time", SimpleNamespace(sleep=wait))
    with Engine(decided) as engine:
        watch = MemoryWatch(engine.executor, held_tensors(engine))

        @contextmanager
        def around(action: Any, step: Any) -> Iterator[None]:
            with watch.around(action, step):
                yield
                let_go.clear()
                made = [torch.zeros(EXTRA, dtype=torch.uint8)] if until else []
                threads.append(threading.Thread(target=hold, args=(made, let_go)))
                threads[-1].start()

        engine.executor.around = around
        engine.train_step(batch)
    let_go.set()
    for thread in threads:
        thread.join(HANG_SECONDS)
    return [moment.kept for moment in watch.moments]


def hold(made: list[torch.Tensor], let_go: threading.Event) -> None:
    let_go.wait(HANG_SECONDS)
    made.clear()


@pytest.mark.thorough
def test_a_tensor_that_a_thread_holds_a_moment_longer_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kept(monkeypatch, until="waited") == kept(monkeypatch)


@pytest.mark.thorough
def test_a_tensor_that_a_thread_goes_on_holding_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert max(kept(monkeypatch, until="end")) >= max(kept(monkeypatch)) + EXTRA
