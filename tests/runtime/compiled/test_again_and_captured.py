"""Pieces in recomputed blocks and captured regions: the same training and memory, and no compiler in a capture."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

from passes.ops import recompute
from runtime import Engine
from runtime.compiled import functions
from runtime.cuda_graphs.recorded import Emulation
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
