"""verify is green for a right plan and red when any exchange is missing from it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planner import plan
from planner.capture.gradients.applications import LowestPrecision
from planner.frozen_plan import Plan
from planner.sharding.shards import decide_shards
from planner.spec.spec import Spec
from runtime.audit.own_module import Tolerance
from runtime.verify import run
from runtime.verify.batches import random_batch
from runtime.verify.comparison import compare_gradients, compare_parameters, compare_value
from runtime.verify.run import VerifyReport, _last_error, verify
from tests.passes.partition.batch import test_id_ranges as ids
from tests.tools.paths import ROOT

MODEL = """
import sys
sys.path.insert(0, {root!r})
from examples.gpt import GPT

def build():
    return GPT(vocabulary=37, length=8, width=16, num_layers=2, num_heads=2, dropout=0.1).double()
"""
SPEC = """
mesh: {{{mesh}}}
batch: {{global: 8, micro: 2}}
inputs: {{input_ids: {{shape: [8], dtype: int64, high: 37}}, targets: {{like: input_ids}}}}
optimizer: {{lr: 1.0e-3}}
"""

BFLOAT16 = "precision: {parameters: bfloat16}\n"


@pytest.fixture
def files(tmp_path):
    root = str(ROOT)

    def write(mesh: str) -> tuple[str, str]:
        (tmp_path / "tiny.py").write_text(MODEL.format(root=root))
        (tmp_path / "spec.yaml").write_text(SPEC.format(mesh=mesh))
        return f"{tmp_path / 'tiny.py'}:build", str(tmp_path / "spec.yaml")

    return write


def freeze(monkeypatch: pytest.MonkeyPatch, fqn: str) -> None:
    """The program of one rank has this trainable parameter as a constant, as of a capture that loses it."""
    beside = run.run_beside

    def run_frozen(plan: Plan, *args: Any, **options: Any) -> Any:
        source, _ = plan.to_run()
        program, values = source.program, dict(plan.model.named_parameters())
        name = next(node for node, parameter in program.parameters.items() if parameter == fqn)
        del program.parameters[name]
        program.constants[name] = values[fqn].detach().clone().to(program.node(name).meta["val"].dtype)
        shards = decide_shards(Spec.load({**plan.spec, "cluster": None}), source)
        return beside(replace(plan, shards=shards), *args, **options)

    monkeypatch.setattr(run, "run_beside", run_frozen)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh", ["tp: 1", pytest.param("tp: 2, pp: 2", marks=pytest.mark.slow)])
def test_a_right_plan_is_equal_in_loss_norm_every_gradient_and_every_parameter(files, mesh):
    report = verify(*files(mesh), steps=3)
    assert report.passed, str(report)
    kinds = [row.kind for row in report.rows]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {"loss": 3, "norm": 3, "gradient": 87, "parameter": 87}
    assert {row.step for row in report.rows if row.kind == "parameter"} == {1, 2, 3}
    assert "dropout is off" in str(report)
    assert str(report).endswith("EQUAL to one process")


def test_a_model_without_dropout_is_not_said_to_have_it_off(tmp_path):
    text = MODEL.format(root=str(ROOT)).replace("dropout=0.1", "dropout=0.0")
    (tmp_path / "tiny.py").write_text(text)
    (tmp_path / "spec.yaml").write_text(SPEC.format(mesh="tp: 1"))
    report = verify(f"{tmp_path / 'tiny.py'}:build", str(tmp_path / "spec.yaml"))
    assert report.passed, str(report)
    assert "dropout" not in str(report)


LARGEST = """
import torch
import torch.nn.functional as F
from torch import nn

