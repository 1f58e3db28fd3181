"""The running mean of the weights: the formula of one process, in any layout; put in their place and taken back."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from typer.testing import CliRunner

from planner import PlanError, plan
from planner.spec.spec import Spec
from runtime import Engine
from runtime.cli import app
from runtime.verify.reference import OneProcess
from tests.models import families
from tests.tools.laboratory import NUM_BATCHES, Case, Lab, spec_of
from tests.tools.limits import HANG_SECONDS

DECAY, STEPS = 0.8, 5
HALF = {"precision": {"parameters": "bfloat16"}}


def averaged(decided: Any, batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """After STEPS updates."""
    with Engine(decided, timeout_seconds=HANG_SECONDS) as engine:
        for step in range(STEPS):
            engine.train_step(batches[step % len(batches)])
        with engine.averaged_weights():
            return engine.gather_parameters()


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"dp": 1}, {"dp": 2}, {"tp": 2, "pp": 2}], ids=str)
def test_it_is_the_mean_that_torch_keeps_of_one_process(lab: Lab, mesh: dict[str, int]) -> None:
    # with a small eps the rounding of small gradients grows
    case = Case("gpt", mesh, {"optimizer": {"lr": 1e-2, "eps": 1e-3, "ema": DECAY}}, job=averaged)
    found, entry = lab.run(case)[0], families.build("gpt")
    one = OneProcess(entry.model, Spec.load(spec_of(entry, case)))
    mean = AveragedModel(one.model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    mean.update_parameters(one.model)  # the first is a copy
    for step in range(STEPS):
        one.train_step(entry.batch(8, step % NUM_BATCHES))
        mean.update_parameters(one.model)
    truth = dict(mean.module.named_parameters(remove_duplicate=False))
    assert found.keys() == truth.keys()
    for name, value in truth.items():
        torch.testing.assert_close(found[name], value.detach(), rtol=1e-12, atol=1e-12, msg=name)
    assert any((found[n] - p).abs().max() > 1e-3 for n, p in one.model.named_parameters()), "it lags behind"


def small(**sections: Any) -> Engine:
    torch.manual_seed(0)

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4)
            self.frozen.weight.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.frozen(self.up(x)).square().mean()

    given = {"mesh": {}, "batch": {"global": 4, "micro": 2}, "inputs": {"x": {"shape": [4], "dtype": "float32"}}}
    return Engine(plan(Small(), given | {"optimizer": {"lr": 0.01, "ema": DECAY}} | sections))


def train(engine: Engine, num_steps: int = 1) -> dict[str, Tensor]:
    for _ in range(num_steps):
        engine.train_step({"x": torch.ones(4, 4)})
    return engine.gather_parameters()


def mean_of(engine: Engine) -> dict[str, Tensor]:
    with engine.averaged_weights():
        return engine.gather_parameters()


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(value, b[name]) for name, value in a.items())


@pytest.mark.thorough
@pytest.mark.parametrize("sections", [{}, HALF, {"optimizer": {"lr": 0.01, "ema": DECAY, "zero": 0}}], ids=str)
def test_weights_are_as_before_afterwards_and_the_loss_inside_is_that_of_the_mean(sections: dict[str, Any]) -> None:
    engine, undisturbed, x = small(**sections), small(**sections), {"x": torch.ones(4, 4)}
    weights = train(engine, 3)
    loss = engine.evaluate(x)
    with engine.averaged_weights():
        of_mean, mean = engine.evaluate(x), engine.gather_parameters()
    assert loss < of_mean, "the mean is of earlier weights"
    assert not same(mean, weights)
    assert torch.equal(mean["frozen.weight"], weights["frozen.weight"])
    assert engine.evaluate(x) == loss
    assert same(engine.gather_parameters(), weights)
    train(undisturbed, 3)
    assert same(train(engine), train(undisturbed))
    assert same(mean_of(engine), mean_of(undisturbed))


def test_what_trains_saves_or_loads_is_refused_inside_and_works_after_an_error(tmp_path: Path) -> None:
    engine, x = small(), {"x": torch.ones(4, 4)}
    weights, mean = train(engine, 2), mean_of(engine)
    calls = [lambda: engine.train_step(x), lambda: engine.save(tmp_path), lambda: engine.load(tmp_path)]
    for call in [*calls, lambda: engine.forward_backward(x), engine.averaged_weights().__enter__]:
        with pytest.raises(PlanError, match="inside averaged_weights"), engine.averaged_weights():
            call()
        assert same(engine.gather_parameters(), weights)
    assert same(mean_of(engine), mean)
    with pytest.raises(PlanError, match="has no running mean"), small(optimizer={}).averaged_weights():
        pass


def test_a_skipped_update_changes_nothing() -> None:
    engine = small(precision={"parameters": "float16", "loss_scale": "dynamic"})
    train(engine, 2)
    before = mean_of(engine)
    assert engine.loss_scale.tensor is not None
    engine.loss_scale.tensor.fill_(2.0**60)
    assert engine.train_step({"x": torch.ones(4, 4)}).skipped
    assert same(mean_of(engine), before)


def test_a_save_without_one_begins_it_with_the_loaded_weights_and_says_so(tmp_path: Path) -> None:
    without, engine = small(optimizer={"lr": 0.1}), small()
    weights = train(without, 2)
    without.save(tmp_path / "without")
    train(engine, 3)
    engine.save(tmp_path / "with")
    mean = mean_of(engine)
    with pytest.warns(
        UserWarning, match="has no running mean of the weights .*: the mean starts from the loaded weights"
    ):
        engine.load(tmp_path / "without")
    assert same(mean_of(engine), weights)
    with pytest.warns(UserWarning, match="the running mean of the weights in the save is not loaded"):
        without.load(tmp_path / "with")
    engine.load(tmp_path / "with")
    assert same(mean_of(engine), mean)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("sections", [{}, HALF], ids=str)
def test_the_command_exports_it_as_save_pretrained_does(tmp_path: Path, sections: dict[str, Any]) -> None:
    engine = small(**sections)
    train(engine, 3)
    engine.save(tmp_path / "run")
    with engine.averaged_weights():
        engine.save_pretrained(tmp_path / "within")
    options = ["checkpoint", str(tmp_path / "run"), "--export", str(tmp_path / "out"), "--ema"]
    assert CliRunner().invoke(app, options).exit_code == 0
    found, wanted = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "within"))
    assert same(found, wanted)
    assert same(found, mean_of(engine))
    without = small(optimizer={})
    without.save(tmp_path / "without")
    refused = CliRunner().invoke(app, [*options[:1], str(tmp_path / "without"), *options[2:]])
    assert refused.exit_code == 2
    assert "has no running mean of the weights" in refused.stderr


@pytest.mark.parametrize("sections", [{}, HALF], ids=str)
def test_the_plan_counts_its_bytes(sections: dict[str, Any]) -> None:
    engine = small(**sections)
    train(engine)
    planned = sum(b.optimizer_bytes for b in engine.plan.to_run()[1].buffers_of_rank(0))
    measured = engine.optimizer.measured_bytes()
    assert sum(measured[kind] for kind in ("optimizer", "main_parameters", "main_gradients")) == planned
    assert engine.plan.memory[0].optimizer == planned
