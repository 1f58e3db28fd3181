"""Engines whose regions Transformer Engine's function captures train as eager ones."""

import gc
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from passes.ops.axis import AxisHandle
from planner import plan
from planner.lower import lower
from runtime import Engine
from runtime.cuda_graphs import transformer_engine
from runtime.cuda_graphs.transformer_engine import RegionModule, TransformerEngineGraphs
from runtime.distributed.faults.failure import StepError
from runtime.engine import build
from runtime.optimizer.buffers import GradientBuffers
from tests.models import families
from tests.tools.captures import plan_again
from tests.tools.graphed_runs import Trained, engine_of, spec_of, train
from tests.tools.limits import HANG_SECONDS
from tests.tools.ranks import Ranks
from tests.tools.recorded_graphs import Device, on_a_cpu, on_a_gpu
from tests.tools.transformer_engine_source import (
    VARIABLE,
    Source,
    local_source,
)

CPU = torch.device("cpu")
GPIPE = {"pipeline": {"schedule": "gpipe"}}


INTERLEAVED = {"pipeline": {"schedule": "interleaved_1f1b"}}


SEQUENCE = {"tensor_parallel": {"sequence_parallel": True}}


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["gpt2", "t5"])
@pytest.mark.parametrize(
    ("mesh", "sections"), [({"pp": 2}, {}), ({"pp": 2}, GPIPE), ({"pp": 2, "vpp": 2}, INTERLEAVED), ({}, {})]
)
def test_the_plan_counts_its_graphs_and_static_inputs(name, mesh, sections):
    entry = families.build(name)
    spec = spec_of(entry, ["attn", "mlp"], mesh=mesh, **sections)
    spec["cuda_graphs"]["impl"] = "transformer_engine"
    planned = plan_again(entry.model, spec)
    for rank, order in enumerate(planned.schedule.orders):
        given = TransformerEngineGraphs(lower(planned, rank, CPU), order, CPU).arguments()
        rows = [row for row in planned.graph_slots if row.pp_rank == rank]
        assert sum(row.num_graphs for row in rows) == 2 * len(given.sample_args)
        inputs = {id(t): t.nbytes for sample in given.sample_args for t in sample}
        assert sum(row.input_bytes for row in rows) == sum(inputs.values())


def graphed(device: Device, name: str, scope: list[str], **sections: Any) -> tuple[Engine, families.Entry]:
    """An engine whose regions the real code captures before its first step."""
    entry = families.build(name)
    if "dropout" in name:
        entry.model.train()
    spec = spec_of(entry, scope, **sections)
    spec["cuda_graphs"]["impl"] = "transformer_engine"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "check_backend", lambda impl, device: None)
        engine = Engine(plan_again(entry.model, spec), timeout_seconds=HANG_SECONDS)
    device.random = engine.program.random
    engine.capture_graphs()
    return engine, entry


def close(a: Trained, b: Trained) -> bool:
    """To the last few bits: addends of an input's gradient meet in another order, and the gradient of a weight is made
    by autograd before it is added, not added within its product."""
    pairs = [(x[1][n], y[1][n]) for x, y in zip(a[0], b[0], strict=True) for n in x[1]]
    pairs += [(a[1][n], b[1][n]) for n in a[1]]
    losses = all(abs(x[0] - y[0]) < 1e-12 for x, y in zip(a[0], b[0], strict=True))
    return losses and all(torch.allclose(x, y, rtol=1e-10, atol=1e-13) for x, y in pairs)


def eager(name: str, steps: int, **sections: Any) -> Trained:
    with (made := engine_of(name, None, **sections))[0] as engine:
        return train(engine, made[1], steps)


def assert_counts(engine: Engine, steps: int) -> None:
    """Graphs, replays and static inputs of this rank are those of the plan."""
    graphs, rank = engine.graphs, engine.groups.place["pp"]
    assert isinstance(graphs, TransformerEngineGraphs)
    rows = [row for row in engine.plan.graph_slots if row.pp_rank == rank]
    assert graphs.num_graphs == sum(row.num_graphs for row in rows) > 0
    assert graphs.num_replays == steps * sum(row.num_replays for row in rows)
    assert graphs.static_bytes == sum(row.input_bytes for row in rows)


ENGINES: dict[str, tuple[str, list[str], dict[str, Any]]] = {
    "dropout, one by one": ("gpt2-dropout", ["attn"], {}),
    "dropout, all in flight": ("gpt2-dropout", [], GPIPE),
    "several readers of an input": ("t5", ["attn", "mlp"], GPIPE),
    "weights that run twice": ("twice", ["attn", "mlp"], {}),
}


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize(("name", "scope", "sections"), ENGINES.values(), ids=ENGINES)
def test_regions_give_what_they_give_eagerly(name, scope, sections, te_device):
    before = eager(name, 2, **sections)
    with (made := graphed(te_device, name, scope, **sections))[0] as engine:
        found = train(engine, made[1], 2)
        assert close(before, found)
        assert_counts(engine, 2)


