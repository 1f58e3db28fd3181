"""Compiled pieces in recomputed blocks and captured regions, their roundings, and how long ranks wait for compilers."""

import gc
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from passes.ops import recompute
from planner import plan
from runtime import Engine
from runtime.compiled import functions
from runtime.compiled.functions import SECONDS_A_FUNCTION, CompiledPieces, first_calls
from runtime.cuda_graphs.recorded import Emulation
from runtime.distributed.groups import Groups
from tests.planner.compiled.test_auto import planned
from tests.tools.graphed_runs import Trained, engine_of, train

NAME, BLOCKS, MICROBATCHES = "gpt2-dropout", 4, 4
KINDS = ("selective", "full")
CAPTURED = "a graph was captured before its compilation"


def check_equal(found: Trained, expected: Trained) -> None:
    for (loss, gradients, norm), (its_loss, its_gradients, its_norm) in zip(found[0], expected[0], strict=True):
        assert (loss, norm) == pytest.approx((its_loss, its_norm), rel=1e-10)
        for name, gradient in its_gradients.items():
            assert (gradients[name] - gradient).norm() <= 1e-10 * gradient.norm() + 1e-12, name


def ways_of(engine: Engine) -> dict[str, set[int]]:
    assert engine.compiled is not None
    found: dict[str, set[int]] = {}
    for piece, way in engine.compiled.counts:
        found.setdefault(way, set()).add(piece)
    return found


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_recomputed_block_runs_its_pieces_again_as_the_functions_that_they_were(kind: str):
    """Dropout stands between them: its masks are those of the forward, or gradients would differ."""
    with (made := engine_of(NAME, None))[0] as engine:
        expected = train(engine, made[1])
    with (made := engine_of(NAME, None, compile=True, recompute=kind))[0] as engine:
        check_equal(train(engine, made[1]), expected)
        again = [piece.index for piece in engine.plan.pieces if piece.again]
        assert len(again) == BLOCKS * (1 if kind == "selective" else 2)  # GELU; where all runs again, norms too
        assert engine.compiled is not None
        assert all(engine.compiled.counts[index, "compiled"] == 2 * 3 * MICROBATCHES for index in again)
        assert engine.compiled.report.eager == []


def held() -> int:
    """Bytes that blocks hold between their forward and the first rerun: what autograd saved, and what reruns read."""
    gc.collect()
    tensors: list[Any] = []
    for found in gc.get_objects():
        if type(found) is recompute._Holder:
            tensors.append(found.tensor)
        elif type(found) is recompute._Forward:
            tensors += found._sources
    storages = [t.untyped_storage() for t in tensors if isinstance(t, Tensor)]
    return sum({s._cdata: s.nbytes() for s in storages}.values())


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_block_lets_go_of_as_much_as_one_that_runs_op_by_op(kind: str, monkeypatch: pytest.MonkeyPatch):
    kept: dict[bool, list[int]] = {}
    again = recompute._Forward.run_again
    for compiled in (False, True):
        with (made := engine_of(NAME, None, compile=compiled, recompute=kind))[0] as engine:
            engine.forward_backward(made[1].batch(8, 0))
            seen = kept[compiled] = []
            monkeypatch.setattr(
                recompute._Forward, "run_again", lambda self, seen=seen: (seen.append(held()), again(self))
            )
            engine.forward_backward(made[1].batch(8, 0))
            monkeypatch.setattr(recompute._Forward, "run_again", again)
    assert len(kept[True]) == len(kept[False]) == BLOCKS * MICROBATCHES
    assert kept[True][0] <= kept[False][0]


@pytest.mark.thorough
@pytest.mark.parametrize("scope", [["attn"], ["mlp"], [], ["full_iteration"]], ids=str)
@pytest.mark.parametrize("kind", ["none", "full"])
def test_pieces_in_graphs_train_alike_and_were_compiled_before_the_capture(scope: list[str], kind: str):
    with (made := engine_of(NAME, None))[0] as engine:
        expected = train(engine, made[1])
    with (made := engine_of(NAME, scope, compile=True, recompute=kind))[0] as engine:
        captured = inside(engine)
        found = train(engine, made[1])
        check_equal(found, expected)
        assert bool(captured) == (scope != ["attn"]) or kind == "full"
        assert ways_of(engine).get("recorded", set()) == captured
        assert "eager" not in ways_of(engine)
        assert engine.compiled is not None
        assert engine.compiled.report.eager == []


