"""One capture serves the plans of many specs; another model, or a spec that asks for another capture, is refused."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import planner
from planner import Captured, Plan, PlanError, capture, plan
from planner.api import find_layouts
from planner.lower import passes_text
from runtime import Engine
from tests.models.families import Entry, build
from tests.tools.commands import python
from tests.tools.limits import HANG_SECONDS
from tests.tools.specs import entry_inputs

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2 pp2": {"mesh": {"tp": 2, "pp": 2}},
    "masks named, more microbatches": {"dropout": "layout_invariant", "batch": {"global": 16, "micro": 2}},
    "norms fused, one microbatch": {"mesh": {"tp": 2}, "fuse_norms": True, "batch": {"global": 2, "micro": 2}},
}
# tied weights and dropout, experts, checks that are assumed, a loss that is captured at two sizes
FAMILIES = ["gpt2-dropout", "mixtral", "own-round", "z-loss"]


def spec_of(entry: Entry, **sections: Any) -> dict[str, Any]:
    inputs = entry_inputs(entry, bounded=True)
    sizes = {"tensor_parallel": {"vocabulary_multiple": 8}}
    return {"mesh": {}, "batch": {"global": 8, "micro": 2}, "inputs": inputs, **sizes, **sections}


def texts_of(made: Plan) -> tuple[str, str, str, str]:
    return made.hash(), json.dumps(made.to_dict()), made.describe(full=True), passes_text(made, 0, full=True)


def texts_or_refusal(model: nn.Module | Captured, spec: dict[str, Any]) -> Any:
    try:
        return texts_of(plan(model, spec))
    except PlanError as error:
        return str(error)


@pytest.mark.thorough
@pytest.mark.parametrize("name", FAMILIES)
def test_plans_of_one_capture_are_those_of_the_model(name: str):
    entry = build(name)
    captured = capture(entry.model, spec_of(entry))
    expected = {layout: texts_or_refusal(entry.model, spec_of(entry, **LAYOUTS[layout])) for layout in LAYOUTS}
    for layout in (*LAYOUTS, *LAYOUTS):  # the second plan comes after those that rewrote their programs
        assert texts_or_refusal(captured, spec_of(entry, **LAYOUTS[layout])) == expected[layout]


@pytest.mark.thorough
@pytest.mark.parametrize("batch", [{"global": 8}, {"global": 8, "micro": 2}])
def test_a_search_of_a_capture_finds_the_layout_of_the_model(batch: dict[str, int]):
    entry = build("gpt2")
    spec = spec_of(entry, mesh="auto", batch=batch, cluster="cpu-local", devices=4)
    captured = capture(entry.model, spec)
    assert texts_of(plan(captured, spec)) == texts_of(plan(entry.model, spec))
    assert [str(c.point) for c in find_layouts(captured, spec).best] == [
        str(c.point) for c in find_layouts(entry.model, spec).best
    ]
    assert captured.batch_sizes == (2,)


@pytest.mark.thorough
def test_a_capture_of_example_inputs_serves_specs_without_inputs():
    entry = build("gpt2")
    spec = spec_of(entry)
    without = {key: value for key, value in spec.items() if key != "inputs"}
    captured = capture(entry.model, without, entry.batch(2, 0))
    assert texts_of(plan(captured, without)) == texts_of(plan(entry.model, without, entry.batch(2, 0)))
    assert plan(captured, spec).hash() == plan(entry.model, spec).hash()
    with pytest.raises(PlanError, match="a microbatch 4 rows"):
        plan(captured, without | {"batch": {"global": 8, "micro": 4}})


def gradients_of(entry: Entry, batch: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    loss = entry.loss(entry.model(**batch))
    entry.model.zero_grad()
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in entry.model.named_parameters() if p.grad is not None}


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["gpt2", "experts"])
def test_two_plans_of_one_capture_train_side_by_side_as_one_process(name: str):
    """Their steps alternate: what the one rewrites, cuts into stages or writes into constants is not the other's."""
    entry, alone = build(name), build(name)
    captured = capture(entry.model, spec_of(entry))
    sections: list[dict[str, Any]] = [
        {"optimizer": {"name": "adamw", "clip_grad_norm": None}},
        {"recompute": "full", "optimizer": {"name": "adamw", "clip_grad_norm": None}, "mesh": {"vpp": 1}},
    ]
    plans = [plan(captured, spec_of(entry, **more)) for more in sections]
    texts = [texts_of(made) for made in plans]
    engines = [Engine(made, timeout_seconds=HANG_SECONDS) for made in plans]
    assert [texts_of(made) for made in plans] == texts
    for step in range(2):
        batch = entry.batch(8, step)
        loss, gradients = gradients_of(alone, batch)
        for engine in engines:
            assert engine.forward_backward(batch) == pytest.approx(loss, rel=1e-6)
            found = engine.gather_gradients()
            for fqn, gradient in gradients.items():
                torch.testing.assert_close(found[fqn].double(), gradient.double(), rtol=1e-5, atol=1e-8)
            engine.optimizer_step()
        with torch.no_grad():
            updated = engines[0].gather_parameters()
            for fqn, parameter in alone.model.named_parameters():
                torch.testing.assert_close(updated[fqn], engines[1].gather_parameters()[fqn])
                parameter.copy_(updated[fqn])
    for engine in engines:
        engine.close()


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.scale, self.table = 1.0, [torch.ones(4)]
        self.register_buffer("shift", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.down(self.up(x).relu()) * self.scale + self.table[0] + self.shift).square().mean()


