"""Regions in static memory give what they give eagerly, to the last bit; what a graph would punish shows as numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from planner import PlanError, plan
from planner.pipeline.schedule import Action
from runtime import Engine
from runtime.cuda_graphs import by_slot, region_graphs
from runtime.cuda_graphs.by_slot import GraphsBySlot
from runtime.cuda_graphs.emulate import Emulation
from runtime.cuda_graphs.region_graphs import Region, RegionGraphs
from runtime.distributed.launch import launch
from runtime.optimizer.buffers import GradientBuffers
from runtime.optimizer.in_place import all_gather
from tests.models import families

SCOPES = [["attn"], ["mlp"], ["attn", "mlp"], [], ["full_iteration"]]
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


def figures(engine: Engine) -> tuple[int, int, int]:
    """Graphs, replays and static bytes of this rank, as the run counted them."""
    assert engine.graphs is not None
    return engine.graphs.num_graphs, engine.graphs.num_replays, engine.graphs.static_bytes


def planned(engine: Engine, steps: int) -> tuple[int, int, int]:
    """The same by the plan."""
    rank = engine.groups.pp_rank
    rows = [row for row in engine.plan.graph_slots if row.pp_rank == rank]
    num_bytes = sum(row.bytes for row in rows)
    assert num_bytes == engine.plan.memory[rank].graph_buffers
    return sum(row.num_graphs for row in rows), steps * sum(row.num_replays for row in rows), num_bytes


@pytest.mark.parametrize(
    "name", ["gpt2-dropout", "llama", "bert", "t5", "falcon-new", "twice", "frozen", "relative-bias"]
)
def test_regions_give_what_they_give_eagerly(name):
    with (made := engine_of(name, None))[0] as engine:
        eager = train(engine, made[1])
    for scope in SCOPES:
        with (made := engine_of(name, scope))[0] as engine:
            assert differences(eager, train(engine, made[1])) == [], scope
            assert figures(engine) == planned(engine, steps=3)


def train_layouts(name: str, layouts: list[tuple[dict[str, int], dict[str, Any]]]) -> list[list[str]]:
    """On this rank, for each layout, where its regions differ from the same layout without."""
    found = []
    for mesh, sections in layouts:
        runs = []
        for scope in (None, ["attn"], ["attn", "mlp"], [], ["full_iteration"]):
            with (made := engine_of(name, scope, mesh=mesh, **sections))[0] as engine:
                runs.append(train(engine, made[1], 2))
                if engine.graphs is not None:
                    assert figures(engine) == planned(engine, steps=2)
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


@pytest.mark.parametrize("microbatches", [16, 64, 256])
def test_the_number_of_graphs_does_not_follow_the_number_of_microbatches(microbatches):
    entry = families.build("gpt2")
    found = []
    for scope in (["attn"], ["full_iteration"]):
        spec = spec_of(entry, scope, batch={"global": microbatches, "micro": 1})
        with Engine(plan(entry.model, spec)) as engine:
            engine.capture_graphs()
            engine.train_step(entry.batch(microbatches, 0))
            assert engine.graphs is not None
            found.append((engine.graphs.num_graphs, engine.graphs.num_replays))
    assert found == [(2 * 4, 2 * 4 * microbatches), (1, 1)]


@pytest.mark.parametrize("scope", [["attn"], ["full_iteration"]])
def test_the_first_steps_and_evaluations_run_eagerly(scope):
    entry = families.build("gpt2")
    spec = spec_of(entry, scope)
    spec["cuda_graphs"]["warmup_steps"] = 2
    with Engine(plan(entry.model, spec)) as engine:
        replays = []
        for step in range(3):
            engine.train_step(entry.batch(8, step))
            engine.evaluate(entry.batch(8, step))
            assert engine.graphs is not None
            replays.append(engine.graphs.num_replays)
    assert replays == [0, 0, 1 if "full_iteration" in scope else 2 * 4 * 4]


@pytest.mark.parametrize("scope", [["attn"], ["full_iteration"]])
def test_evaluations_see_the_weights_of_graphed_steps_and_change_nothing(scope):
    losses = []
    for asked in (None, scope):
        engine, entry = engine_of("gpt2-dropout", asked)
        with engine:
            for step in range(3):
                losses += [engine.train_step(entry.batch(8, step)).loss, engine.evaluate(entry.batch(8, 9))]
    assert losses[:6] == losses[6:]


@pytest.mark.parametrize("scope", [["attn"], ["full_iteration"]])
def test_weights_that_are_loaded_later_are_seen(scope, tmp_path):
    other = families.build("gpt2").model
    with torch.no_grad():
        other.transformer.h[0].attn.c_attn.weight.mul_(1.5)
    other.save_pretrained(tmp_path)
    runs = []
    for asked in (None, scope):
        engine, entry = engine_of("gpt2", asked)
        with engine:
            before = train(engine, entry, 1)
            engine.load_pretrained(tmp_path)
            runs.append([before, train(engine, entry, 2)])
    assert [differences(a, b) for a, b in zip(*runs, strict=True)] == [[], []]
    assert runs[0][0][0][0][0] != runs[0][1][0][0][0]  # the loss of other weights


@pytest.mark.parametrize("scope", [["attn"], ["full_iteration"]])
def test_graphs_are_captured_anew_on_demand(scope):
    with (made := engine_of("gpt2-dropout", None))[0] as engine:
        eager = train(engine, made[1])
    engine, entry = engine_of("gpt2-dropout", scope)
    with engine:
        steps = []
        for step in range(3):
            steps.append((engine.forward_backward(entry.batch(8, step)), engine.gather_gradients()))
            engine.capture_graphs()  # before the update: it is the next step that captures
            steps[-1] = (*steps[-1], engine.optimizer_step().grad_norm)
        assert differences(eager, (steps, engine.gather_parameters())) == []
        assert engine.graphs is not None
        assert engine.graphs.num_graphs == (1 if "full_iteration" in scope else 2 * 4)


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
    monkeypatch.setattr(GraphsBySlot, "before_forward", lambda self, action: None)


def input_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_graphs, "copy_in", lambda statics, values: None)


def gradients_not_zeroed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the capture added stays in the buffers."""
    real = GradientBuffers.begin_step

    def begin_step(self: GradientBuffers) -> None:
        of_graphs, self._in_graphs = self._in_graphs, []
        real(self)
        self._in_graphs = of_graphs
        for slot in of_graphs:
            slot.is_fresh = False

    monkeypatch.setattr(GradientBuffers, "begin_step", begin_step)


