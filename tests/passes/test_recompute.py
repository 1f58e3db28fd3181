"""What blocks let go comes back to the last bit: gradients are those of the run without, whatever the layout."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from passes.base import RankProgram
from passes.ops.random_state import RandomState
from passes.ops.recompute import BlockCall
from planner import Plan
from planner.trace.lowered import Lowered
from runtime.verify import mutants
from tests.models import families
from tests.tools.recomputed import KINDS, differing, model_of, planned, programs_of
from tests.tools.saved_memory import Made
from tests.tools.simulated_mesh import Ran, counted, exchanges_of, given_to, run_mesh, shares_of

SEQUENCE_PARALLEL = {"sequence_parallel": True, "vocabulary_multiple": 8}
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "one rank": ({}, {}),
    "tp2": ({"tp": 2}, {}),
    "tp2, sequence parallel": ({"tp": 2}, {"tensor_parallel": SEQUENCE_PARALLEL}),
    "tp2 dp2": ({"tp": 2, "dp": 2}, {}),
    "cp2 tp2, sequence parallel": ({"cp": 2, "tp": 2}, {"tensor_parallel": SEQUENCE_PARALLEL}),
    "dp2 ep2": ({"dp": 2, "ep": 2}, {}),
    "tp2 dp2 ep2 etp2": ({"tp": 2, "dp": 2, "ep": 2, "etp": 2}, {}),
}


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
