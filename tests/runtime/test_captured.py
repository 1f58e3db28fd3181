"""The engine on plans of captured models: memory, evaluation, fresh weights, random numbers, low precision."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from examples.gpt import GPT
from passes.errors import PlanError
from planner import plan
from runtime import Engine


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
