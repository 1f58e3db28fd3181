"""An audited run is stopped at the step in which the user's module computes otherwise; equal ones train as without."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planner import PlanError, plan
from runtime import Engine
from runtime.audit.audit import AuditError, AuditWarning, is_equal, refuse_too_large
from runtime.audit.own_module import Tolerance
from tests.tools.commands import python
from tests.tools.laboratory import Case
from tests.tools.limits import HANG_SECONDS

SPEC: dict[str, Any] = {
    "mesh": {},
    "batch": {"global": 4, "micro": 2},
    "inputs": {"ids": {"shape": [6], "dtype": "int64", "high": 16}, "labels": {"like": "ids"}},
    "optimizer": {"lr": 1e-2},
}
FIRST_OTHER_CALL = 20  # after all that a capture runs


class Small(nn.Module):
    """Tied tokens and head, dropout, a view of a weight made once, and a penalty on weights beside a mean or a sum."""

    def __init__(self, reduction: str = "mean", counter: Path | None = None) -> None:
        super().__init__()
        self.tokens, self.mlp = nn.Embedding(16, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.tokens.weight
        self.norm, self.dropout = nn.LayerNorm(8), nn.Dropout(0.1)
        self.register_buffer("scale", torch.full((8,), 0.5), persistent=False)
        self.reduction, self.counter = reduction, counter

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.norm(self.dropout(self.mlp(self.tokens(ids))) * self.scale)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), reduction=self.reduction)
        return (loss + 0.1 * self.mlp.weight.square().sum()) * self.factor()

    def factor(self) -> float:
        """On a disk, where nobody watches: from some call on, each third one is another."""
        if self.counter is None:
            return 1.0
        calls = int(self.counter.read_text()) + 1
        self.counter.write_text(str(calls))
        return 1.001 if calls >= FIRST_OTHER_CALL and calls % 3 == 0 else 1.0


def small(seed: int = 0, **options: Any) -> Small:
    torch.manual_seed(seed)
    return Small(**options).double()


def batch(step: int) -> dict[str, Tensor]:
    ids = torch.arange(24).view(4, 6) * (2 * step + 1) % 16
    return {"ids": ids, "labels": ids.roll(-1, 1)}


def trained(model: nn.Module, num_steps: int = 4, **spec: Any) -> tuple[list[float], dict[str, Tensor]]:
    with Engine(plan(model, {**SPEC, **spec})) as engine:
        losses = [engine.train_step(batch(step)).loss for step in range(num_steps)]
        return losses, engine.gather_parameters()


@pytest.mark.thorough
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_model_that_is_equal_trains_bitwise_as_without_an_audit(reduction):
    model = small(reduction=reduction)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    losses, parameters = trained(model, audit={"every": 1})
    truth_losses, truth = trained(small(reduction=reduction))
    assert losses == truth_losses
    assert all(torch.equal(parameters[name], value) for name, value in truth.items())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items()), "the user's model"


def test_a_loss_that_the_spec_names_is_part_of_the_audited_module(tmp_path):
    """It differs by the value of a global, which no capture sees."""
    (tmp_path / "audited_loss.py").write_text(
        "SCALE = 1.0\n\ndef loss(outputs, batch):\n    return outputs * SCALE + batch['ids'].double().mean()\n"
    )
    spec = {"audit": {"every": 1}, "loss": f"{tmp_path}/audited_loss.py:loss"}
    with Engine(plan(small(), {**SPEC, **spec})) as engine:
        own = engine.train_step(batch(0)).loss
        assert own > batch(0)["ids"].double().mean()
        sys.modules["audited_loss"].SCALE = 2.0  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(AuditError, match="audit of step 2"):
            engine.train_step(batch(1))


def test_another_path_of_each_third_call_stops_the_run_at_its_step_with_both_losses(tmp_path):
    counter = tmp_path / "calls"
    counter.write_text("0")
    model = small(counter=counter)
    with Engine(plan(model, {**SPEC, "audit": {"every": 2}})) as engine:
        assert int(counter.read_text()) < FIRST_OTHER_CALL
        counter.write_text("21")  # audits of steps 2, 4 and 6 are the next three calls
        for step in range(5):
            engine.train_step(batch(step))
        before = engine.gather_parameters()
        with pytest.raises(AuditError) as error:
            engine.train_step(batch(5))
        assert engine.step_index == 5
        after = engine.gather_parameters()
        assert engine.train_step(batch(5)).loss > 0  # who catches the error may go on
    words = re.match(r"audit of step 6: the engine has loss (\S+), your module has (\S+),", str(error.value))
    assert words
    assert float(words[2]) / float(words[1]) == pytest.approx(1.001, rel=1e-6)
    assert all(torch.equal(before[name], value) for name, value in after.items())


def test_a_difference_may_be_a_warning(tmp_path):
    counter = tmp_path / "calls"
    counter.write_text("0")
    with Engine(plan(small(counter=counter), {**SPEC, "audit": {"every": 1, "on_difference": "warn"}})) as engine:
        counter.write_text("23")
        with pytest.warns(AuditWarning, match="audit of step 1: the engine has loss"):
            assert engine.train_step(batch(0)).loss > 0


def test_a_model_on_meta_is_filled_with_the_weights_of_the_step_and_empty_again():
    with torch.device("meta"):
        model = Small().double()
    model.scale = torch.full((8,), 0.5, dtype=torch.float64)
    losses, _ = trained(model, num_steps=3, audit={"every": 1})
    assert len(losses) == 3
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_small_loss_in_half_precision_may_differ_as_much_as_a_larger_one():
    """Of few tokens: 0.6598 by the engine, 0.6797 by the module, 0.6755 in float64."""
    half = Tolerance.of(torch.bfloat16, 1e-3)
    assert half.of_loss(4.0) == half.of_loss(2.0) == half.loss
    assert half.of_loss(0.5) * 0.5 == pytest.approx(2.0 * half.loss)
    assert is_equal(0.6598, 0.6797, half.of_loss(0.6797))
    assert not is_equal(0.62, 0.6797, half.of_loss(0.6797))
    assert Tolerance.of(torch.float32, 1e-3).of_loss(0.5) == Tolerance.of(torch.float32, 1e-3).loss
    assert Tolerance.of(torch.bfloat16, 1e-3, 1e-3).of_loss(0.5) == 1e-3


@pytest.mark.thorough
def test_lower_precision_is_compared_in_that_precision():
    losses, _ = trained(small(), audit={"every": 1}, precision={"parameters": "bfloat16"})
    assert len(losses) == 4


class Noisy(Small):
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return super().forward(ids, labels) * (1.0 + 0.01 * torch.rand(()))  # here


@pytest.mark.thorough
def test_random_numbers_that_are_no_dropout_are_refused_at_their_line():
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.endswith("# here"))
    torch.manual_seed(0)
    with pytest.raises(PlanError, match="draws random numbers") as error:
        Engine(plan(Noisy(), {**SPEC, "audit": {"every": 5}}))
    assert getattr(error.value.where, "line", 0) == line


def test_weights_that_do_not_fit_the_host_are_refused():
    refuse_too_large(1 << 20, 1 << 20)
    refuse_too_large(1 << 60, None)
    with pytest.raises(PlanError, match=r"takes 8\.00 GiB of memory on the host of rank 0, which has 1\.00 GiB left"):
        refuse_too_large(8 << 30, 1 << 30)


def test_losses_that_are_not_finite_are_equal_where_they_are_the_same():
    nan, inf = float("nan"), float("inf")
    assert is_equal(nan, nan, 1e-6)
    assert is_equal(inf, inf, 1e-6)
    assert not is_equal(1.0, nan, 1e-6)
    assert not is_equal(inf, -inf, 1e-6)


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
    [("gpt2", {"tp": 2, "pp": 2}, False), ("gpt2", {"pp": 2, "dp": 2}, True), ("llama", {"tp": 2, "cp": 2}, False)],
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
COUNTED = """
mesh: {}
batch: {global: 4, micro: 1}
inputs: {input_ids: {shape: [16], dtype: int64, high: 256}, targets: {like: input_ids}}
"""


@pytest.mark.thorough
@pytest.mark.slow
def test_train_ends_with_exit_code_1_and_one_message(tmp_path):
    for name, text in (("counting.py", MODEL), ("spec.yaml", COUNTED), ("calls", "0")):
        (tmp_path / name).write_text(text)
    command = ["train", f"{tmp_path / 'counting.py'}:Counting", str(tmp_path / "spec.yaml"), "--data", "stdlib"]
    ended = python("-m", "runtime.cli", *command, "--steps", "80", "--audit", "1", "--quiet")
    assert ended.returncode == 1, ended.stderr
    assert "Traceback" not in ended.stderr
    assert re.search(r"^Error: audit of step \d+: the engine has loss \d", ended.stderr, re.MULTILINE)
