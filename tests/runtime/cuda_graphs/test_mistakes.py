"""Mistakes that a GPU would not report show as numbers, each as a mutant of ours."""

import tomllib
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from passes.errors import SpecError
from planner import PlanError
from planner.pipeline.schedule import Action
from planner.spec.spec import Spec
from runtime import Engine
from runtime.cli import app
from runtime.compiled.requirements import EXTRA, check_backend, check_machine
from runtime.cuda_graphs import region_graphs
from runtime.cuda_graphs.recorded import Emulation, RecordedGraph
from runtime.cuda_graphs.region_graphs import GraphsBySlot, Region, RegionGraphs
from runtime.distributed import groups as groups_file
from runtime.distributed.groups import Groups
from runtime.optimizer.buffers import GradientBuffers
from tests.tools.graphed_runs import differences, engine_of, train, trained
from tests.tools.laboratory import Case, Lab
from tests.tools.limits import HANG_SECONDS
from tests.tools.paths import ROOT
from tests.tools.planted.schedule import gradients_in_graphs_not_zeroed


def released_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """All microbatches use slot 0, as if the one before were done."""
    monkeypatch.setattr(GraphsBySlot, "before_forward", lambda self, action: None)


def input_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_graphs, "copy_in", lambda statics, values: None)


def gradients_not_zeroed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the capture added stays in the buffers."""
    monkeypatch.setattr(GradientBuffers, "begin_step", gradients_in_graphs_not_zeroed(GradientBuffers.begin_step))


def backward_captured_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_graphs, "backward_order", list)


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


@pytest.mark.sampled(2)
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
    eager = trained(name, None, 1, **sections)
    mutant(monkeypatch)
    assert differences(eager, trained(name, ["attn"], 1, **sections))


@pytest.mark.parametrize("one_pool", [False, True])
def test_one_pool_for_all_slots_is_wrong_where_they_interleave(monkeypatch, one_pool):
    """Rank 0's order of 1F1B over two stages; there is one stage here, so the order of microbatches is all of it."""
    order = [Action(kind, m, 0) for kind, m in zip("FFBFBFBB", (0, 1, 0, 2, 1, 3, 2, 3), strict=True)]
    eager = trained("gpt2", None, 1)
    engine, entry = engine_of("gpt2", ["attn"])
    with engine:
        program, device = engine.program, engine.groups.device
        maker, buffers = Emulation(program.random, device), engine.optimizer.buffers
        if one_pool:
            shared = maker.pool()
            monkeypatch.setattr(maker, "pool", lambda: shared)
        engine.graphs = GraphsBySlot(program, tuple(order), buffers, maker, device)
        engine._now.graphs = engine.graphs
        engine.executor.order, engine.executor.before_forward = tuple(order), engine.graphs.before_forward
        engine.capture_graphs()
        assert bool(differences(eager, train(engine, entry, 1))) == one_pool


CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
NO_PACKAGE = pytest.mark.skipif(find_spec("transformer_engine") is not None, reason="transformer_engine is installed")


@pytest.mark.parametrize("impl", ["none", "emulate"])
def test_emulation_runs_on_any_device(impl):
    assert check_backend(impl, CPU) is check_backend(impl, CUDA) is None


def test_local_graphs_without_cuda_are_refused_and_emulation_is_named():
    assert check_backend("local", CUDA) is None
    with pytest.raises(PlanError, match="impl = local captures on CUDA devices, and this process runs on cpu") as error:
        check_backend("local", CPU)
    assert error.value.where == "cuda_graphs.impl"
    assert "impl: emulate" in error.value.fix


@NO_PACKAGE
@pytest.mark.parametrize("device", [CPU, CUDA])
def test_a_missing_package_is_named_with_its_extra(device):
    with pytest.raises(PlanError, match="transformer_engine is not installed") as error:
        check_backend("transformer_engine", device)
    assert f"pip install '{EXTRA}'" in error.value.fix


def test_the_extra_is_one_of_the_project_and_holds_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name, _, extra = EXTRA.rstrip("]").partition("[")
    assert name == project["name"]
    assert any(entry.startswith("transformer-engine") for entry in project["optional-dependencies"][extra])


@NO_GPU
def test_on_this_machine_the_error_names_the_line_of_the_spec(tmp_path):
    path = tmp_path / "spec.yaml"
    path.write_text("mesh: {}\nbatch: {global: 2, micro: 1}\ncuda_graphs: {impl: local}\n")
    with pytest.raises(SpecError, match=r"local captures on CUDA devices") as error:
        check_machine(Spec.load(path))
    assert "spec.yaml:3" in str(error.value)


@pytest.mark.sampled(1)
@NO_GPU
@pytest.mark.parametrize("impl", ["local", "transformer_engine"])
@pytest.mark.parametrize("command", [["verify"], ["train", "--data", "stdlib"]])
def test_commands_that_run_end_before_any_rank_starts_and_plan_plans(impl, command, tmp_path: Path):
    path = tmp_path / "spec.yaml"
    path.write_text((ROOT / "examples" / "gpt.yaml").read_text() + f"\ncuda_graphs: {{impl: {impl}}}\n")
    model = f"{ROOT / 'examples' / 'gpt.py'}:build"
    result = CliRunner().invoke(app, [command[0], model, str(path), *command[1:]])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Traceback" not in result.stderr
    assert "spec.yaml:" in result.stderr
    assert "impl: emulate" in result.stderr
    planned = CliRunner().invoke(app, ["plan", model, str(path)])
    assert (planned.exit_code, "Graph regions" in planned.stdout) == (0, True)


FREED, ENDED = "graph freed", "groups end"


def events_of_an_end(plan: Any, batches: Any, end: str) -> tuple[int, list[str]]:
    """How many graphs a rank had, and what happened in which order when its engine ended in the way ``end``."""
    events: list[str] = []

    def noting(event: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            events.append(event)
            return real(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecordedGraph, "reset", noting(FREED, RecordedGraph.reset))
        patch.setattr(Groups, "destroy", noting(ENDED, Groups.destroy))
        patch.setattr(groups_file, "abort_groups", noting(ENDED, lambda *_, **__: None))
        engine = Engine(plan, timeout_seconds=HANG_SECONDS)
        engine.capture_graphs()
        engine.train_step(batches[0])
        assert engine.graphs is not None
        num_graphs = engine.graphs.num_graphs
        if end == "close":
            engine.close()
        elif end == "error":
            with suppress(ArithmeticError), engine:
                raise ArithmeticError("the user's own code went wrong")
        else:
            engine.groups._end_with_the_process(ArithmeticError() if end == "exit by an error" else None)
    return num_graphs, events


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("end", ["close", "error", "exit", "exit by an error"])
@pytest.mark.parametrize("scope", [["attn"], ["full_iteration"]])
def test_all_graphs_are_freed_before_the_first_group_ends(lab: Lab, scope, end):
    graphs = {"cuda_graphs": {"impl": "emulate", "scope": scope}}
    for num_graphs, events in lab.run(Case("llama", {"tp": 2}, graphs, job=events_of_an_end, job_arguments=(end,))):
        assert num_graphs > 0
        assert events[:num_graphs] == [FREED] * num_graphs
        assert FREED not in events[num_graphs:]
        assert (ENDED in events) == (end != "exit")