@pytest.mark.thorough
@pytest.mark.slow
def test_a_capture_leaves_no_gradient_and_can_be_made_again_and_an_evaluation_runs_eagerly(te_device):
    before = eager("gpt2-dropout", 1)
    engine, entry = graphed(te_device, "gpt2-dropout", ["attn"])
    with engine:
        engine.evaluate(entry.batch(8, 0))
        assert engine.graphs.num_replays == 0
        engine.graphs.capture()
        trained = [p for stage in engine.program.stages for p in stage.module.parameters()]
        assert all(p.grad is None for p in trained)
        engine.capture_graphs()
        assert close(before, train(engine, entry, 1))


def graphed_ranks(source: Source, folder: str, sections: dict[str, Any]) -> tuple[bool, bool]:
    """On this rank: whether it gives what it gives eagerly, and counts the same collectives."""
    with (made := engine_of("llama", None, **sections))[0] as engine:
        before, counts = train(engine, made[1], 2), counted(engine)
    own = Path(folder) / str(engine.groups.rank)
    own.mkdir()
    with on_a_cpu(source, own) as device, (made := graphed(device, "llama", ["attn", "mlp"], **sections))[0] as engine:
        found = close(before, train(engine, made[1], 2)), counts == counted(engine)
        assert_counts(engine, 2)
    return found


def counted(engine: Engine) -> Any:
    axes: dict[str, AxisHandle] = engine.program.axes
    return {name: (axis.counts, axis.bytes) for name, axis in axes.items()}


@pytest.mark.thorough
@pytest.mark.slow
def test_layouts_give_what_they_give_eagerly(te_running, tmp_path):
    sections = {"mesh": {"tp": 2, "pp": 2, "vpp": 2}} | INTERLEAVED | SEQUENCE
    for found in Ranks(4, "processes").run(graphed_ranks, te_running, str(tmp_path), sections):
        assert found == (True, True)


def hooks_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hooks of the buffers take the gradients of the capture away: its graphs then have none for weights."""
    monkeypatch.setattr(GradientBuffers, "deaf", lambda self: torch.enable_grad())


def stale_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every replay goes on where the generators are."""
    monkeypatch.setattr(RegionModule, "put_generators", lambda self: None)


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("mutant", [hooks_listen, stale_masks])
def test_a_mistake_shows_as_numbers_in_an_engine(mutant, te_device, monkeypatch):
    before = eager("gpt2-dropout", 1)
    mutant(monkeypatch)
    with (made := graphed(te_device, "gpt2-dropout", ["attn"]))[0] as engine:
        assert not close(before, train(engine, made[1], 1))


@pytest.mark.thorough
@pytest.mark.slow
def test_a_generator_that_its_tracker_does_not_hold_draws_in_no_graph(te_device, monkeypatch):
    tracker = sys.modules[transformer_engine.DISTRIBUTED].CudaRNGStatesTracker
    monkeypatch.setattr(tracker, "set_states", lambda self, states: None)
    engine, entry = graphed(te_device, "gpt2-dropout", ["attn"])
    with pytest.raises(StepError, match="not registered"), engine:
        engine.train_step(entry.batch(8, 0))
    assert gc.isenabled()  # which the real code had switched off


@contextmanager
def its_function(folder: Path) -> Iterator[None]:
    """Of the installed package, or of a source that is given; skips without either."""
    try:
        importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError) as reason:
        source = local_source()
        if source is None:
            pytest.skip(f"{reason}; {VARIABLE} is not set")
        with on_a_gpu(source, folder), pytest.MonkeyPatch.context() as patch:
            patch.setattr(build, "check_backend", lambda impl, device: None)
            yield
    else:
        yield


@pytest.mark.gpu
@pytest.mark.parametrize("sections", [{}, GPIPE], ids=["one-by-one", "all-in-flight"])
@pytest.mark.parametrize("name", ["gpt2", "gpt2-dropout", "llama", "t5"])
def test_regions_on_a_gpu_give_what_they_give_eagerly(name, sections, tmp_path):
    runs = []
    with its_function(tmp_path):
        for impl in ("none", "transformer_engine"):
            entry = families.build(name)
            if "dropout" in name:
                entry.model.train()
            spec = spec_of(entry, ["attn", "mlp"], **sections)
            spec["cuda_graphs"] = {"impl": impl} if impl == "none" else spec["cuda_graphs"] | {"impl": impl}
            with Engine(plan(entry.model, spec), device="cuda:0") as engine:
                if impl != "none":
                    assert isinstance(engine.graphs, TransformerEngineGraphs)
                    engine.capture_graphs()
                runs.append(train(engine, entry))
                if impl != "none":
                    assert engine.graphs.num_replays > 0
    assert close(*runs)
