"""A plan saved as .pt is the plan on every rank that loads it: its tables, lowered stages, and losses to the bit."""

import math
import os
import pickle
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from passes.errors import PlanError
from planner import Plan, plan
from planner.decisions import Decisions
from planner.files.allowed import NotAllowed
from planner.files.values import Reader, Unstorable, Writer
from planner.lower import passes_text
from planner.saved_plan.plan_file import DECIDED, FORM, seal, unseal
from runtime import Engine
from runtime.engine.checks import identity
from tests.models.plannable import MODELS, build, spec_of
from tests.tools.captures import plan_again
from tests.tools.laboratory import Lab
from tests.tools.limits import HANG_SECONDS
from tests.tools.ranks import Ranks

LAYOUTS: dict[str, dict[str, Any]] = {
    "gpt": {"mesh": {"tp": 2, "pp": 2}, "recompute": "selective", "compile": True},
    "gpt2": {"mesh": {"cp": 2}},
    "llama": {"mesh": {"tp": 2}, "cuda_graphs": {"impl": "emulate"}},
    "bert": {"mesh": {"tp": 2}, "tensor_parallel": {"sequence_parallel": True}, "recompute": "full"},
    "mixtral": {"mesh": {"ep": 2, "dp": 2}},
    "loop of experts": {"mesh": {"ep": 2, "dp": 2}},
    "slots of experts": {"mesh": {"ep": 2, "dp": 2}},
}
NUM_STEPS = 2


def planned(name: str, **more: Any) -> Plan:
    return plan_again(build(name), spec_of(name, **{**LAYOUTS.get(name, {"mesh": {"tp": 2}}), **more}))


def lowered(made: Plan) -> list[str]:
    return [passes_text(made, rank, full=True) for rank in range(made.mesh.world_size)]


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name in MODELS if not name.startswith("three heads")])
def test_a_loaded_plan_is_lowered_as_the_saved_one(name: str, tmp_path: Path) -> None:
    made = planned(name)
    made.save(tmp_path / "plan.pt")
    found = Plan.load(tmp_path / "plan.pt")
    assert (found, found.hash()) == (made, made.hash())
    assert lowered(found) == lowered(made)
    assert identity(found) == identity(made)


@pytest.mark.thorough
def test_what_only_forecasts_read_is_loaded_too(tmp_path: Path) -> None:
    made = planned("mixtral", mesh={"ep": 2, "dp": 2}, experts={"imbalance": 1.5})
    made.save(tmp_path / "plan.pt")
    found = Plan.load(tmp_path / "plan.pt")
    assert [f.name for f in fields(Decisions)] == list(DECIDED)
    assert found.to_run()[0].fullest == made.to_run()[0].fullest == 1.5
    assert found.evaluation_memory() == made.evaluation_memory()
    assert found.to_run()[0].lowering.options == made.to_run()[0].lowering.options


# ---- training


def on_meta(name: str) -> Plan:
    with torch.device("meta"):
        model = build(name)
    return plan_again(model, spec_of(name, **LAYOUTS[name], initialization={"method": "normal"}))


def trained(made: Plan) -> tuple[list[float], dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    with Engine(made, timeout_seconds=HANG_SECONDS) as engine:
        losses = []
        for _ in range(NUM_STEPS):
            shapes = {key: (8, *size) for key, (size, _) in made.to_run()[0].batch_inputs.items()}
            batch = {key: torch.randint(64, shape, generator=generator) for key, shape in shapes.items()}
            losses.append(engine.train_step(batch).loss)
        return losses, engine.gather_parameters()


def both(host: Any, name: str, path: str) -> tuple[Any, Any]:
    made = on_meta(name)
    made.save(path)
    return tuple(Ranks(p, "forks", host).run(trained)[0] for p in (made, Plan.load(path)))  # pyright: ignore


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "bert", "mixtral"])
def test_ranks_of_a_loaded_plan_train_to_the_same_bits(lab: Lab, name: str, tmp_path: Path) -> None:
    (losses, weights), (found, found_weights) = lab.call(both, name, str(tmp_path / "plan.pt"))
    assert found == losses
    assert weights.keys() == found_weights.keys()
    assert all(torch.equal(weights[n], found_weights[n]) for n in weights)


def test_a_loaded_plan_needs_values_from_somewhere(tmp_path: Path) -> None:
    made = plan_again(build("gpt2"), spec_of("gpt2", mesh={}, initialization={"method": "model"}))
    made.save(tmp_path / "plan.pt")
    with Engine(Plan.load(tmp_path / "plan.pt")) as engine, pytest.raises(PlanError) as caught:
        engine.train_step({k: torch.zeros(8, *s, dtype=d) for k, (s, d) in made.to_run()[0].batch_inputs.items()})
    assert "a loaded plan lacks the code" in caught.value.what
    assert caught.value.fix.startswith("set method: normal, load weights")


# ---- bad input


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    planned("inner 33").save(tmp_path / "plan.pt")
    return tmp_path / "plan.pt"


def refused(path: Path) -> PlanError:
    with pytest.raises(PlanError) as caught:
        Plan.load(path)
    assert str(path) in str(caught.value)
    return caught.value


