"""Regions in static memory give what they give eagerly, to the last bit; what a graph would punish shows as numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from planner import PlanError, plan
from runtime import Engine
from runtime.cuda_graphs import by_slot
from runtime.distributed.launch import launch
from tests.models import families

SCOPES = [["attn"], ["mlp"], ["attn", "mlp"], []]
Trained = tuple[list[tuple[float, dict[str, Tensor], float]], dict[str, Tensor]]


def spec_of(entry: families.Entry, scope: list[str] | None, **sections: Any) -> dict[str, Any]:
    inputs = {
        key: {"shape": list(shape), "dtype": str(dtype).removeprefix("torch.")}
        for key, (shape, dtype, _) in entry.inputs.items()
    }
    graphs = {} if scope is None else {"cuda_graphs": {"impl": "emulate", "scope": scope}}
    return {"mesh": {}, "batch": {"global": 8, "micro": 2}, "inputs": inputs, **graphs, **sections}


def engine_of(name: str, scope: list[str] | None, **sections: Any) -> tuple[Engine, families.Entry]:
    entry = families.build(name)
    if "dropout" in name:
        entry.model.train()
    engine = Engine(plan(entry.model, spec_of(entry, scope, **sections)), timeout_seconds=60)
    if engine.graphs is not None:
        engine.capture_graphs()
    return engine, entry


def train(engine: Engine, entry: families.Entry, steps: int = 3) -> Trained:
    """Loss, every gradient and norm of each step, and the parameters after them."""
    found = []
    for step in range(steps):
        loss = engine.forward_backward(entry.batch(8, step))
        found.append((loss, engine.gather_gradients(), engine.optimizer_step().grad_norm))
    return found, engine.gather_parameters()


def differences(a: Trained, b: Trained) -> list[str]:
    """Where two runs are not the same to the last bit."""
    found = []
    for step, (x, y) in enumerate(zip(a[0], b[0], strict=True)):
        found += [f"{step}: {what}" for what, i in (("loss", 0), ("norm", 2)) if x[i] != y[i]]
        found += [f"{step}: gradient of {name}" for name in x[1] if not torch.equal(x[1][name], y[1][name])]
    return found + [f"parameter {name}" for name in a[1] if not torch.equal(a[1][name], b[1][name])]


@pytest.mark.parametrize(
    "name", ["gpt2-dropout", "llama", "bert", "t5", "falcon-new", "twice", "frozen", "relative-bias"]
)
def test_regions_give_what_they_give_eagerly(name):
    with (made := engine_of(name, None))[0] as engine:
        eager = train(engine, made[1])
    for scope in SCOPES:
        with (made := engine_of(name, scope))[0] as engine:
            assert differences(eager, train(engine, made[1])) == [], scope
            assert engine.graphs is not None
            assert engine.graphs.num_replays > 0
            assert engine.graphs.static_bytes == engine.plan.memory[0].graph_buffers


def train_layouts(name: str, layouts: list[tuple[dict[str, int], dict[str, Any]]]) -> list[list[str]]:
    """On this rank, for each layout, where its regions differ from the same layout without."""
    found = []
    for mesh, sections in layouts:
        runs = []
        for scope in (None, ["attn"], ["attn", "mlp"], [], ["full_iteration"]):
            with (made := engine_of(name, scope, mesh=mesh, **sections))[0] as engine:
                runs.append(train(engine, made[1], 2))
        found += [differences(runs[0], run) for run in runs[1:]]
    return found


INTERLEAVED = {"pipeline": {"schedule": "interleaved_1f1b"}}
SEQUENCE = {"tensor_parallel": {"sequence_parallel": True}}
LAYOUTS: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"tp": 2, "pp": 2}, {}),
    ({"tp": 2, "pp": 2}, {"pipeline": {"schedule": "gpipe"}}),
    ({"tp": 2, "dp": 2}, SEQUENCE | {"optimizer": {"bucket_size": 5000}}),
    ({"tp": 2, "pp": 2, "vpp": 2}, INTERLEAVED | SEQUENCE),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2-dropout", "llama"])
def test_layouts_with_regions_give_what_they_give_without(name):
    for found in launch(train_layouts, 4, name, LAYOUTS, timeout_seconds=280):
        assert [different for different in found if different] == []


@pytest.mark.parametrize("microbatches", [4, 16, 64])
def test_the_number_of_graphs_does_not_follow_the_number_of_microbatches(microbatches):
    entry = families.build("gpt2")
    spec = spec_of(entry, ["attn"], batch={"global": microbatches, "micro": 1})
    with Engine(plan(entry.model, spec)) as engine:
        engine.capture_graphs()
        engine.train_step(entry.batch(microbatches, 0))
        assert engine.graphs is not None
        assert (engine.graphs.num_graphs, engine.graphs.num_replays) == (2 * 4, 4 * microbatches)


def test_the_first_steps_and_evaluations_run_eagerly():
    entry = families.build("gpt2")
    spec = spec_of(entry, ["attn"])
    spec["cuda_graphs"]["warmup_steps"] = 2
    with Engine(plan(entry.model, spec)) as engine:
        replays = []
        for step in range(3):
            engine.train_step(entry.batch(8, step))
            engine.evaluate(entry.batch(8, step))
            assert engine.graphs is not None
            replays.append(engine.graphs.num_replays)
    assert replays == [0, 0, 4 * 4]


def test_two_engines_of_one_process_have_memory_of_their_own():
    first, entry = engine_of("gpt2", ["attn"])
    second, _ = engine_of("gpt2", ["attn"])
    with first, second:
        runs = [train(first, entry, 1), train(second, entry, 1)]
        assert differences(*runs) == []


def test_capturing_without_regions_is_an_error():
    engine, _ = engine_of("gpt2", None)
    with engine, pytest.raises(PlanError, match="no regions"):
        engine.capture_graphs()


# ---- mutants: each is wrong in a way that a GPU would not report


def released_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """All microbatches use slot 0, as if the one before were done."""
    monkeypatch.setattr(Emulation, "before_forward", lambda self, action: None)


def input_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    real = emulate._copy
    monkeypatch.setattr(
        emulate, "_copy", lambda to, values: None if len(to) == 1 and to[0].ndim == 3 else real(to, values)
    )


def kept_over_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient is handed out where it lies, and read after the next backward of its slot."""
    real: Callable[..., Any] = Slot.backward
    kept: dict[int, list[Tensor]] = {}

    def backward(self: Slot, gradients: list[Any]) -> Any:
        _, of_weights = real(self, gradients)
        before = kept.get(id(self), self.of_inputs)
        kept[id(self)] = [static.clone() for static in self.of_inputs]
        return before, of_weights

    monkeypatch.setattr(Slot, "backward", backward)


