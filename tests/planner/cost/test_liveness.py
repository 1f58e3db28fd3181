"""What lives at once in a forward and in a backward, beside the storages that really live: of one process, so that no
message is under way."""

from typing import Any

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

from planner.cost.liveness import walked
from planner.lower import lower
from planner.pipeline.ledger import StageBytes
from planner.trace.lowered import Lowered
from planner.trace.observe import Allocations
from runtime.engine.build import parameters_of
from runtime.optimizer.buffers import GradientBuffers
from runtime.optimizer.slots import DataParallel
from runtime.weights.shards import fill
from runtime.weights.sources import ModelWeights
from tests.models import hugging_face
from tests.models.families import FAMILIES
from tests.tools.captures import plan_again
from tests.tools.saved_memory import held_by
from tests.tools.simulated_mesh import given_to, spec_of


def lived(made: Any, model: Any, batch: dict[str, torch.Tensor]) -> tuple[int, int, int]:
    """Bytes at the peak of the forward, after it, and at the peak of the backward."""
    program = lower(made, 0)
    fill(program.stages, ModelWeights(model), made.mesh, made.mesh.place(0), torch.device("cpu"))
    (stage,) = program.stages
    given = given_to(stage, batch, program.totals([batch]))
    buffers = GradientBuffers(parameters_of(program), made.shards.buffers_of_rank(0, 0), {"dp": DataParallel()})
    program.weight_gradients.bind(buffers)
    held = [t for buffer in buffers.buffers for t in (*buffer.kept_parameters, *buffer.kept_gradients)]
    with Allocations([*held_by(stage), *given, *held]) as allocations:
        *_, loss = stage.module(*given)
        root, seed = get_gradient_edge(loss), torch.ones_like(loss)
        del loss, _
        forward, kept, allocations.peak = allocations.peak, allocations.live, 0
        torch.autograd.backward([root], [seed])
    return forward, kept, allocations.peak


def told(made: Any) -> StageBytes:
    return walked(Lowered(made.decisions, made.shards).trace(0)).bytes


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.parametrize("family", ["gpt2", "bert", "t5", "bloom", "mixtral", "deepseek_v3"])
def test_predicted_peaks_are_those_of_the_storages_that_live(family: str) -> None:
    model, batch = hugging_face.build(family), hugging_face.batch(family)
    made = plan_again(model, spec_of(batch, {}))
    check(told(made), lived(made, model, batch))


@pytest.mark.thorough
def test_peaks_with_dropout() -> None:
    entry = FAMILIES["gpt2-dropout"]()
    batch = entry.batch(2, 0)
    made = plan_again(entry.model.train(), spec_of(batch, {}))
    check(told(made), lived(made, entry.model, batch))


def check(memory: StageBytes, measured: tuple[int, int, int]) -> None:
    forward, kept, backward = measured
    assert memory.kept == pytest.approx(kept, abs=64)
    assert memory.forward == pytest.approx(forward, rel=0.01)
    assert memory.backward == pytest.approx(backward, rel=0.01)
