"""Cases of the user's own model: what the spec writes stays, all else is drawn; what cannot be begun is one error."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from planner.spec.spec import Spec
from runtime.cli import app
from runtime.fuzz.case import Case, OwnModel
from runtime.fuzz.forks import prepare
from runtime.fuzz.specs import FIELDS, NOT_KEYS, Facts, continued_on, split_of
from tests.fuzz.drawing import case_with, drawn_case
from tests.fuzz.not_drawn import EXCLUDED, FOLLOWS
from tests.test_spec_keys import leaves

MODEL = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.inner, self.head = nn.Embedding(40, 8), nn.Linear(8, 8), nn.Linear(8, 40)

    def forward(self, ids, labels):
        x = self.tokens(ids)
        x = x + torch.tanh(self.inner(x))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())

class Asks(Model):
    def forward(self, ids, labels):
        loss = super().forward(ids, labels)
        return loss * 2 if loss > 3 else loss
"""
REST = """
batch: {global: 6, micro: 1}
inputs: {ids: {shape: [8], dtype: int64, high: 40}, labels: {like: ids}}
"""


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owned.py").write_text(MODEL)
    for name, text in {
        "free": "mesh: {tp: 2, dp: auto}\noptimizer: {lr: 0.5}\n",
        "without": "",
        "pinned": "mesh: {tp: 2, pp: 1, dp: 1, cp: 1}\n",
    }.items():
        (tmp_path / f"{name}.yaml").write_text(text + REST)
    (tmp_path / "large.yaml").write_text("mesh: {tp: 8}\n" + REST)
    return tmp_path


def test_keys_of_the_spec_stay_and_others_are_drawn(written: Path):
    own = OwnModel.read("owned.py:Model", Path("free.yaml"), 4)
    assert (own.num_blocks, own.has_experts, own.facts.global_size) == (0, False, 6)
    found = [Case.drawn(seed, 4, own) for seed in range(40)]
    specs = [Spec.load(case.to_spec()) for case in found]
    assert {(s.mesh.tp, s.optimizer.lr, s.batch.global_size, s.batch.micro) for s in specs} == {(2, 0.5, 6, 1)}
    assert {s.mesh.dp for s in specs} == {1, 2}
    assert len({s.precision.parameters for s in specs}) > 1
    found[3].save(Path("case.json"))
    assert Case.load(Path("case.json"), lambda values: OwnModel(**values)) == found[3]


def test_a_spec_without_a_mesh_leaves_every_axis_to_the_draw(written: Path):
    own = OwnModel.read("owned.py:Model", Path("without.yaml"), 4)
    meshes = [Spec.load(Case.drawn(seed, 4, own).to_spec()).mesh for seed in range(40)]
    assert all({getattr(mesh, axis) for mesh in meshes} > {1} for axis in ("tp", "dp", "cp"))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["owned.py:Model", "pinned.yaml"], "no layout remains to draw"),
        (["owned.py:Model", "large.yaml"], "the spec's mesh has 8 ranks, but a case has at most 4"),
        (["owned.py:Asks", "free.yaml"], "owned.py:18"),
        (["owned.py:Model", "none.yaml"], "none.yaml"),
        (["owned.py:Missing", "free.yaml"], "Missing"),
    ],
)
def test_what_cannot_be_begun_is_one_error(written: Path, arguments: list[str], words: str):
    result = CliRunner().invoke(app, ["fuzz", *arguments])
    assert result.exit_code == 2
    assert words in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.thorough
@pytest.mark.slow
def test_an_own_model_is_run(written: Path):
    prepare()
    result = CliRunner().invoke(app, ["fuzz", "owned.py:Model", "free.yaml", "--cases", "3", "--seed", "1"])
    assert result.exit_code == 0, result.output
    assert "3 of 3 done" in result.stderr
    assert "equal" in result.stdout


def test_every_key_of_the_spec_is_drawn_or_left_out_with_a_reason():
    drawn = set(FIELDS) - NOT_KEYS
    assert sorted([*drawn, *FOLLOWS, *EXCLUDED]) == sorted(leaves(Spec))
    assert all(len(values) > 1 for values in FIELDS.values())
    assert all(EXCLUDED.values())


@pytest.mark.parametrize("name", sorted(set(FIELDS) - NOT_KEYS - {"mesh.etp", "mesh.order"}))
def test_an_option_of_a_key_reaches_the_spec(name: str):
    """etp and order have a test of the mesh alone."""
    model = {"layers": 4, "experts": "stacked"}
    needs = {
        "mesh.ep": {"mesh.tp": 1, "mesh.dp": 2},
        "optimizer.schedule": {"optimizer.schedule.kind": "cosine"},
        "pipeline": {"mesh.pp": 2, "microbatches": 4},
        "pipeline.group_size": {"mesh.pp": 2, "microbatches": 4, "pipeline.schedule": "interleaved_1f1b"},
        "mesh.vpp": {"mesh.pp": 2, "microbatches": 4},
        "cuda_graphs": {"cuda_graphs.impl": "emulate"},
        "optimizer.momentum": {"optimizer.name": "sgd"},
        "optimizer.reshard": {"optimizer.zero": 3},
        "optimizer.shard_group": {"mesh.dp": 4},
        "optimizer.nesterov": {"optimizer.name": "sgd", "optimizer.momentum": 0.9},
        "audit": {"audit.every": 1},
        "tensor_parallel": {"tensor_parallel.sequence_parallel": True},
        "precision.gradients": {"precision.parameters": "float32"},
    }
    given = needs.get(name, needs.get(name.rpartition(".")[0], {}))
    simple = case_with(model, given | {name: FIELDS[name][0]}).sensible(8)
    other = case_with(model, given | {name: FIELDS[name][1]}).sensible(8)
    assert Spec.load(simple.to_spec()) != Spec.load(other.to_spec())


@pytest.mark.parametrize(
    ("kind", "split"),
    [("auto", "auto"), ("uneven", [3, 1]), ("ends", {"embedding": True, "loss": True}), ("layout", "Ettt|tL")],
)
def test_splits_name_every_block(kind: str, split: object):
    assert split_of({"mesh.pp": 2, "mesh.vpp": 1, "pipeline.split": kind}, Facts(4, False)) == split


@pytest.mark.parametrize(
    ("recompute", "blocks", "written"),
    [
        ("full", "all", "full"),
        ("full", "even", {"*[02468]": "full"}),
        ("selective", "odd", {"*[13579]": "selective"}),
        ("none", "odd", "none"),
        ("first full", "odd", {"*0": "full"}),
    ],
)
def test_some_blocks_are_recomputed(recompute: str, blocks: str, written: object):
    case = case_with({}, {"recompute": recompute, "blocks recomputed": blocks}).sensible(4)
    assert case.to_spec()["recompute"] == written


@pytest.mark.parametrize("axis", ["one", "tp", "pp", "dp", "cp"])
def test_the_layout_that_goes_on_has_the_same_batch(axis: str):
    case = drawn_case(3, 4)
    spec = Spec.load(continued_on(case.to_spec(), axis))
    assert spec.batch.global_size == Spec.load(case.to_spec()).batch.global_size
    assert spec.mesh.to_mesh().world_size <= 2
