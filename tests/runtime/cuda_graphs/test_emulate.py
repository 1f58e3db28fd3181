"""Regions in static memory give what they give eagerly, to the last bit; what a graph would punish shows as numbers.
The same of ``impl: local``: its calls of torch.cuda on recorded graphs here, CUDA's own on a GPU.
"""

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planner import PlanError
from runtime import Engine
from runtime.cuda_graphs.full_iteration import FullIteration
from runtime.cuda_graphs.graphs import CudaGraphs
from runtime.cuda_graphs.region_graphs import GraphsBySlot
from tests.models import families
from tests.tools.captures import plan_again
from tests.tools.graphed_runs import SCOPES, differences, engine_of, figures, planned, spec_of, train, trained
from tests.tools.limits import HANG_SECONDS
from tests.tools.recorded_graphs import cuda_graphs_of_a_cpu

NAMES = ["gpt2-dropout", "llama", "bert", "t5", "falcon-new", "twice", "frozen", "relative-bias"]
OUTSIDE = ["einsum", "t5-gated"]  # regions that leave something outside


@pytest.mark.thorough
@pytest.mark.parametrize("name", NAMES + OUTSIDE)
def test_regions_give_what_they_give_eagerly(name):
    eager = trained(name, None)
    for scope in SCOPES:
        assert differences(eager, trained(name, scope)) == [], scope


@pytest.mark.thorough
@pytest.mark.parametrize("microbatches", [16, 256])
def test_the_number_of_graphs_does_not_follow_the_number_of_microbatches(microbatches):
    """The plan says so of any number; that a run counts what the plan says is seen of 16."""
    entry = families.build("gpt2")
    found = []
    for scope in (["attn"], ["full_iteration"]):
        decided = plan_again(entry.model, spec_of(entry, scope, batch={"global": microbatches, "micro": 1}))
        (row,) = decided.graph_slots
        found.append((row.num_graphs, row.num_replays))
        if microbatches == 16:
            with Engine(decided) as engine:
                engine.capture_graphs()
                engine.train_step(entry.batch(microbatches, 0))
                assert figures(engine) == planned(engine, steps=1)
    assert found == [(2 * 4, 2 * 4 * microbatches), (1, 1)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("scope", [["attn"], ["full_iteration"]])
def test_the_first_steps_and_evaluations_run_eagerly(scope):
    entry = families.build("gpt2")
    spec = spec_of(entry, scope)
    spec["cuda_graphs"]["warmup_steps"] = 2
    with Engine(plan_again(entry.model, spec)) as engine:
        replays = []
        for step in range(3):
            engine.train_step(entry.batch(8, step))
            engine.evaluate(entry.batch(8, step))
            assert engine.graphs is not None
            replays.append(engine.graphs.num_replays)
    assert replays == [0, 0, 1 if "full_iteration" in scope else 2 * 4 * 4]


@pytest.mark.thorough
@pytest.mark.parametrize("scope", [["attn"], ["full_iteration"]])
def test_evaluations_see_the_weights_of_graphed_steps_and_change_nothing(scope):
    losses = []
    for asked in (None, scope):
        engine, entry = engine_of("gpt2-dropout", asked)
        with engine:
            for step in range(3):
                losses += [engine.train_step(entry.batch(8, step)).loss, engine.evaluate(entry.batch(8, 9))]
    assert losses[:6] == losses[6:]


@pytest.mark.sampled(1)
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


@pytest.mark.thorough
@pytest.mark.parametrize("scope", [["attn"], ["full_iteration"]])
def test_graphs_are_captured_anew_on_demand(scope):
    eager = trained("gpt2-dropout", None)
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


# ---- ``impl: local`` gives what eager steps give: its calls of torch.cuda on recorded graphs here, CUDA's own on a GPU


GRAPH = torch.cuda.graph


@pytest.mark.sampled(1)
@pytest.mark.parametrize("scope", SCOPES)
def test_its_calls_of_torch_cuda_give_what_eager_steps_give(scope):
    eager = trained("gpt2-dropout", None)
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


WIDTH = 16


class Block(nn.Module):
    """Norms of PyTorch's own that are several steps, one key head, residuals around both parts."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.q, self.kv, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH // 2), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norms[0](x)
        q = self.q(h).unflatten(-1, (4, -1)).transpose(1, 2)
        k, v = self.kv(h).unsqueeze(1).chunk(2, -1)
        weights = F.dropout((q @ k.transpose(-1, -2)).softmax(-1), 0.1, self.training)
        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.up(self.norms[1](x))))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(37, WIDTH), nn.Linear(WIDTH, 37)
        self.layers = nn.Sequential(*(Block() for _ in range(3)))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.layers(self.table(input_ids))).flatten(0, 1), labels.flatten())


def entry_of_blocks() -> families.Entry:
    torch.manual_seed(0)
    model = Blocks().double().train()
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    ids = ((12,), torch.int64, 37)
    return families.Entry(model, {"input_ids": ids, "labels": ids})


@pytest.mark.thorough
def test_norms_that_autograd_sees_as_several_steps_add_their_gradients_in_the_same_order():
    runs = []
    for scope in (None, *SCOPES):
        entry = entry_of_blocks()
        with Engine(plan_again(entry.model, spec_of(entry, scope)), timeout_seconds=HANG_SECONDS) as engine:
            if engine.graphs is not None:
                engine.capture_graphs()
                assert all(row.captured for row in engine.plan.graph_regions)
            runs.append(train(engine, entry, 2))
    assert [differences(runs[0], run) for run in runs[1:]] == [[]] * len(SCOPES)
