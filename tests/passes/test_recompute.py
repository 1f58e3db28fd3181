"""What blocks let go comes back to the last bit: gradients are those of the run without, whatever the layout."""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from passes.base import RankProgram
from passes.ops import recompute
from passes.ops.random_state import RandomState
from passes.ops.recompute import BlockCall
from planner import Plan
from planner.lower import lower
from planner.trace.lowered import Lowered
from runtime.verify import mutants
from runtime.weights.shards import fill
from runtime.weights.sources import ModelWeights
from tests.models import families
from tests.tools.captures import plan_again
from tests.tools.saved_memory import Made
from tests.tools.simulated_mesh import Ran, counted, exchanges_of, given_to, run_mesh, shares_of, spec_of

SEQUENCE_PARALLEL = {"sequence_parallel": True, "vocabulary_multiple": 8}
KINDS = ("full", "selective")
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "one rank": ({}, {}),
    "tp2": ({"tp": 2}, {}),
    "tp2, sequence parallel": ({"tp": 2}, {"tensor_parallel": SEQUENCE_PARALLEL}),
    "tp2 dp2": ({"tp": 2, "dp": 2}, {}),
    "cp2 tp2, sequence parallel": ({"cp": 2, "tp": 2}, {"tensor_parallel": SEQUENCE_PARALLEL}),
    "dp2 ep2": ({"dp": 2, "ep": 2}, {}),
    "tp2 dp2 ep2 etp2": ({"tp": 2, "dp": 2, "ep": 2, "etp": 2}, {}),
}


def model_of(name: str) -> nn.Module:
    return families.build(name).model.train()


@pytest.fixture(autouse=True)
def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention with dropout borrows the process's own generator, which ranks that are threads share."""
    lock, as_default = threading.Lock(), RandomState.as_default

    @contextmanager
    def alone(self: RandomState, *args: Any) -> Iterator[None]:
        with lock, as_default(self, *args):
            yield

    monkeypatch.setattr(RandomState, "as_default", alone)


@cache
def ran(name: str, layout: str, kind: str) -> Ran:
    mesh, more = LAYOUTS[layout]
    batch = families.build(name).batch(2 * mesh.get("dp", 1), 0)
    return run_mesh(lambda: model_of(name), batch, mesh, recompute=kind, **more)


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]


CASES = [
    ("gpt2-dropout", "tp2, sequence parallel", "full"),
    ("gpt2-dropout", "tp2, sequence parallel", "selective"),
    ("gpt2-dropout", "tp2 dp2", "selective"),
    ("llama-tied", "tp2", "full"),
    ("bert", "cp2 tp2, sequence parallel", "full"),
    ("t5", "tp2", "full"),
    ("mixtral", "dp2 ep2", "full"),
    ("mixtral", "dp2 ep2", "selective"),
    ("mixtral", "tp2 dp2 ep2 etp2", "full"),
    ("slots", "dp2 ep2", "full"),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "layout", "kind"), CASES, ids=lambda value: value)
def test_gradients_are_the_same_bits_and_exchanges_those_of_the_plan(name: str, layout: str, kind: str):
    without, found = ran(name, layout, "none"), ran(name, layout, kind)
    assert found.plan.recompute
    assert found.loss == without.loss
    assert differing(found.gradients, without.gradients) == []
    listed = exchanges_of(found.plan)
    for program, before in zip(found.programs, without.programs, strict=True):
        assert program.load is not None
        assert before.load is not None
        assert torch.equal(program.load.figures, before.load.figures)  # pyright: ignore
    axes = ("tp", "ep", "etp")
    assert {key: n for key, n in listed.items() if n and key[0] in axes} == {
        key: n for key, n in counted(found.programs[0]).items() if key[0] in axes
    }


# ---- one process: stages one after another


@cache
def planned(name: str, kind: str, **mesh: int) -> Plan:
    batch = families.build(name).batch(8, 0)
    schedule = {"pipeline": {"schedule": "interleaved_1f1b"}} if mesh.get("vpp", 1) > 1 else {}
    sections = {"batch": {"global": 8, "micro": 2}, "recompute": kind, **schedule}
    return plan_again(model_of(name), spec_of(batch, mesh) | sections)


def programs_of(made: Plan, name: str) -> list[RankProgram]:
    return filled(made, model_of(name))


def filled(made: Plan, model: nn.Module) -> list[RankProgram]:
    """The programs of a pipeline's ranks, with the weights of ``model``."""
    programs = [lower(made, made.mesh.rank_of(pp=pp)) for pp in range(made.mesh.pp)]
    for rank, program in enumerate(programs):
        fill(program.stages, ModelWeights(model), made.mesh, made.mesh.place(rank), torch.device("cpu"))
    return programs