class Largest(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(37, 8), nn.Linear(8, 37)

    def forward(self, input_ids, targets):
        each = F.cross_entropy(self.head(self.embed(input_ids)).transpose(1, 2), targets, reduction="none")
        return each[:, 0].max()

def build():
    return Largest().double()
"""


def test_where_the_plan_warns_of_averages_several_uneven_batches_are_drawn_and_the_last_line_says_so(tmp_path):
    (tmp_path / "largest.py").write_text(LARGEST)
    (tmp_path / "spec.yaml").write_text(SPEC.format(mesh="tp: 1"))
    report = verify(f"{tmp_path / 'largest.py'}:build", str(tmp_path / "spec.yaml"))
    assert {row.step for row in report.rows} == {1, 2, 3, 4}
    assert not report.passed
    last = str(report).splitlines()[-1]
    assert last.startswith("DIFFERENT from one process on 4 batches; the plan warns: ")
    assert last.endswith("it is averaged over microbatches")


COUNTING = """
from pathlib import Path
import torch
from torch import nn

CALLS, OTHER = Path({calls!r}), {other}

class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 4).double()

    def forward(self, x):
        calls = int(CALLS.read_text()) + 1
        CALLS.write_text(str(calls))
        return self.up(x).square().sum() * (1.001 if calls == OTHER else 1.0)

def build():
    torch.manual_seed(0)
    return Counting()
