"""What a rerun of a block keeps and frees: results nobody reads, views of messages, hooks."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from passes.ops import recompute
from passes.ops.random_state import RandomState
from passes.ops.recompute import BlockCall
from planner import Plan
from planner.trace.lowered import Lowered
from tests.models import families
from tests.tools.captures import plan_again
from tests.tools.recomputed import KINDS, differing, filled, planned, programs_of
from tests.tools.saved_memory import Made
from tests.tools.simulated_mesh import given_to, run_mesh, spec_of


class Ranked(nn.Module):
    """Reads the values of a top-k, never its indices, which autograd keeps for the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        best = self.up(x).unflatten(-1, (4, 8)).topk(2, dim=-1)[0].sum(-1, keepdim=True)
        return x + self.down(torch.sigmoid(best.expand(-1, -1, -1, 8).flatten(2)))


class RankedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList(Ranked() for _ in range(3)).double()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return (x**2).mean()


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_a_kept_result_that_nobody_reads_is_let_go_as_the_insides_of_its_op(kind: str):
    batch, kept = {"x": torch.randn(2, 6, 8, dtype=torch.float64)}, dict[str, int]()
    ran = {k: run_mesh(RankedNet, batch, {}, recompute=k) for k in ("none", kind)}
    assert ran[kind].loss == ran["none"].loss
    assert differing(ran[kind].gradients, ran["none"].gradients) == []
    for k, found in ran.items():
        (stage,) = found.programs[0].stages
        with Made() as memory:
            loss = stage.module(batch["x"])[-1]
        kept[k] = memory.alive_bytes([*stage.module.parameters(), *stage.module.buffers(), loss, batch["x"]])
    assert sum(row.bytes for row in ran[kind].plan.recompute) > 0
    assert kept[kind] == kept["none"] - sum(row.bytes for row in ran[kind].plan.recompute) + sources(ran[kind].plan)


class Streams(nn.Module):
    """Reads several residual streams as one, through a view of what the stage before sent."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(3 * 8, 3 * 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(F.rms_norm(x.flatten(-2), (24,))).unflatten(-1, (3, 8))


class StreamsNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.blocks = nn.ModuleList(Streams() for _ in range(4)).double()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return (x**2).mean()


def of_two_stages(kind: str) -> tuple[Plan, dict[str, Tensor]]:
    """The plan, and every gradient; the second stage begins with a leaf, as a rank does with a message."""
    model, batch = StreamsNet(), {"x": torch.linspace(-1, 1, 288, dtype=torch.float64).view(2, 6, 3, 8)}
    made = plan_again(model, spec_of(batch, {"pp": 2}, recompute=kind))
    first, last = (program.stages[0] for program in filled(made, model))
    (sent,) = first.module(batch["x"])
    received = sent.detach().contiguous().requires_grad_()
    last.module(received, *(torch.ones((), dtype=torch.float64) for _ in last.denominators))[-1].backward()
    sent.backward(received.grad)
    found = {name: p.grad for stage in (first, last) for name, p in stage.module.named_parameters()}
    return made, {name: grad for name, grad in found.items() if grad is not None}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_an_op_that_reads_a_view_of_a_message_saves_the_same_again(kind: str):
    (_, expected), (made, found) = of_two_stages("none"), of_two_stages(kind)
    assert {row.stage for row in made.recompute} == {0, 1}
    assert len(expected) == 8
    assert differing(found, expected) == []


def sources(made: Plan) -> int:
    """Bytes that are held for reruns alone."""
    trace = Lowered(*made.to_run()).trace(0)
    return sum(trace.bytes_of[m] for m in {m for p in made.recomputed for m in p.sources} - set(trace.kept))


@pytest.mark.thorough
def test_nothing_is_left_after_the_backward_and_each_block_runs_again_once(monkeypatch: pytest.MonkeyPatch):
    runs: list[str] = []
    again = recompute._Forward.run_again
    monkeypatch.setattr(recompute._Forward, "run_again", lambda self: (runs.append(self.call.name), again(self))[1])
    (program,) = programs_of(planned("gpt2-dropout", "full"), "gpt2-dropout")
    module = program.stages[0].module
    batch = families.build("gpt2-dropout").batch(2, 0)
    totals = program.totals([batch])
    with Made() as memory:
        given = given_to(program.stages[0], batch, totals)
        module(*given)[-1].backward()
    gc.collect()
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    assert memory.alive_bytes([*module.parameters(), *gradients, *given]) == 0
    assert runs == [f"recompute_{i}" for i in (3, 2, 1, 0)]


def test_without_gradients_nothing_is_watched(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recompute, "saved_tensors_hooks", None)
    (program,) = programs_of(planned("gpt2-dropout", "full"), "gpt2-dropout")
    batch = families.build("gpt2-dropout").batch(2, 0)
    stage = program.stages[0]
    with torch.no_grad():
        stage.module(*given_to(stage, batch, program.totals([batch])))


def test_a_forward_that_fails_leaves_no_hooks():
    call = BlockCall("c", torch.fx.symbolic_trace(nn.Identity()), RandomState(0, 0), ())
    recompute.begin_block(call)
    recompute.abandon()
    x = torch.ones(3, requires_grad=True)
    y = x.exp()
    assert y.grad_fn._saved_result is not None  # pyright: ignore
    recompute.end_block(call, [], [])  # no forward of it runs
