"""Mistakes that a GPU would not report show as numbers, each as a mutant of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from planner.pipeline.schedule import Action
from runtime.cuda_graphs import region_graphs
from runtime.cuda_graphs.recorded import Emulation
from runtime.cuda_graphs.region_graphs import GraphsBySlot, Region, RegionGraphs
from runtime.optimizer.buffers import GradientBuffers
from tests.tools.graphed_runs import differences, engine_of, train


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
    with (made := engine_of(name, None, **sections))[0] as engine:
        eager = train(engine, made[1], 1)
    mutant(monkeypatch)
    with (made := engine_of(name, ["attn"], **sections))[0] as engine:
        assert differences(eager, train(engine, made[1], 1))


@pytest.mark.parametrize("one_pool", [False, True])
def test_one_pool_for_all_slots_is_wrong_where_they_interleave(monkeypatch, one_pool):
    """Rank 0's order of 1F1B over two stages; there is one stage here, so the order of microbatches is all of it."""
    order = [Action(kind, m, 0) for kind, m in zip("FFBFBFBB", (0, 1, 0, 2, 1, 3, 2, 3), strict=True)]
    with (made := engine_of("gpt2", None))[0] as engine:
        eager = train(engine, made[1], 1)
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