"""


def test_a_model_that_computes_otherwise_in_its_third_update_alone_differs_first_there(tmp_path):
    """It counts its calls on a disk, where no capture sees them."""
    spec, calls = tmp_path / "spec.yaml", tmp_path / "calls"
    spec.write_text("{mesh: {}, batch: {global: 4, micro: 2}, inputs: {x: {shape: [4], dtype: float64}}}")

    def verified(steps: int, other: int) -> VerifyReport:
        calls.write_text("0")
        (tmp_path / "counting.py").write_text(COUNTING.format(calls=str(calls), other=other))
        return verify(f"{tmp_path / 'counting.py'}:build", str(spec), steps=steps)

    assert verified(steps=1, other=0).passed
    first = int(calls.read_text()) - 1  # the call of the one process; the last one asks whether the model draws
    report = verified(steps=5, other=first + 2)
    assert min(row.step for row in report.failed_rows) == 3
    of_third = [(row.kind, row.name) for row in report.failed_rows if row.step == 3]
    assert {("loss", ""), ("norm", ""), ("gradient", "up.weight"), ("gradient", "up.bias")} <= {*of_third}
    assert "first difference: step 3 of 5\n  loss differs by 9.99e-04 (allowed 1.0e-10, step 3)" in str(report)
    assert not any(row.kind == "loss" and row.step != 3 for row in report.failed_rows)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize(("more", "number"), [*(("", n) for n in (0, 3, 8)), *((BFLOAT16, n) for n in (None, 0, 5))])
def test_without_one_collective_the_comparison_is_red(files, more, number):
    model, spec = files("tp: 2")
    Path(spec).write_text(Path(spec).read_text() + more)
    report = verify(model, spec, remove_collective=number)
    assert report.passed == (not report.failed_rows) == (number is None), str(report)
    assert str(report).endswith("EQUAL to one process" if report.passed else "DIFFERENT from one process")


def test_what_a_failed_rank_shows_below_its_error_is_not_its_reason():
    text = "rank 1 of 2 failed:\nTraceback\n  File\nStepError: rank 1, step 0: boom\n  step  rank0\n  0     >F0.0<\n"
    assert _last_error(text) == "StepError: rank 1, step 0: boom"


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["blocks.0.mlp.down.weight", "norm.bias"])
def test_a_frozen_parameter_makes_the_comparison_red_and_is_named(monkeypatch, files, name):
    freeze(monkeypatch, name)
    report = verify(*files("tp: 1"))
    assert not report.passed
    assert [row.name for row in report.failed_rows if row.kind == "gradient"] == [name]
    assert ("parameter", name) in [(row.kind, row.name) for row in report.failed_rows]
    assert f"gradient {name} is missing or has NaN or Inf" in str(report)
    assert str(report).endswith("DIFFERENT from one process")


@pytest.mark.thorough
def test_bfloat16_is_equal_within_the_rounding_of_its_parameters(monkeypatch, files):
    model, spec = files("tp: 1")
    Path(spec).write_text(Path(spec).read_text().replace("lr: 1.0e-3", "lr: 1.5e-4") + BFLOAT16)
    report = verify(model, spec, steps=3)
    assert report.passed, str(report)
    assert "tolerances for bfloat16" in str(report)
    freeze(monkeypatch, "blocks.1.attention.qkv.weight")
    frozen = verify(model, spec)
    failed = [row.name for row in frozen.failed_rows if row.kind == "gradient"]
    assert failed == ["blocks.1.attention.qkv.weight"]


def test_a_quarter_of_the_labels_is_ignored_where_the_loss_skips_some(files):
    from planner.capture.model.reference import load_model

    reference, spec = files("tp: 1")
    decided = plan(load_model(reference), spec)
    assert decided.to_run()[0].ignored_labels == {"targets": -100}
    batch = random_batch(Spec.load(spec), decided, 0)
    assert 0.1 < (batch["targets"] == -100).double().mean() < 0.4
    assert batch["input_ids"].min() >= 0
    assert batch["input_ids"].max() < 37


def test_no_label_is_ignored_where_the_model_reads_it_elsewhere_too():
    def with_margin(logits: Tensor, labels: Tensor) -> Tensor:
        logits = logits - 0.2 * F.one_hot(labels, ids.CLASSES)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    numbers = {"shape": [ids.LENGTH], "dtype": "int64", "high": ids.CLASSES}
    spec = Spec.load({"mesh": {}, "batch": {"global": 4, "micro": 2}, "inputs": {"ids": numbers, "labels": numbers}})
    decided = plan(ids.Model(ids.table, with_margin), spec)
    assert decided.to_run()[0].ignored_labels == {"labels": -100}
    assert random_batch(spec, decided, 0)["labels"].min() >= 0


def test_a_tolerance_of_zero_allows_no_difference():
    allowed = Tolerance.of(torch.float32, 1e-3, 0.0)
    assert (allowed.of_loss(1.0), allowed.gradient) == (0.0, 0.0)
    truth = torch.ones(3)
    assert not compare_gradients({"w": truth * (1 + 1e-6)}, {"w": truth}, allowed)[0].passed
    assert compare_gradients({"w": truth}, {"w": truth}, allowed)[0].passed


def test_the_lowest_precision_inside_a_model_rules_its_tolerance():
    with LowestPrecision() as seen:
        torch.ones(2, dtype=torch.float64).exp().to(torch.float32).sum()
    assert seen.dtype == torch.float32
    assert Tolerance.of(seen.dtype, lr=1e-3).loss == 2e-6
    with LowestPrecision() as seen:
        torch.ones(2, dtype=torch.float64).exp()
    assert Tolerance.of(seen.dtype, lr=1e-3).loss == 1e-10


def test_a_missing_or_undefined_tensor_is_never_equal():
    allowed = Tolerance.of(torch.float64, lr=1e-3)
    truth = {"a": torch.ones(2), "b": torch.ones(2)}
    rows = compare_gradients({"b": torch.tensor([1.0, torch.nan])}, truth, allowed)
    assert [row.passed for row in rows] == [False, False]
    assert str(rows[0]) == "gradient a is missing or has NaN or Inf (allowed 1.0e-08)"
    assert not compare_value("loss", float("nan"), 1.0, 1e-10, 1).passed


def test_a_gradient_of_pure_rounding_noise_is_held_against_the_largest_one():
    allowed = Tolerance.of(torch.float64, lr=1e-3)
    truth = {"weight": torch.tensor([1.0]).double(), "key.bias": torch.tensor([1e-18]).double()}
    found = {"weight": torch.tensor([1.0]).double(), "key.bias": torch.tensor([-3e-18]).double()}
    assert all(row.passed for row in compare_gradients(found, truth, allowed))
    wrong = {"weight": torch.tensor([1.0]).double(), "key.bias": torch.tensor([1e-9]).double()}
    assert not compare_gradients(wrong, truth, allowed)[1].passed


def test_a_gradient_that_one_side_alone_has_is_a_difference():
    allowed = Tolerance.of(torch.float32, lr=1e-3)
    truth = {"both": torch.ones(2), "lost": torch.ones(2), "unused": None, "invented": None}
    found = {"both": torch.ones(2), "unused": torch.zeros(2), "invented": torch.ones(2), "foreign": torch.ones(1)}
    verdicts = {row.name: row.passed for row in compare_gradients(found, truth, allowed)}
    assert verdicts == {"both": True, "lost": False, "unused": True, "invented": False, "foreign": False}


def test_a_parameter_without_an_update_is_equal_in_every_bit():
    allowed, value = Tolerance.of(torch.float32, lr=1e-3), torch.ones(2)
    near = {"a": torch.nextafter(value, torch.zeros(2))}
    assert compare_parameters(near, {"a": value}, allowed)[0].passed
    assert not compare_parameters(near, {"a": value}, allowed, still={"a"})[0].passed
    assert not compare_parameters({}, {"a": value}, allowed)[0].passed
    assert not compare_parameters({"a": torch.tensor([1.0, torch.nan])}, {"a": value}, allowed)[0].passed


def test_one_step_of_rounding_is_allowed_to_a_bfloat16_parameter_and_two_are_not():
    allowed = Tolerance.of(torch.bfloat16, lr=1e-6)
    truth = torch.tensor([0.01, 0.07, 1.0, 3.0], dtype=torch.bfloat16)
    bits = truth.view(torch.int16)
    one, two = (bits + 1).view(torch.bfloat16), (bits + 2).view(torch.bfloat16)
    assert compare_parameters({"a": one}, {"a": truth}, allowed)[0].passed
    for place in range(4):
        wrong = truth.clone()
        wrong[place] = two[place] if place < 3 else two[place] * 2
        assert not compare_parameters({"a": wrong}, {"a": truth}, allowed)[0].passed


class ShiftedIntoTheEmbedding(nn.Module):
    """A decoder that reads its labels one place later, as T5 does, and ignores none of them there."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)

    def forward(self, labels: Tensor) -> Tensor:
        shifted = labels.new_zeros(labels.shape)
        shifted[..., 1:] = labels[..., :-1].clone()
        return F.cross_entropy((self.table(shifted) @ self.table.weight.t()).flatten(0, 1), labels.flatten())


