"""A loss outside the model in one process: the contract of the function, precision, and bad input as one error."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.dpo import train as train_dpo
from examples.gpt import GPT
from examples.grpo import train as train_grpo
from examples.stream_weights import train as train_with_a_reader
from planner import PlanError, plan
from runtime import Engine

VOCABULARY, LENGTH, BATCH = 61, 8, 8
Batch = dict[str, Tensor]


def gpt() -> GPT:
    torch.manual_seed(0)
    model = GPT(vocabulary=VOCABULARY, length=LENGTH, width=32, num_layers=2, num_heads=4)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model.double()


def spec(**more: Any) -> dict[str, Any]:
    ids = {"shape": [LENGTH], "dtype": "int64", "high": VOCABULARY}
    inputs = {"input_ids": ids, "targets": {"like": "input_ids"}}
    return {"mesh": {"dp": 1}, "batch": {"global": BATCH, "micro": 2}, "inputs": inputs, **more}


def batch_of() -> Batch:
    generator = torch.Generator().manual_seed(2)
    ids, targets = torch.randint(VOCABULARY, (2, BATCH, LENGTH), generator=generator)
    targets[:, :2] = -100
    return {"input_ids": ids, "targets": targets, "weights": torch.rand(BATCH, generator=generator).double()}


def weighted(log_probs: Tensor, rows: Batch) -> Tensor:
    return -(log_probs.sum(-1) * rows["weights"]).sum() / BATCH


def truth(model: nn.Module, batch: Batch) -> Tensor:
    logits, _ = model(batch["input_ids"])
    each = F.cross_entropy(logits.transpose(1, 2), batch["targets"], reduction="none", ignore_index=-100)
    return -each


def test_the_values_of_all_microbatches_add_up():
    batch, model, calls = batch_of(), gpt(), list[tuple[int, ...]]()

    def loss(log_probs: Tensor, rows: Batch) -> Tensor:
        calls.append(tuple(log_probs.shape))
        assert rows.keys() == batch.keys()
        assert log_probs[:, :2].eq(0).all()
        return weighted(log_probs, rows)

    with Engine(plan(gpt(), spec())) as engine:
        found = engine.forward_backward(batch, loss=loss)
        gradients = engine.gather_gradients()
        assert calls == [(2, LENGTH)] * (BATCH // 2)
        log_probs = engine.log_probs(batch)
    expected = weighted(truth(model, batch), batch)
    expected.backward()
    assert found == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(log_probs, truth(model, batch).detach(), rtol=1e-12, atol=1e-12)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-10, atol=1e-12)


class TwoHeads(nn.Module):
    """A second head that the model's own loss alone reads."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt, self.value, self.scale = (
            gpt(),
            nn.Linear(VOCABULARY, 1).double(),
            nn.Parameter(torch.ones(()).double()),
        )

    def forward(self, input_ids: Tensor, targets: Tensor) -> Tensor:
        logits, _ = self.gpt(input_ids)
        values = self.value(logits).squeeze(-1) * self.scale
        own = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        return own + (values - input_ids.double()).square().mean()


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_parameters_that_only_the_own_loss_reads_rest_beside_a_loss_outside(dtype: str, tmp_path: Path):
    """As in one process, where they get no gradient: no weight decay, no moments, no count of an update."""
    batch, model = batch_of(), TwoHeads()
    given = spec(optimizer={"lr": 1e-2, "weight_decay": 0.1}, precision={"parameters": dtype})
    own = {name: batch[name] for name in ("input_ids", "targets")}
    alone = nn.ModuleList([copy.deepcopy(model.value)])  # updated by torch with the engine's gradients
    alone.register_parameter("scale", nn.Parameter(model.scale.detach().clone()))
    alone.to(getattr(torch, dtype)).to(torch.float64 if dtype == "float64" else torch.float32)
    update = torch.optim.AdamW(alone.parameters(), 1e-2, (0.9, 0.95), weight_decay=0.1)
    held = {"scale": alone.get_parameter("scale"), "value.weight": alone[0].weight, "value.bias": alone[0].bias}
    made = plan(model, given)
    engine = Engine(made)
    for step, is_own in enumerate([True, False, False, True, False, True]):
        if step == 3:  # the counts of updates are saved
            engine.save(tmp_path)
            engine.close()
            engine = Engine(made)
            engine.load(tmp_path)
        engine.forward_backward(own if is_own else batch, loss=None if is_own else weighted)
        gradients = engine.gather_gradients()
        shrink = max(1.0, engine.optimizer_step().grad_norm + 1e-6)
        for name, parameter in held.items():
            parameter.grad = gradients[name].to(parameter) / shrink if is_own else None
        update.step()
        limits = {"rtol": 1e-2, "atol": 1e-6} if dtype == "bfloat16" else {"rtol": 1e-9, "atol": 1e-12}
        for name, value in engine.gather_parameters().items():
            if name in held:
                torch.testing.assert_close(value, held[name].detach().to(value), **limits)
    engine.close()


