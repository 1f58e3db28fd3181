"""``impl: local`` gives what eager steps give: its calls of torch.cuda on recorded graphs here, CUDA's own on a GPU."""

from __future__ import annotations

import inspect

import pytest
import torch

from runtime.cuda_graphs.full_iteration import FullIteration
from runtime.cuda_graphs.graphs import CudaGraphs
from runtime.cuda_graphs.region_graphs import GraphsBySlot
from tests.tools.graphed_runs import SCOPES, differences, engine_of, train
from tests.tools.recorded_graphs import cuda_graphs_of_a_cpu

GRAPH = torch.cuda.graph


@pytest.mark.sampled(1)
@pytest.mark.parametrize("scope", SCOPES)
def test_its_calls_of_torch_cuda_give_what_eager_steps_give(scope):
    with (made := engine_of("gpt2-dropout", None))[0] as engine:
        eager = train(engine, made[1])
    engine, entry = engine_of("gpt2-dropout", scope)
    program, buffers, device = engine.program, engine.optimizer.buffers, engine.groups.device
    with engine, cuda_graphs_of_a_cpu(program.random):
        maker = CudaGraphs(device)
        if "full_iteration" in scope:
            engine.graphs = FullIteration(program, buffers, maker, device)
        else:
            engine.graphs = GraphsBySlot(program, engine.executor.order, buffers, maker, device)
            engine.executor.before_forward = engine.graphs.before_forward
        engine._now.graphs = engine.graphs
        engine.capture_graphs()
        assert differences(eager, train(engine, entry)) == []
        assert engine.graphs.num_replays > 0


def test_torch_cuda_knows_what_it_is_given():
    assert {"cuda_graph", "pool", "stream", "capture_error_mode"} <= inspect.signature(GRAPH.__init__).parameters.keys()


@pytest.mark.gpu
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("name", ["gpt2-dropout", "llama", "t5"])
def test_on_a_gpu_it_gives_what_eager_steps_give(name, scope):
    runs = []
    for captures in (False, True):
        graphs = {"cuda_graphs": {"impl": "local", "scope": scope, "warmup_steps": 9}}
        with (made := engine_of(name, None, captures=captures, **graphs))[0] as engine:
            runs.append(train(engine, made[1]))
    for (loss, gradients, _), (truth, wanted, _) in zip(runs[1][0], runs[0][0], strict=True):
        assert loss == pytest.approx(truth, rel=1e-12)
        torch.testing.assert_close(gradients, wanted, rtol=1e-9, atol=1e-12)