def test_labels_that_are_looked_up_one_place_later_are_not_ignored() -> None:
    inputs = {"labels": {"shape": [5], "dtype": "int64", "high": 7}}
    made = plan(ShiftedIntoTheEmbedding(), {"mesh": {"tp": 1}, "batch": {"global": 2, "micro": 2}, "inputs": inputs})
    assert made.to_run()[0].ignored_labels == {}


def test_a_neuron_that_rounding_turns_off_is_allowed_in_bfloat16_and_a_lost_half_is_not():
    truth = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    neuron = truth.clone()
    neuron[3] *= 0.6
    for dtype, passes in ((torch.bfloat16, True), (torch.float32, False)):
        (row,) = compare_gradients({"w": neuron}, {"w": truth}, Tolerance.of(dtype, lr=1e-3))
        assert row.passed == passes, str(row)
        (row,) = compare_gradients({"w": truth / 2}, {"w": truth}, Tolerance.of(dtype, lr=1e-3))
        assert not row.passed, str(row)


@pytest.mark.thorough
def test_the_rows_of_the_fullest_rank_of_experts_are_reported(tmp_path: Path) -> None:
    """Every token chooses expert 0, which one of two ranks has."""
    (tmp_path / "tiny.py").write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        "import torch\nfrom tests.models.experts import Layer, Net, masks\n\n"
        "def build():\n    model = Net(Layer(masks, top_k=1)).double()\n    with torch.no_grad():\n"
        "        model.layer.gate.bias[0] += 50.0\n    return model\n"
    )
    (tmp_path / "spec.yaml").write_text(
        "mesh: {dp: 2, ep: 2}\nbatch: {global: 4, micro: 2}\n"
        "inputs: {input_ids: {shape: [6], dtype: int64, high: 24}, labels: {like: input_ids}}\n"
    )
    report = verify(f"{tmp_path / 'tiny.py'}:build", str(tmp_path / "spec.yaml"))
    assert report.passed, str(report)
    assert "experts: the fullest rank of ep had 2.00 times the mean of rows" in report.notes
