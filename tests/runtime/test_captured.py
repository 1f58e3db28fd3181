"""The engine on plans of captured models: memory, evaluation, fresh weights, random numbers, low precision."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

from examples.gpt import GPT
from passes.errors import PlanError
from planner import plan
from runtime import Engine
from runtime.distributed.launch import launch
from tests.tools.limits import HANG_SECONDS

ROOT = Path(__file__).parents[2]


def build(dropout: float = 0.0, device: str = "cpu") -> GPT:
    torch.manual_seed(0)
    with torch.device(device):
        return GPT(vocabulary=37, length=8, width=16, num_layers=2, num_heads=2, dropout=dropout).double()


def spec(mesh: dict, **sections) -> dict:
    return {
        "mesh": mesh,
        "batch": {"global": 8, "micro": 2},
        "inputs": {"input_ids": {"shape": [8], "dtype": "int64", "high": 37}, "targets": {"like": "input_ids"}},
        **sections,
    }


def batch(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randint(37, (8, 8), generator=generator) for name in ("input_ids", "targets")}


def train(mesh: dict, dropout: float = 0.0, device: str = "cpu", sections: dict | None = None) -> dict:
    """Three steps; what a test may want to know of them."""
    with Engine(plan(build(dropout, device), spec(mesh, **(sections or {})))) as engine:
        before = engine.gather_parameters()
        evaluated = engine.evaluate(batch())
        reports = [engine.train_step(batch(i)) for i in range(3)]
        return {"before": before, "evaluated": evaluated, "reports": reports, "after": engine.gather_parameters()}


def train_on(mesh: dict, *args) -> dict:
    ranks = mesh.get("tp", 1) * mesh.get("pp", 1) * mesh.get("dp", 1)
    return launch(train, ranks, mesh, *args, timeout_seconds=HANG_SECONDS)[0] if ranks > 1 else train(mesh, *args)


@pytest.mark.thorough
def test_the_full_model_does_not_outlive_the_copying_of_shards():
    model = build()
    reference = weakref.ref(model)
    decided = plan(model, spec({}))
    del model
    engine = Engine(decided)
    gc.collect()
    assert reference() is None
    assert engine.train_step(batch()).loss > 0
    with pytest.raises(PlanError, match="the planned model is gone"):
        Engine(decided)


def test_tied_parameters_are_gathered_under_every_name():
    engine = Engine(plan(build(), spec({})))
    engine.forward_backward(batch())
    names = {name for name, _ in build().named_parameters(remove_duplicate=False)}
    assert {"tokens.weight", "head.weight"} <= names
    assert set(engine.gather_parameters()) == set(engine.gather_gradients()) == names


def test_evaluation_is_without_dropout():
    model = build(0.5)
    report = Engine(plan(model, spec({}))).evaluate(batch())
    truth = model.eval()(**batch())[1].item()
    assert report == pytest.approx(truth, rel=1e-12)


@pytest.mark.thorough
@pytest.mark.slow
def test_dropout_draws_the_same_masks_for_every_dp_and_pp_but_not_for_another_seed():
    alone, again = train_on({}, 0.3), train_on({}, 0.3)
    assert [r.loss for r in alone["reports"]] == [r.loss for r in again["reports"]]
    for mesh in ({"dp": 2}, {"pp": 2}):
        losses = [r.loss for r in train_on(mesh, 0.3)["reports"]]
        assert losses == pytest.approx([r.loss for r in alone["reports"]], rel=1e-12)
    other = train_on({}, 0.3, "cpu", {"seed": 99})
    assert abs(other["reports"][0].loss - alone["reports"][0].loss) > 1e-6
    assert alone["evaluated"] == pytest.approx(train_on({}, 0.0)["evaluated"], rel=1e-12)


@pytest.mark.thorough
@pytest.mark.slow
def test_fresh_weights_of_a_meta_model_do_not_depend_on_the_layout():
    alone, cut = train_on({}, 0.0, "meta"), train_on({"tp": 2, "pp": 2}, 0.0, "meta")
    assert set(alone["before"]) == set(cut["before"])
    assert all(torch.equal(alone["before"][name], cut["before"][name]) for name in alone["before"])
    assert torch.equal(alone["before"]["norm.weight"], torch.ones(16, dtype=torch.float64))
    torch.testing.assert_close(alone["after"], cut["after"], rtol=1e-9, atol=1e-9)


@pytest.mark.thorough
@pytest.mark.slow
def test_bfloat16_with_float32_gradients_follows_one_rank():
    low = {"precision": {"parameters": "bfloat16"}}
    alone, cut = train_on({}, 0.0, "cpu", low), train_on({"tp": 2, "dp": 2}, 0.0, "cpu", low)
    assert all(value.dtype == torch.bfloat16 for value in cut["after"].values())
    assert [r.loss for r in cut["reports"]] == pytest.approx([r.loss for r in alone["reports"]], rel=1e-2)


@pytest.mark.thorough
def test_a_loss_scale_that_overflows_skips_the_update_and_halves():
    sections = {"precision": {"parameters": "float16", "loss_scale": "dynamic"}}
    engine = Engine(plan(build(), spec({}, **sections)))
    before = engine.gather_parameters()
    assert engine.loss_scale.value == 2.0**15
    assert engine.loss_scale.tensor is not None
    engine.loss_scale.tensor.fill_(2.0**40)
    assert engine.train_step(batch()).skipped
    assert engine.loss_scale.value == 2.0**39
    assert all(torch.equal(before[name], value) for name, value in engine.gather_parameters().items())
    engine.loss_scale.tensor.fill_(2.0**15)
    assert not engine.train_step(batch()).skipped


@pytest.mark.thorough
def test_a_constant_loss_scale_changes_no_number_and_stays_after_an_overflow():
    """A power of two: gradients and weights keep every bit."""

    def trained(scale: float | str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], Engine]:
        engine = Engine(plan(build(), spec({}, precision={"loss_scale": scale})))
        engine.forward_backward(batch())
        return engine.gather_gradients(), (engine.optimizer_step(), engine.gather_parameters())[1], engine

    plain, scaled = trained("none"), trained(4096)
    for before, after in zip(plain[:2], scaled[:2], strict=True):
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
    engine = scaled[2]
    assert engine.loss_scale.tensor is not None
    engine.loss_scale.tensor.fill_(float("inf"))
    assert engine.train_step(batch()).skipped
    assert engine.loss_scale.value == float("inf")
    assert not engine.loss_scale.is_exhausted


# One file a rank: the lines of several processes may mingle on a shared standard output.
SCRIPT = """
import os, pathlib, sys
from tests.runtime.test_captured import batch, build, spec
from planner import plan
from runtime import Engine
with Engine(plan(build(), spec({"tp": 2}))) as engine:
    loss = engine.train_step(batch()).loss
    pathlib.Path(sys.argv[1], f"loss{os.environ['RANK']}").write_text(repr(loss))
"""


@pytest.mark.thorough
@pytest.mark.slow
def test_it_runs_under_torchrun(tmp_path):
    (tmp_path / "job.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(tmp_path / "job.py"), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    losses = [float((tmp_path / f"loss{rank}").read_text()) for rank in range(2)]
    assert losses == pytest.approx([train({})["reports"][0].loss] * 2, rel=1e-12)