@pytest.mark.thorough
@pytest.mark.parametrize(
    "more",
    [
        {"precision": {"parameters": "float16", "gradients": "float32", "loss_scale": 1024}},
        {"precision": {"parameters": "bfloat16", "gradients": "float32"}},
        {"compile": True},
        {"recompute": "full"},
    ],
    ids=["loss scale", "bfloat16", "compiled", "recomputed"],
)
def test_settings_of_training_hold_for_a_loss_outside(more):
    batch, model = batch_of(), gpt()
    dtype = getattr(torch, more.get("precision", {}).get("parameters", "float64"))
    with Engine(plan(gpt(), spec(**more))) as engine:
        engine.forward_backward(batch, loss=weighted)
        gradients = engine.gather_gradients()
        assert engine.log_probs(batch).dtype == torch.float64
    model.to(dtype)
    weighted(truth(model, batch).double(), batch).backward()
    limit = 1e-10 if dtype == torch.float64 else 0.1
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        difference = (gradients[name].double() - parameter.grad.double()).norm()
        assert difference <= limit * parameter.grad.double().norm() + 1e-12, name


def test_ratios_begin_at_one():
    batch = batch_of()
    with Engine(plan(gpt(), spec())) as engine:
        batch["old"] = engine.log_probs(batch)

        def loss(log_probs: Tensor, rows: Batch) -> Tensor:
            assert log_probs.equal(rows["old"])
            return log_probs.sum()

        engine.forward_backward(batch, loss=loss)


@pytest.mark.thorough
def test_heads_that_only_the_models_own_loss_reads_get_no_gradient():
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gpt, self.other = gpt(), nn.Linear(VOCABULARY, 3).double()

        def forward(self, input_ids: Tensor, targets: Tensor) -> Tensor:
            logits, loss = self.gpt(input_ids, targets)
            return loss + self.other(logits).pow(2).mean()

    batch = batch_of()
    with Engine(plan(TwoHeads(), spec())) as engine:
        engine.forward_backward({n: batch[n] for n in ("input_ids", "targets")})
        assert engine.gather_gradients()["other.weight"].abs().max() > 0
        engine.forward_backward(batch, loss=weighted)
        gradients = engine.gather_gradients()
        assert gradients["other.weight"].eq(0).all()
        assert gradients["gpt.tokens.weight"].abs().max() > 0


BAD: dict[str, tuple[Any, str]] = {
    "no scalar": (lambda log_probs, rows: log_probs.sum(-1), r"returns a torch.float64 tensor of shape \[2\]"),
    "no tensor": (lambda log_probs, rows: 0.5, "the loss function returns 0.5"),
    "detached": (lambda log_probs, rows: log_probs.detach().sum(), "does not depend on log_probs"),
    "of something else": (
        lambda log_probs, rows: torch.ones(1, requires_grad=True).sum(),
        "does not depend on log_probs",
    ),
    "no function": ("dpo", "the loss is a str, not a function"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("case", BAD)
def test_a_bad_function_is_one_error(case):
    function, words = BAD[case]
    with Engine(plan(gpt(), spec())) as engine, pytest.raises(PlanError, match=words):
        engine.train_step(batch_of(), loss=function)


def test_an_error_of_the_function_names_the_microbatch_and_the_line():
    with Engine(plan(gpt(), spec())) as engine:
        with pytest.raises(PlanError, match=r"microbatch 0.*failed with KeyError: 'advantages'") as told:
            engine.train_step(batch_of(), loss=lambda log_probs, rows: log_probs.sum() * rows["advantages"])
        assert "test_loss_outside.py" in str(told.value.where)
        assert engine.train_step(batch_of(), loss=weighted).grad_norm > 0
        assert engine.step_index == 1


@pytest.mark.thorough
def test_bad_batches_plans_and_models_are_refused():
    with Engine(plan(gpt(), spec())) as engine:
        for extra, words in (
            (torch.ones(3), r"which only the loss function reads, has shape \[3\]"),
            (1.0, "is a float"),
        ):
            with pytest.raises(PlanError, match=words):
                engine.forward_backward({**batch_of(), "extra": extra}, loss=weighted)
        with pytest.raises(PlanError, match="the batch lacks targets"):
            engine.forward_backward({"input_ids": batch_of()["input_ids"]}, loss=weighted)
    graphs = {"cuda_graphs": {"impl": "emulate", "scope": ["attn"], "warmup_steps": 1}}
    with Engine(plan(gpt(), spec(**graphs))) as engine, pytest.raises(PlanError, match="CUDA graphs hold"):
        engine.forward_backward(batch_of(), loss=weighted)

    class Regression(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCABULARY, 4)

        def forward(self, input_ids: Tensor, targets: Tensor) -> Tensor:
            return (self.embed(input_ids).sum(-1) - targets).pow(2).mean()

    with Engine(plan(Regression(), spec())) as engine, pytest.raises(PlanError, match="is not a cross-entropy over"):
        engine.forward_backward(batch_of(), loss=weighted)


@pytest.mark.thorough
def test_examples_learn():
    losses = train_dpo(2)
    assert losses[0] == pytest.approx(0.6931, abs=1e-3)  # the policy is the reference
    assert losses[-1] < 0.6
    rewards = train_grpo(8)
    assert sum(rewards[-3:]) > sum(rewards[:3])
    for ours, theirs in train_with_a_reader(2):
        assert ours == pytest.approx(theirs, rel=1e-6)


@pytest.mark.thorough
@pytest.mark.slow
def test_preferences_with_the_base_as_reference_equal_one_process():
    from runtime.verify.run import verify

    assert verify("examples/dpo_lora.py:build", "examples/dpo_lora.yaml", steps=2).passed