def edited(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """The file, with its JSON changed and sealed again."""
    content, tensors = unseal(FORM, path.read_bytes())
    change(content)
    path.write_bytes(seal(FORM, content, tensors))


@pytest.mark.parametrize(
    ("what", "value"),
    [("meshwright", "0.1.0"), ("torch", "2.10"), ("Python", "3.10"), ("meshwright's sources (by hash)", "00")],
)
def test_a_plan_of_another_version_is_refused(saved: Path, what: str, value: str) -> None:
    edited(saved, lambda content: content["written by"].update({what: value}))
    assert refused(saved).what.startswith(f"the plan was saved with another {what}: {value}, here ")


@pytest.mark.parametrize("size", [0, 10, 1000, -100])
def test_a_truncated_plan_is_one_error(saved: Path, size: int) -> None:
    saved.write_bytes(saved.read_bytes()[:size])
    assert "damaged" in refused(saved).what


def test_a_missing_file_and_one_that_is_no_plan(tmp_path: Path) -> None:
    assert "there is no plan file" in refused(tmp_path / "none.pt").what
    torch.save({"weight": torch.ones(2)}, tmp_path / "weights.pt")
    assert "damaged, or is no saved plan" in refused(tmp_path / "weights.pt").what


class Harmful:
    def __reduce__(self) -> Any:
        return os.mkdir, ("harmed",)


def test_nothing_in_a_file_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"json": Harmful()}, "plan.pt")
    refused(Path("plan.pt"))
    Path("pickled.pt").write_bytes(pickle.dumps(Harmful()))
    refused(Path("pickled.pt"))
    assert not Path("harmed").exists()


@pytest.mark.parametrize(
    "entry",
    [["os", "system", ["true"]], ["planner.api", "plan", []], ["passes.types.types", "no_such", []],
     ["planner.files.atomic", "Replacement", ["x"]]],
)  # fmt: skip
def test_only_records_of_ours_are_made(saved: Path, entry: list[Any]) -> None:
    edited(saved, lambda content: content["objects"].insert(0, entry))
    assert "damaged" in refused(saved).what


@pytest.mark.parametrize(
    "target",
    [
        ["os", "getcwd"],
        ["passes.errors", "PlanError"],
        ["op", "aten.no_such.default"],
        ["op", "aten.from_file.default"],
        ["op", "aten.add_.Tensor"],
        ["op", "aten.add.out"],
    ],
)
def test_only_ops_and_functions_of_passes_are_called(target: list[str]) -> None:
    rows = [["call_function", "call", target, {"tuple": []}, {"dict": []}, []]]
    with pytest.raises(NotAllowed, match=r"is no (part|op)"):
        Reader([], [], {}).read({"graph": rows})


def test_a_complex_number_that_fx_would_write_as_a_name_is_no_argument() -> None:
    rows = [
        [
            "call_function",
            "call",
            ["op", "aten.mul.Tensor"],
            {"tuple": [{"complex": [math.nan, 0.0]}]},
            {"dict": []},
            [],
        ]
    ]
    with pytest.raises(ValueError, match="complex is no argument"):
        Reader([], [], {}).read({"graph": rows})


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return 3 * grads[0]  # not its derivative


class OfOwnFunction(nn.Linear):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(Scaled.apply(super().forward(x)), labels)  # pyright: ignore


@pytest.mark.thorough
def test_a_function_of_the_user_is_not_saved_and_nothing_is_written(tmp_path: Path) -> None:
    inputs = {"x": {"shape": [8], "dtype": "float32"}, "labels": {"shape": [], "dtype": "int64", "high": 8}}
    made = plan_again(OfOwnFunction(8, 8), {"mesh": {}, "batch": {"global": 4, "micro": 2}, "inputs": inputs})
    with pytest.raises(PlanError, match="a function of your own"):
        made.save(tmp_path / "plan.pt")
    assert list(tmp_path.iterdir()) == []


def test_an_object_without_a_form_is_named() -> None:
    with pytest.raises(Unstorable, match="Path has no form on disk"):
        Writer().write([Path("x")])


def test_a_plan_loaded_from_json_cannot_be_saved_to_run(tmp_path: Path) -> None:
    planned("inner 33").save(tmp_path / "plan.json")
    with pytest.raises(PlanError, match="does not run"):
        Plan.load(tmp_path / "plan.json").save(tmp_path / "plan.pt")
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


# ---- a model that writes a tensor out in its forward has a plan that runs without it


class Literal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 4), nn.Linear(4, 32)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        scales = torch.tensor([1.0, 2.0, 3.0, 4.0])
        turned = ((self.embed(ids) * scales) * (0.5 - 2j)).real
        return F.cross_entropy(self.head(turned).flatten(0, 1), labels.flatten())


def test_a_tensor_and_a_complex_number_of_a_forward_are_in_the_plans_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Literal()
    inputs = {"ids": {"shape": [8], "dtype": "int64", "high": 32}, "labels": {"like": "ids"}}
    spec = {"mesh": {}, "batch": {"global": 4, "micro": 2}, "inputs": inputs}
    made = plan(model, spec)
    made.save(tmp_path / "plan.pt")
    assert [p.name for p in Plan.load(tmp_path / "plan.pt").parameters] == [p.name for p in made.parameters]
    ids = torch.arange(32).view(4, 8)
    loss = Engine(made).forward_backward({"ids": ids, "labels": ids})
    assert abs(loss - model(ids, ids).item()) < 1e-6
