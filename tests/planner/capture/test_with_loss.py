"""A model with a loss of the user's is the model in all but the call: its names, attributes, hooks and lines."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from passes.errors import PlanError
from planner import capture, plan, with_loss
from planner.capture.own_loss import model_of
from tests.models.families import build
from tests.models.preferences import VOCABULARY, gpt, weighted_loss
from tests.tools.captures import plan_again

INPUTS: dict[str, Any] = {
    "input_ids": {"shape": [8], "dtype": "int64", "high": VOCABULARY},
    "next": {"like": "input_ids"},
    "weights": {"shape": [8], "dtype": "float32"},
}
SPEC: dict[str, Any] = {"mesh": {"tp": 2}, "batch": {"global": 4, "micro": 2}, "inputs": INPUTS}
WRITTEN = """
import torch.nn.functional as F

def loss(outputs, batch):
    return F.cross_entropy(outputs[0].flatten(0, 1), batch["next"].flatten())
"""


def batch_of(rows: int = 2) -> dict[str, Tensor]:
    ids = torch.arange(rows * 8).view(rows, 8) % VOCABULARY
    return {"input_ids": ids, "next": ids.roll(-1, 1), "weights": torch.rand(rows, 8)}


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A spec in a folder, and the file of its loss beside it."""
    (tmp_path / "own_loss.py").write_text(WRITTEN)
    inputs = "{input_ids: {shape: [8], dtype: int64, high: 40}, next: {like: input_ids}}"
    mesh = "mesh: {tp: 2}\nbatch: {global: 4, micro: 2}\n"
    (tmp_path / "spec.yaml").write_text(f"{mesh}inputs: {inputs}\nloss: own_loss.py:loss\n")
    return tmp_path


@pytest.mark.thorough
def test_parameters_keep_the_names_of_the_model_in_the_plan() -> None:
    model = gpt()
    made = plan_again(with_loss(model, weighted_loss), SPEC)
    assert {p.name for p in made.parameters} == {name for name, _ in model.named_parameters()}


def test_it_shares_every_tensor_and_attribute_with_the_model_and_is_of_its_class() -> None:
    model = gpt()
    made = with_loss(model, weighted_loss)
    assert isinstance(made, type(model))
    assert all(a is b for a, b in zip(made.parameters(), model.parameters(), strict=True))
    made.eval()
    made.mark = 3
    assert not model.training
    assert model.mark == 3  # pyright: ignore[reportAttributeAccessIssue]
    assert model_of(made) is model


def test_the_model_itself_still_returns_its_logits() -> None:
    model = gpt()
    plan(with_loss(model, weighted_loss), SPEC)
    logits, none = model(batch_of()["input_ids"])
    assert logits.shape == (2, 8, VOCABULARY)
    assert none is None


def test_hooks_of_the_model_see_its_outputs_not_the_loss() -> None:
    model, seen = gpt(), list[Any]()
    model.register_forward_hook(lambda module, args, output: seen.append(output))
    made = with_loss(model, weighted_loss)
    loss = made(**batch_of())["loss"]
    assert [type(output) for output in seen] == [tuple]
    assert loss.ndim == 0


def test_a_forward_that_the_model_has_as_an_attribute_is_the_one_that_runs() -> None:
    model = gpt()
    batch, original = batch_of(), model.forward
    expected = with_loss(model, weighted_loss)(**batch)["loss"]
    model.forward = lambda input_ids: (original(input_ids)[0] * 0.5, None)
    halved = with_loss(model, weighted_loss)(**batch)["loss"]
    logits = original(batch["input_ids"])[0] * 0.5
    assert halved != expected
    assert halved == weighted_loss((logits, None), batch)["loss"]


