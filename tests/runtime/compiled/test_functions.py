"""Compiled functions: equal pieces share one, what fails runs op by op and is told, evaluations run op by op."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from passes.base import RankProgram
from planner import plan
from planner.lower import lower
from runtime.compiled import functions
from runtime.compiled.functions import CompiledPieces, calls_of
from runtime.weights.shards import fill
from runtime.weights.sources import ModelWeights
from tests.planner.compiled.test_pieces import SPEC, WIDTH, Net


def program_of(num_blocks: int = 4) -> RankProgram:
    torch.manual_seed(0)
    model = Net(F.gelu, num_blocks)
    decided = plan(model, SPEC)
    program = lower(decided, 0)
    fill(program.stages, ModelWeights(model), decided.mesh, decided.mesh.place(0), torch.device("cpu"))
    return program


def stepped(program: RankProgram) -> tuple[Tensor, list[Any]]:
    (stage,) = program.stages
    torch.manual_seed(1)
    x, y = torch.randn(2, 4, WIDTH), torch.randn(2, 4, WIDTH)
    given = {"x": x, "y": y}
    *_, loss = stage.module(*(given[name] for name in stage.inputs), *(torch.tensor(1.0),) * len(stage.denominators))
    loss.backward()
    found = [p.grad for p in stage.module.parameters()]
    stage.module.zero_grad()
    return loss.detach(), found


@pytest.mark.thorough
def test_equal_pieces_share_a_function_and_give_what_ops_give():
    program = program_of()
    loss, gradients = stepped(program)
    pieces = CompiledPieces(program)
    for _ in range(2):
        again, found = stepped(program)
        torch.testing.assert_close(again, loss, rtol=1e-5, atol=0)
        torch.testing.assert_close(found, gradients, rtol=1e-5, atol=1e-7)
    assert pieces.report.num_pieces == 4
    assert pieces.report.num_functions == 3
    assert pieces.report.made + pieces.report.from_cache == 6
    assert dict(pieces.counts) == {(index, "compiled"): 2 for index in range(4)}


def test_what_does_not_compile_runs_op_by_op_and_is_told_with_its_line(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: Any, **__: Any) -> Any:
        raise NotImplementedError("no such kernel\nand more")

    program = program_of()
    loss, gradients = stepped(program)
    monkeypatch.setattr(functions, "compile_graph", refuse)
    pieces = CompiledPieces(program)
    again, found = stepped(program)
    assert torch.equal(again, loss)
    torch.testing.assert_close(found, gradients, rtol=0, atol=0)
    assert {kind for _, kind in pieces.counts} == {"eager"}
    assert "NotImplementedError: no such kernel" in str(pieces.report)
    assert "and more" not in str(pieces.report)
    assert all("test_pieces.py" in where for where, _ in pieces.report.eager)


def test_pieces_of_unbound_programs_run_op_by_op():
    program = program_of()
    assert calls_of(program)
    assert all(call.run is None for call in calls_of(program))
    assert stepped(program)[0].isfinite()