def inside(engine: Engine) -> set[int]:
    """Pieces that a graph holds."""
    plan = engine.plan
    if not plan.regions:
        return {piece.index for piece in plan.pieces}
    nodes = {name for region in plan.regions if not region.refused for name in region.nodes}
    return {piece.index for piece in plan.pieces if nodes.issuperset(piece.nodes)}


def test_a_capture_without_a_warm_up_compiles_nothing_and_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Emulation, "warm_up", lambda self, body: None)
    monkeypatch.setattr(functions, "compile_graph", None)
    with (made := engine_of("gpt2", ["mlp"], compile=True))[0] as engine:
        engine.forward_backward(made[1].batch(8, 0))
        assert engine.compiled is not None
        assert {way for piece, way in engine.compiled.counts if piece in inside(engine)} == {"eager"}
        assert engine.compiled.report.num_functions == 0
        told = [where for where, reason in engine.compiled.report.eager if reason == CAPTURED]
    assert sum("activations.py" in where for where in told) == BLOCKS


def test_a_capture_of_the_device_is_seen(monkeypatch: pytest.MonkeyPatch):
    """Of the current stream, where CUDA runs."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(functions, "compile_graph", None)
    with (made := engine_of("gpt2", None, compile=True))[0] as engine:
        engine.forward_backward(made[1].batch(8, 0))
        assert set(ways_of(engine)) == {"eager"}
        assert engine.compiled is not None
        assert engine.compiled.report.eager


# ---- Compiled code rounds as the ops do, unless the spec says otherwise; collectives wait for ranks that compile


WIDTH = 64
SPEC: dict[str, Any] = {
    "mesh": {},
    "batch": {"global": 2, "micro": 2},
    "inputs": {"x": {"shape": [8, WIDTH], "dtype": "float32"}, "y": {"like": "x"}},
    "precision": {"parameters": "bfloat16"},
}


class Norm(nn.Module):
    """In float32, between two casts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        return self.weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.linear = Norm(), Norm(), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.linear(self.second(self.first(x) * 1.3 + x * 0.7)).float(), y.float())


def gradients(**keys: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model, batch = Net(), {name: torch.randn(2, 8, WIDTH) for name in "xy"}
    with Engine(plan(model, SPEC | keys)) as engine:
        engine.forward_backward(batch)
        assert engine.compiled is None or engine.compiled.report.eager == []
        return engine.gather_gradients()


@pytest.mark.thorough
def test_compiled_code_rounds_to_bfloat16_where_the_model_does():
    eager, found = gradients(), gradients(compile=True)
    skipped = gradients(compile=True, emulate_precision_casts=False)
    for name, expected in eager.items():
        torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-7)
        assert (skipped[name] - expected).norm() > 1e-3 * expected.norm()


def limit_of(group: Any) -> timedelta:
    return group._get_backend(torch.device("cpu")).options._timeout


def test_collectives_of_the_first_step_wait_longer_by_what_ranks_compile():
    own, extra = timedelta(minutes=5), 2 * timedelta(seconds=SECONDS_A_FUNCTION)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=own)
    try:
        made: Any = dist.new_group([0], timeout=own)
        world: Any = dist.group.WORLD
        decided = planned(compile=True)
        with Engine(decided) as engine:
            pieces = CompiledPieces(engine.program, num_functions=2)
            groups = Groups(decided.mesh, 0, torch.device("cpu"), own, made=[made], world=None)
            for limits in ((own + extra, own), (own, own)):
                with first_calls(pieces, groups):
                    during = limit_of(made)
                assert (during, limit_of(made)) == limits
            assert limit_of(world) == own  # a group of the user's keeps the user's
    finally:
        dist.destroy_process_group()


def test_without_compiled_pieces_no_limit_changes():
    with Engine(planned()) as engine, first_calls(engine.compiled, engine.groups):
        assert engine.compiled is None