SPEC: dict[str, Any] = {
    "mesh": {"tp": 2},
    "batch": {"global": 4, "micro": 2},
    "inputs": {"x": {"shape": [4], "dtype": "float32"}},
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"batch": {"global": 4, "micro": 1}}, "x [2, 4] float32; the spec has [1, 4] float32"),
        ({"inputs": {"x": {"shape": [3, 4], "dtype": "float32"}}}, "the spec has [2, 3, 4] float32"),
        ({"inputs": {"x": {"shape": [4], "dtype": "float64"}}}, "the spec has [2, 4] float64"),
        ({"inputs": {"y": {"shape": [4], "dtype": "float32"}}}, "captured with inputs x; the spec has y"),
        ({"loss": {"output": "loss"}}, "captured with loss: auto; the spec has {output: loss}"),
        ({"precision": {"parameters": "bfloat16"}}, "in the model's own dtype; the spec has bfloat16"),
    ],
)
def test_a_spec_that_asks_for_another_capture_is_refused_at_its_key(change: dict[str, Any], what: str, tmp_path: Path):
    captured = capture(Small(), SPEC)
    path = tmp_path / "spec.yaml"
    path.write_text(json.dumps(SPEC | change, indent=1))
    with pytest.raises(PlanError) as error:
        plan(captured, path)
    assert what in error.value.what
    assert "spec.yaml:" in str(error.value.where)
    assert "capture(model, spec)" in error.value.fix


def _patched(model: Small) -> None:
    model.forward = lambda x: model.down(model.up(x).relu()).square().mean()


def _shifted(model: Small) -> None:
    model.get_buffer("shift").add_(1.0)


CHANGES: dict[str, Callable[[Small], Any]] = {
    "up.training": lambda model: model.up.eval(),
    "scale": lambda model: setattr(model, "scale", 2.0),
    "shift": _shifted,
    "table": lambda model: model.table[0].add_(1.0),
    "up.weight": lambda model: model.up.weight.requires_grad_(False),
    "up.bias": lambda model: setattr(model.up, "bias", None),
    "down": lambda model: setattr(model, "down", nn.Sequential(nn.Linear(8, 4))),
    "down._forward_pre_hooks": lambda model: model.down.register_forward_pre_hook(lambda module, args: args),
    "forward": _patched,
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", CHANGES)
def test_a_model_that_has_changed_since_is_refused_by_name(name: str):
    model = Small()
    captured = capture(model, SPEC)
    plan(captured, SPEC)
    CHANGES[name](model)
    with pytest.raises(PlanError, match="the model has changed since it was captured") as error:
        plan(captured, SPEC)
    assert name in error.value.what
    assert plan(capture(model, SPEC), SPEC) == plan(model, SPEC)


def test_another_default_dtype_is_refused():
    captured = capture(Small(), SPEC)
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(PlanError, match=r"torch\.get_default_dtype\(\) has changed"):
            plan(captured, SPEC)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.thorough
def test_weights_may_have_other_values():
    model = Small()
    captured = capture(model, SPEC)
    with torch.no_grad():
        model.up.weight.mul_(2.0)
    assert plan(captured, SPEC) == plan(model, SPEC)


def _plus_one(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return out + 1.0


class Closed(nn.Module):
    """Its attributes have no form on disk: a closure, a bound method, a module that is not registered, a lock."""

    def __init__(self) -> None:
        super().__init__()
        self.up, factor = nn.Linear(4, 4), [2.0]
        self.factor, self.times = factor, lambda x: x * factor[0]
        self.bound, self.others, self.lock = factor.copy, [nn.ReLU()], pickle.Unpickler
        self.up.register_forward_hook(_plus_one)

    def forward(self, x: Tensor) -> Tensor:
        return self.times(self.others[0](self.up(x))).square().mean()


@pytest.mark.thorough
def test_what_a_closure_holds_is_compared():
    model = Closed()
    captured = capture(model, SPEC | {"mesh": {}})
    assert plan(captured, SPEC | {"mesh": {}}) == plan(model, SPEC | {"mesh": {}})
    model.factor[0] = 3.0
    with pytest.raises(PlanError, match=r"the model has changed since it was captured: (factor|times)"):
        plan(captured, SPEC | {"mesh": {}})


class Decorated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    @torch.autocast("cpu", dtype=torch.bfloat16)
    def forward(self, x: Tensor) -> Tensor:
        return self.up(x).float().square().mean()


def test_what_a_context_manager_notes_on_entry_is_no_change():
    model = Decorated()
    captured = capture(model, SPEC | {"mesh": {}})
    with torch.autocast("cpu", enabled=False, cache_enabled=False):
        model(torch.zeros(2, 4))  # the decorator keeps the settings that it found
    assert plan(captured, SPEC | {"mesh": {}}) == plan(model, SPEC | {"mesh": {}})


def test_it_says_in_one_line_what_was_captured():
    captured = capture(Small(), SPEC | {"precision": {"parameters": "bfloat16"}})
    assert repr(captured).startswith("Captured(Small of x [2, 4] float32, as bfloat16, ")
    assert "\n" not in repr(captured)
    assert captured.inputs == {"x": ((2, 4), torch.float32)}
    assert captured.seconds > 0


def test_a_capture_of_no_model_is_refused():
    for wrong in ("model", capture(Small(), SPEC)):
        with pytest.raises(PlanError, match=r"not a torch\.nn\.Module"):
            capture(wrong, SPEC)  # pyright: ignore[reportArgumentType]


@pytest.mark.thorough
def test_the_function_and_the_room_share_a_name():
    assert planner.capture.export.__name__ == "planner.capture.export"  # pyright: ignore
    code = "import planner; from planner import capture; assert planner.capture is capture; "
    code += "import planner.capture.export; assert planner.capture is capture; assert callable(capture)"
    assert not python("-c", code).returncode
