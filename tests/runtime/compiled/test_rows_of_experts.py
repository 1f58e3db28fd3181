"""Pieces between the products of experts: one function for any number of rows, which the routing changes each step."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks

from examples.moe import MoE
from passes.base import RankProgram
from passes.ops.region import run_piece
from planner import Plan
from planner.lower import lower
from runtime.compiled.functions import ANY, AnyRows, CompiledPieces, calls_of, compile_graph, signature_of
from runtime.weights.shards import fill
from runtime.weights.sources import ModelWeights
from tests.models import families
from tests.tools.captures import plan_again
from tests.tools.simulated_mesh import run_mesh

LENGTH, VOCABULARY = 8, 32
INPUTS = {"input_ids": {"shape": [LENGTH], "dtype": "int64", "high": VOCABULARY}, "targets": {"like": "input_ids"}}
MIXTRAL_MESHES = [{"dp": 2, "ep": 2}, {"tp": 2, "dp": 2, "ep": 2, "etp": 2}]


def gated() -> fx.GraphModule:
    graph = fx.Graph()
    gate, up = graph.placeholder("gate"), graph.placeholder("up")
    silu = graph.call_function(torch.ops.aten.silu.default, (gate,))
    graph.output((graph.call_function(torch.ops.aten.mul.Tensor, (silu, up)),))
    return fx.GraphModule(nn.Module(), graph)


def halves(rows: int) -> list[Tensor]:
    """As a product of both gives them: strides of one half are those of the whole."""
    return list(torch.randn(rows, 24, dtype=torch.float64, requires_grad=True).chunk(2, -1))


@pytest.mark.thorough
def test_one_function_computes_any_number_of_rows_and_saves_its_inputs_alone() -> None:
    function = compile_graph(gated(), signature_of(halves(5), (True, True)), 5)
    for rows in (2, 3, 5, 12, 300):
        inputs, saved = halves(rows), list[Tensor]()
        with saved_tensors_hooks(lambda tensor, saved=saved: (saved.append(tensor), tensor)[1], lambda tensor: tensor):
            (found,) = function.run(*inputs)
        expected = F.silu(inputs[0]) * inputs[1]
        weights = torch.randn_like(found)
        torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)
        of_found, of_expected = (torch.autograd.grad((y * weights).sum(), inputs) for y in (found, expected))
        torch.testing.assert_close(of_found, of_expected, rtol=1e-14, atol=1e-14)
        assert function.takes(rows)
        assert [tuple(tensor.shape) for tensor in saved] == [(rows, 12)] * 2


def test_a_signature_leaves_open_the_rows_and_no_more() -> None:
    three, four = (signature_of(halves(rows), (True, True)) for rows in (3, 4))
    assert three == four
    assert three[0][1:3] == ((ANY, 12), (24, 1))
    assert signature_of(halves(3)) != signature_of(halves(4))
    columns = torch.randn(12, 3).t()
    with pytest.raises(ValueError, match="row-major"):
        compile_graph(gated(), signature_of([columns, columns], (True, True)), 3)


def test_what_the_compiler_assumed_of_the_number_is_checked() -> None:
    symbolic = AnyRows(halves(5), (True, True))
    gate, up = symbolic.arguments
    assert gate.shape[0] < 100
    assert gate.shape == up.shape
    symbolic.settle()
    assert [symbolic.fits(rows) for rows in (2, 99, 100)] == [True, True, False]


# ---- programs


def loops() -> nn.Module:
    torch.manual_seed(3)
    return MoE(VOCABULARY, LENGTH, width=16, num_layers=2, num_heads=2, hidden=24, num_experts=4, top_k=2).double()


def program_of(**more: Any) -> tuple[Plan, RankProgram]:
    spec = {"mesh": {}, "batch": {"global": 2, "micro": 2}, "inputs": INPUTS, "precision": {"parameters": "float64"}}
    model = loops()
    made = plan_again(model, {**spec, **more})
    program = lower(made, 0)
    fill(program.stages, ModelWeights(model), made.mesh, made.mesh.place(0), torch.device("cpu"))
    return made, program


def stepped(program: RankProgram, seed: int) -> list[Tensor]:
    """The gradients of a step."""
    (stage,) = program.stages
    ids = torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(seed))
    given = {"input_ids": ids, "targets": ids}
    program.load.begin(torch.device("cpu"))
    counts = torch.tensor(float(ids.numel()), dtype=torch.float64)
    *_, loss = stage.module(*(given[name] for name in stage.inputs), *(counts for _ in stage.denominators))
    loss.backward()
    found = [p.grad.clone() for p in stage.module.parameters() if p.grad is not None]
    stage.module.zero_grad()
    return found


@pytest.mark.thorough
def test_a_loop_over_experts_compiles_once_whatever_the_routing() -> None:
    (_, plain), (made, program) = program_of(), program_of(compile=True)
    of_experts = [call.index for call in calls_of(program) if any(call.counts_rows)]
    assert len(of_experts) == 2 * 4  # silu and mul, of each expert of each layer
    assert len({piece.function for piece in made.pieces if piece.index in of_experts}) == 1
    pieces, made_first = CompiledPieces(program), 0
    for step in range(4):
        torch.testing.assert_close(stepped(program, step), stepped(plain, step), rtol=1e-10, atol=1e-14)
        made_first = made_first or pieces.report.num_functions
    assert pieces.report.num_functions == made_first == len({piece.function for piece in made.pieces})
    assert pieces.report.eager == []


@pytest.mark.thorough
def test_no_row_and_one_run_op_by_op() -> None:
    _, program = program_of(compile=True)
    pieces = CompiledPieces(program)
    call = next(call for call in calls_of(program) if any(call.counts_rows))
    for rows in (0, 1):
        inputs = halves(rows)
        torch.testing.assert_close(run_piece(call, inputs), (F.silu(inputs[0]) * inputs[1],), rtol=1e-14, atol=0)
    assert dict(pieces.counts) == {(call.index, "eager"): 2}
    assert pieces.report.num_functions == 0


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", MIXTRAL_MESHES, ids=str)
def test_rows_of_other_ranks_give_what_ops_give(mesh: dict[str, int]) -> None:
    entry, bound, more = families.build("mixtral"), list[CompiledPieces](), {"precision": {"parameters": "float64"}}
    batch = entry.batch(4, 0)
    plain = run_mesh(lambda: entry.model, batch, mesh, **more)
    found = run_mesh(
        lambda: entry.model, batch, mesh, **more, compile=True, change=lambda p: bound.append(CompiledPieces(p))
    )
    torch.testing.assert_close(found.loss, plain.loss, rtol=1e-7, atol=0)  # the router computes in float32
    torch.testing.assert_close(found.gradients, plain.gradients, rtol=1e-5, atol=1e-7)
    for pieces, program in zip(bound, found.programs, strict=True):
        of_experts = {call.index for call in calls_of(program) if any(call.counts_rows)}
        assert of_experts
        assert {way for index, way in pieces.counts if index in of_experts} == {"compiled"}


@pytest.mark.thorough
def test_experts_of_a_loop_that_ranks_share_out_are_compiled_as_all_of_them_are() -> None:
    spec = {"mesh": {"dp": 2, "ep": 2}, "batch": {"global": 4, "micro": 2}, "inputs": INPUTS, "compile": True}
    rows = [row for row in plan_again(loops(), spec).compiled if row.ops == "silu, mul" and "shared" not in row.where]
    assert {row.reason for row in rows} == {""}


@pytest.mark.thorough
def test_experts_of_a_loop_on_other_ranks_give_what_ops_give() -> None:
    bound, mesh, batch = list[CompiledPieces](), {"dp": 2, "ep": 2}, batch_of_tokens(4)
    plain = run_mesh(loops, batch, mesh)
    found = run_mesh(loops, batch, mesh, compile=True, change=lambda p: bound.append(CompiledPieces(p)))
    torch.testing.assert_close(found.loss, plain.loss, rtol=1e-10, atol=0)
    torch.testing.assert_close(found.gradients, plain.gradients, rtol=1e-8, atol=1e-12)
    for pieces, program in zip(bound, found.programs, strict=True):
        of_experts = {call.index for call in calls_of(program) if any(call.counts_rows)}
        assert of_experts
        assert {way for index, way in pieces.counts if index in of_experts} == {"compiled"}


def batch_of_tokens(rows: int) -> dict[str, Tensor]:
    ids = torch.randint(VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(5))
    return {"input_ids": ids, "targets": ids}
