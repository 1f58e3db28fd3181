"""Compiled functions: equal pieces share one, what fails runs op by op and is told, evaluations run op by op."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._inductor.codecache import FxGraphCachePickler
from torch._subclasses.fake_tensor import FakeTensorMode

from passes.base import RankProgram
from planner import PlanError, plan
from planner.lower import lower
from planner.spec.spec import Spec
from runtime import Engine
from runtime.compiled import functions
from runtime.compiled import requirements as compiler
from runtime.compiled.functions import CompiledPieces, calls_of, signature_of
from runtime.distributed.devices import Launched, choose_device
from runtime.distributed.groups import Groups
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


CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_a_machine_without_a_cpp_compiler_is_told_which_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(PlanError, match=r"no C\+\+ compiler.*\n.*compile\n.*install the package g\+\+"):
        compiler.check_compiler(True, CPU)
    compiler.check_compiler(False, CPU)


def test_a_cuda_device_needs_triton(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiler, "find_spec", lambda name: None)
    with pytest.raises(PlanError, match="pip install triton"):
        compiler.check_compiler(True, CUDA)


def test_an_engine_ends_before_it_runs(monkeypatch: pytest.MonkeyPatch):
    decided = plan(Net(torch.nn.functional.gelu), SPEC)
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(PlanError, match="install the package g"):
        Engine(decided)


def test_a_command_names_the_line_of_the_spec(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(PlanError) as raised:
        compiler.check_machine(Spec.load(SPEC))
    assert str(raised.value.where) == "compile"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("device", "cluster", "has_triton", "line"),
    [
        (CPU, "h200", True, ""),
        (CUDA, "h200", True, "on"),
        (CUDA, "h200", False, "compile: auto is off: rank 0 has no triton; compile: false silences this"),
        (CUDA, None, True, "compile: auto is off: the spec names no cluster of GPUs; compile: false silences this"),
    ],
    ids=str,
)
def test_auto_is_never_an_error_and_says_on_gpus_why_it_is_off(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    device: torch.device,
    cluster: str | None,
    has_triton: bool,
    line: str,
):
    monkeypatch.setattr(compiler, "find_spec", lambda name: name if has_triton else None)
    monkeypatch.setenv("PATH", "/nonexistent")
    decided = plan(Net(torch.nn.functional.gelu), {**SPEC, "compile": "auto", "cluster": cluster})
    groups = Groups(decided.mesh, 0, device, timedelta(minutes=5))
    assert compiler.compiles(decided, "auto", groups) == (line == "on")
    assert capsys.readouterr().err.strip() == ("" if line == "on" else line)


def test_a_plan_for_gpus_runs_op_by_op_on_a_cpu():
    spec = {**SPEC, "compile": "auto"}
    batch = {"x": torch.ones(2, 4, 16), "y": torch.zeros(2, 4, 16)}
    losses = []
    for cluster in ("h200", None):
        torch.manual_seed(0)
        with Engine(plan(Net(torch.nn.functional.gelu), {**spec, "cluster": cluster})) as engine:
            assert engine.compiled is None
            losses.append([engine.train_step(batch).loss for _ in range(2)])
    assert losses[0] == losses[1]


class _Piece(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * 2


def keys(num_visible: int, *, virtual: bool = False) -> tuple[int, int]:
    """How many keys 8 ranks of a host have for one graph: of Inductor's cache, and of our lock beside it."""
    graph, mode = fx.symbolic_trace(_Piece()), FakeTensorMode()
    of_cache, of_lock = set(), set()
    for rank in range(8):
        device = choose_device(
            None, Launched(rank, 8, 0 if virtual else rank, 8), cuda_available=True, device_count=num_visible
        )
        with mode:
            x = torch.empty(4, device=device)
        of_cache.add(FxGraphCachePickler(graph).get_hash([x]))
        of_lock.add(repr(signature_of([x])))
    return len(of_cache), len(of_lock)


def test_ranks_that_see_all_gpus_have_a_key_each_and_do_not_wait_for_each_other():
    """The number stands in the code that Inductor makes, so no key of ours could let them share it."""
    assert keys(num_visible=8) == (8, 8)


def test_ranks_that_see_one_gpu_each_share_one_key():
    assert keys(num_visible=1) == (1, 1)


def test_ranks_of_a_virtual_local_rank_share_one_key():
    """torchrun --virtual-local-rank: LOCAL_RANK is 0 on all, and each sees its GPU as the first."""
    assert keys(num_visible=1, virtual=True) == (1, 1)