def stale_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every replay draws the numbers of the capture."""
    from passes.ops.random_state import RandomState

    monkeypatch.setattr(RandomState, "begin", lambda self, step, microbatch: None)


def gradient_of_later_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes through a region comes back without its gradient."""
    real: Callable[..., Any] = Slot.backward

    def backward(self: Slot, gradients: list[Any]) -> Any:
        count = len(self.of_outputs)
        return real(self, [*gradients[:count], *(None for _ in gradients[count:])])

    monkeypatch.setattr(Slot, "backward", backward)


@pytest.mark.parametrize(
    "mutant", [released_early, input_not_copied, kept_over_a_replay, stale_masks, gradient_of_later_lost]
)
def test_a_mistake_shows_as_numbers(mutant, monkeypatch):
    name = {stale_masks: "gpt2-dropout", gradient_of_later_lost: "bert"}.get(mutant, "llama")
    in_flight = mutant is released_early  # all microbatches at once, else one after another
    sections = {"pipeline": {"schedule": "gpipe"}} if in_flight else {}
    with (made := engine_of(name, None, **sections))[0] as engine:
        eager = train(engine, made[1], 1)
    mutant(monkeypatch)
    with (made := engine_of(name, ["attn"], **sections))[0] as engine:
        assert differences(eager, train(engine, made[1], 1))