def backward_captured_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_slot, "backward_order", list)


def kept_over_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient is handed out where it lies, and read after the next backward of its slot."""
    real: Callable[..., Any] = RegionGraphs.backward
    kept: dict[int, list[Tensor]] = {}

    def backward(self: RegionGraphs, gradients: list[Any]) -> Any:
        of_inputs, of_shared = real(self, gradients)
        before = kept.get(id(self), self.of_inputs)
        kept[id(self)] = of_inputs
        return before, of_shared

    monkeypatch.setattr(RegionGraphs, "backward", backward)


def stale_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every replay goes on where the generators are."""
    real = Region.put_generators
    monkeypatch.setattr(Region, "put_generators", lambda self: real(self) if self.random.registered else None)


def gradient_of_later_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes through a region comes back without its gradient."""
    real: Callable[..., Any] = RegionGraphs.backward

    def backward(self: RegionGraphs, gradients: list[Any]) -> Any:
        count = len(self.of_outputs)
        return real(self, [*gradients[:count], *(None for _ in gradients[count:])])

    monkeypatch.setattr(RegionGraphs, "backward", backward)


@pytest.mark.parametrize(
    "mutant",
    [
        released_early,
        input_not_copied,
        gradients_not_zeroed,
        backward_captured_forwards,
        kept_over_a_replay,
        stale_masks,
        gradient_of_later_lost,
    ],
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


@pytest.mark.parametrize("one_pool", [False, True])
def test_one_pool_for_all_slots_is_wrong_where_they_interleave(one_pool):
    """Rank 0's order of 1F1B over two stages; there is one stage here, so the order of microbatches is all of it."""
    order = [Action(kind, m, 0) for kind, m in zip("FFBFBFBB", (0, 1, 0, 2, 1, 3, 2, 3), strict=True)]
    with (made := engine_of("gpt2", None))[0] as engine:
        eager = train(engine, made[1], 1)
    engine, entry = engine_of("gpt2", ["attn"])
    with engine:
        program, device = engine.program, engine.groups.device
        maker, buffers = Emulation(program.random, device), engine.optimizer.buffers
        engine.graphs = GraphsBySlot(program, tuple(order), buffers, maker, device, one_pool=one_pool)
        engine.executor.order, engine.executor.before_forward = tuple(order), engine.graphs.before_forward
        engine.capture_graphs()
        assert bool(differences(eager, train(engine, entry, 1))) == one_pool


def train_behind_late_gathers(scope: list[str] | None, hooks: bool) -> Trained:
    """Two steps on two dp ranks; updated parameters are gathered when somebody waits for them, and not before."""

    def start_parameter_gather(self: GradientBuffers) -> None:
        for *place, bucket in reversed(self._order):
            waiting = SimpleNamespace(wait=partial(all_gather, bucket.parameters, bucket.own_parameters, group=group))
            self._gathers[place[0], place[1]] = waiting

    sections: dict[str, Any] = {"mesh": {"dp": 2}, "optimizer": {"bucket_size": 5000}}
    with (made := engine_of("gpt2", scope, **sections))[0] as engine, pytest.MonkeyPatch.context() as patch:
        group = engine.optimizer.buffers.data_parallel.group
        patch.setattr(GradientBuffers, "start_parameter_gather", start_parameter_gather)
        assert engine.program.gate is not None
        if not hooks:
            engine.program.gate.wait = None
        return train(engine, made[1], 2)


@pytest.mark.slow
def test_parameters_are_waited_for_before_a_replay_reads_them():
    runs = [launch(train_behind_late_gathers, 2, *given, timeout_seconds=120) for given in LATE]
    eager, graphed, in_one, without_hooks = (run[0] for run in runs)
    assert differences(eager, graphed) == []
    assert differences(eager, in_one) == []
    assert differences(eager, without_hooks)


LATE: list[tuple[list[str] | None, bool]] = [
    (None, True),
    (["attn", "mlp"], True),
    (["full_iteration"], True),
    (["attn", "mlp"], False),
]