def gradients_of(made: Plan, name: str, programs: list[RankProgram] | None = None) -> dict[str, Tensor]:
    """Of all microbatches: every forward through all stages, then every backward."""
    programs = programs or programs_of(made, name)
    stages = sorted(((s, p) for p in programs for s in p.stages), key=lambda pair: pair[0].index)
    batch = families.build(name).batch(8, 0)
    shares = shares_of(batch, 4)
    totals = programs[0].totals(shares)
    losses = []
    for microbatch in range(4):
        values: Any = ()
        for stage, program in stages:
            program.random.begin(3, microbatch)
            values = stage.module(*values, *given_to(stage, shares[microbatch], totals))
        losses.append(values[-1])
    for _, program in stages:
        program.random.begin(9, 9)  # whatever runs meanwhile
    for loss in losses:
        loss.backward()
    leaves = {(s.index, p.fqn): s.parameter(p.fqn).grad for s, _ in stages for p in s.parameters}
    return {f"{index} {fqn}": grad for (index, fqn), grad in leaves.items() if grad is not None}


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "kind"), [("gpt2-dropout", "full"), ("gpt2-dropout", "selective"), ("t5", "full")])
def test_chunks_with_several_microbatches_in_flight_get_the_same_bits(name: str, kind: str):
    mesh = {"pp": 2, "vpp": 2}
    without = gradients_of(planned(name, "none", **mesh), name)
    assert differing(gradients_of(planned(name, kind, **mesh), name), without) == []


def test_full_runs_no_exchange_again_that_nothing_needs_and_selective_none():
    again = {kind: [c for c in planned("gpt2-dropout", kind, tp=2).collectives if c.again] for kind in KINDS}
    num_blocks = len(families.build("gpt2-dropout").model.transformer.h)  # pyright: ignore
    assert [c.kind for c in again["full"]] == ["all_reduce"] * num_blocks  # of attention; that of the MLP is the output
    assert again["selective"] == []


def calls_of(programs: list[RankProgram]) -> list[BlockCall]:
    modules = [s.module for p in programs for s in p.stages]
    found = [getattr(m, str(n.target)) for m in modules for n in m.graph.nodes if n.op == "get_attr"]
    return [value for value in found if isinstance(value, BlockCall)]


@contextmanager
def not_restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    @contextmanager
    def again(self: RandomState, step: int, microbatch: int) -> Iterator[None]:
        yield

    with monkeypatch.context() as patch:
        patch.setattr(RandomState, "again", again)
        yield


def test_a_random_state_that_is_not_restored_shows(monkeypatch: pytest.MonkeyPatch):
    without = gradients_of(planned("gpt2-dropout", "none"), "gpt2-dropout")
    with not_restored(monkeypatch):
        assert differing(gradients_of(planned("gpt2-dropout", "full"), "gpt2-dropout"), without)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_every_op_of_a_rerun_counts(kind: str):
    """A rerun that gives a wrong norm, and so a backward that reads something else, shows."""
    made = planned("gpt2-dropout", kind)
    programs = programs_of(made, "gpt2-dropout")
    module = calls_of(programs)[0].module
    norm = next(n for n in module.graph.nodes if n.target is torch.ops.aten.layer_norm.default)
    norm.update_arg(4, 0.5)
    module.recompile()
    without = gradients_of(planned("gpt2-dropout", "none"), "gpt2-dropout")
    assert differing(gradients_of(made, "gpt2-dropout", programs), without)


@pytest.mark.thorough
def test_an_exchange_of_a_rerun_that_is_left_out_shows():
    def without_first(program: RankProgram) -> None:
        call = calls_of([program])[0]
        node = next(n for n in call.module.graph.nodes if n.target is mutants.collectives.g)
        node.target = mutants.STAND_INS[node.target]
        call.module.recompile()

    batch = families.build("gpt2-dropout").batch(2, 0)
    broken = run_mesh(lambda: model_of("gpt2-dropout"), batch, {"tp": 2}, recompute="full", change=without_first)
    whole = run_mesh(lambda: model_of("gpt2-dropout"), batch, {"tp": 2})
    assert broken.loss == whole.loss
    assert differing(broken.gradients, whole.gradients)
    assert mutants.num_collectives(broken.plan) == mutants.num_collectives(whole.plan) + 4


# ---- memory


def forward(made: Plan, name: str) -> tuple[Tensor, int, nn.Module]:
    """The loss of one microbatch, and the bytes that its forward leaves behind."""
    (program,) = programs_of(made, name)
    (stage,) = program.stages
    batch = families.build(name).batch(2, 0)
    given = given_to(stage, batch, program.totals([batch]))
    with Made() as memory:
        *_, loss = stage.module(*given)
    apart = [*stage.module.parameters(), *stage.module.buffers(), loss]
    return loss, memory.alive_bytes(apart), stage.module


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["gpt2-dropout", "llama"])
def test_what_is_let_go_is_what_the_plan_says_to_the_byte(name: str):
    _, without, _ = forward(planned(name, "none"), name)
    for kind in KINDS:
        made = planned(name, kind)
        decisions, shards = made.to_run()
        trace = Lowered(decisions, shards).trace(0)
        let_go = {m for piece in made.recomputed for m in piece.let_go}
        held = {m for piece in made.recomputed for m in piece.sources} - set(trace.kept)
        more = sum(trace.bytes_of[m] for m in held)
        _, found, _ = forward(made, name)
        assert sum(row.bytes for row in made.recompute) >= sum(trace.bytes_of[m] for m in let_go)
        assert found == without - sum(row.bytes for row in made.recompute) + more, kind


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