def test_a_forward_with_keywords_gets_every_input_and_any_other_those_it_names() -> None:
    class Given(nn.Module):
        def forward(self, a: Tensor, **more: Tensor) -> dict[str, Tensor]:
            return {"a": a, **more}

    class Named(nn.Module):
        def forward(self, a: Tensor, b: Tensor | None = None) -> dict[str, Tensor]:
            return {"a": a} if b is None else {"a": a, "b": b}

    names = list[list[str]]()

    def loss(outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        names.append([*outputs])
        assert [*batch] == ["a", "c"]
        return outputs["a"].sum()

    for model in (Given(), Named()):
        with_loss(model, loss)(a=torch.ones(1, requires_grad=True), c=torch.ones(1))
    assert names == [["a", "c"], ["a"]]


def test_an_error_in_the_loss_names_the_line_of_its_file(written: Path) -> None:
    (written / "own_loss.py").write_text("def loss(outputs, batch):\n    return outputs[0].view(7, 9).sum()\n")
    with pytest.raises(PlanError, match="shape '\\[7, 9\\]' is invalid") as error:
        plan(gpt(), written / "spec.yaml")
    assert "own_loss.py:2, `return outputs[0].view(7, 9).sum()`" in str(error.value)


@pytest.mark.thorough
def test_an_op_of_the_loss_that_cannot_be_planned_names_its_line(written: Path) -> None:
    body = "    x = outputs[0]; return (x.mT @ x.new_ones(x.shape[1], x.shape[1])).square().sum()\n"  # mixes tokens
    (written / "own_loss.py").write_text(f"def loss(outputs, batch):\n{body}")
    spec = (written / "spec.yaml").read_text().replace("tp: 2", "cp: 2")
    (written / "spec.yaml").write_text(spec)
    with pytest.raises(PlanError) as error:
        plan(gpt(), written / "spec.yaml")
    assert "own_loss.py:2" in str(error.value)


def test_the_spec_names_a_function_in_its_own_folder(written: Path) -> None:
    made = plan(gpt(), written / "spec.yaml")
    assert made.spec["loss"] == f"{written}/own_loss.py:loss"
    assert {p.name for p in made.parameters} == {name for name, _ in gpt().named_parameters()}


def test_a_captured_model_is_refused_after_its_loss_has_changed(written: Path) -> None:
    captured = capture(gpt(), written / "spec.yaml")
    plan(captured, written / "spec.yaml")
    (written / "own_loss.py").write_text(WRITTEN + "\nOTHER = 1\n")
    with pytest.raises(PlanError, match=r"the loss function .*own_loss.py:loss has changed since"):
        plan(captured, written / "spec.yaml")


def scaled(factor: float) -> Any:
    """A function with a closure, which no cache may confuse with another."""

    def loss(outputs: tuple[Tensor, None], batch: dict[str, Tensor]) -> Tensor:
        return factor * F.cross_entropy(outputs[0].flatten(0, 1), batch["next"].flatten())

    return loss


@pytest.mark.thorough
def test_two_losses_of_one_code_are_two_captures() -> None:
    spec = {**SPEC, "mesh": {"tp": 1}, "inputs": {name: INPUTS[name] for name in ("input_ids", "next")}}
    model = gpt()
    texts = [str(plan(with_loss(model, scaled(f)), spec).to_run()[0].program.graph.graph) for f in (2.0, 3.0)]
    assert texts[0] != texts[1]
    assert texts[0].replace("2.0", "3.0") == texts[1]


BAD = {
    "def loss(a, b, c): return a": "takes (a, b, c), not (outputs, batch)",
    "def loss(outputs): return outputs[0].sum()": "takes (outputs), not (outputs, batch)",
    "def loss(outputs, batch): return batch['labls'].sum()": "reads batch['labls'], which is no input",
    "def loss(outputs, batch): return outputs[0].sum(-1)": "returns a tensor [2, 8]",
    "def loss(outputs, batch): return outputs[0].sum().detach()": "returns a scalar without a gradient",
    "def loss(outputs, batch): return {'los': outputs[0].sum()}": 'returns a mapping without "loss"',
    "def loss(outputs, batch): return 3.0": "returns a float",
    "def loss(outputs, batch): pass": "returns a NoneType",
}


@pytest.mark.thorough
@pytest.mark.parametrize("code", BAD)
def test_a_bad_loss_function_is_one_error_at_its_line(written: Path, code: str) -> None:
    (written / "own_loss.py").write_text(f"# mine\n{code}\n")
    with pytest.raises(PlanError) as error:
        plan(gpt(), written / "spec.yaml")
    assert BAD[code] in error.value.what
    assert "own_loss.py:2" in str(error.value.where)
    assert error.value.fix


@pytest.mark.parametrize(
    ("loss", "what"),
    [
        ("none.py:loss", "no file none.py"),
        ("own_loss.py:lss", "no 'lss' in own_loss"),
        ("own_loss.py:F", "is a module, not a function"),
        ("no_such_package.mine:loss", "module 'no_such_package.mine' cannot be imported"),
        ("own_loss", "loss cannot be the string 'own_loss'"),
    ],
)
def test_a_name_without_a_function_is_an_error_at_its_line_of_the_spec(written: Path, loss: str, what: str) -> None:
    spec = written / "spec.yaml"
    spec.write_text(spec.read_text().replace("own_loss.py:loss", loss))
    with pytest.raises(PlanError, match=what) as error:
        plan(gpt(), spec)
    assert "spec.yaml:4" in str(error.value.where) or "own_loss.py" in str(error.value.where)


def test_a_model_that_needs_an_input_that_is_not_there_is_an_error_of_the_inputs() -> None:
    inputs = {"ids": INPUTS["input_ids"], "next": {"like": "ids"}}
    with pytest.raises(PlanError, match="does not accept these inputs: missing a required argument: 'input_ids'") as e:
        plan(with_loss(gpt(), weighted_loss), {**SPEC, "inputs": inputs})
    assert e.value.where is not None
    assert "inputs" in str(e.value.where)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["input", "next", "type"])
def test_an_input_may_have_the_name_of_a_function_of_python(name: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

        def forward(self, ids: Tensor, **more: Tensor) -> Tensor:
            return (self.head(self.table(ids)).logsumexp(-1) * more[name]).sum()

    inputs = {"ids": {"shape": [4], "dtype": "int64"}, name: {"shape": [4], "dtype": "float32"}}
    made = plan(Model(), {**SPEC, "inputs": inputs})
    assert list(made.to_run()[0].program.inputs.values()) == ["ids", name]


def test_the_entry_of_the_tests_returns_the_loss_among_other_figures() -> None:
    entry = build("own-loss")
    assert set(entry.model(**entry.batch(2, seed=0))) == {"loss", "largest"}
