"""Each stand-in keeps what autograd keeps of the op that runs in its place: the same operands, as many bytes beside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from passes.ops import collectives, context, gathered_attention
from passes.ops.attention import shared_key_attention
from passes.ops.axis import AxisHandle
from passes.ops.causal_attention import causal_attention
from passes.ops.dropout import stream_dropout
from passes.ops.norm import cut_layer_norm, cut_rms_norm
from passes.ops.random_state import RandomState
from passes.ops.softmax import cut_gather, cut_log_softmax, cut_logsumexp, cut_softmax
from passes.ops.vocabulary import vocabulary_cross_entropy, vocabulary_embedding
from passes.types.types import I, P, Placement, R, V
from planner.saved import of_sequence, stand_ins
from planner.saved.observe import Like, Operand, observe
from tests.tools.saved_memory import kept_by, place_of
from tests.tools.simulated_ranks import on_threads

RANKS = 2
HALF, SINGLE = torch.bfloat16, torch.float32


def drawn(*shape: int, dtype: torch.dtype = SINGLE) -> Tensor:
    return torch.randn(shape).to(dtype).requires_grad_()


def ids(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape)


Real = Callable[[AxisHandle, list[Tensor]], Any]
Case = tuple[Real, Callable[..., Any], Callable[[], list[Tensor]]]


def converted(name: str, before: Placement, after: Placement) -> Case:
    cut = (before if before.is_sharded else after,) if name in collectives.TAKES_CUT else ()
    cut = (before, after) if name == "exchange" else cut
    shape = before.local_shape((4, 8, 6), RANKS)

    def stand_in(x: Tensor) -> Tensor:
        return stand_ins.converted(x, name, before, after, RANKS)

    return lambda axis, x: collectives.BY_NAME[name](x[0], axis, *cut), stand_in, lambda: [drawn(*shape)]


def attention(heads: int = 4, keys: int = 16, dim: int = 8) -> Callable[[], list[Tensor]]:
    return lambda: [drawn(2, heads, 8, dim), drawn(2, 2, keys, dim), drawn(2, 2, keys, 8)]


CONVERSIONS = {
    "f": (I, R),
    "g": (P, I),
    "g f": (P, R),
    "slice": (I, V(1, 8)),
    "cut": (R, V(1, 8)),
    "gather": (V(1, 8), R),
    "collect": (V(0, 4), I),
    "scatter": (P, V(1, 8)),
    "first": (I, P),
    "exchange": (V(1, 8), V(0, 4)),
}
CASES: dict[str, Case] = {
    **{name: converted(name, *types) for name, types in CONVERSIONS.items()},
    "embedding": (
        lambda axis, x: vocabulary_embedding(x[0], x[1], axis, 20),
        stand_ins.embedding,
        lambda: [drawn(10, 4), ids(20, 3, 5)],
    ),
    "logsumexp": (
        lambda axis, x: cut_logsumexp(x[0], [-1], True, axis, 12),
        lambda x: stand_ins.logsumexp(x, [-1], True),
        lambda: [drawn(3, 6)],
    ),
    "gather picked": (
        lambda axis, x: cut_gather(x[0], 1, x[1], axis, 12),
        lambda x, index: stand_ins.gather(x, 1, index),
        lambda: [drawn(3, 6), ids(12, 3, 1)],
    ),
    "shared keys": (
        lambda axis, x: shared_key_attention(*x, axis),
        lambda *x: stand_ins.shared_key_attention(*x, RANKS),
        lambda: [drawn(2, 4, 8, 8), drawn(2, 1, 8, 8), drawn(2, 1, 8, 8)],
    ),
    "dropout": (
        lambda axis, x: stream_dropout(x[0], 0.1, RandomState(1, 0), 3, False),
        lambda x: stand_ins.dropout(x, 0.1),
        lambda: [drawn(3, 6)],
    ),
    "local rows": (
        lambda axis, x: context.local_rows(x[0], 1, axis),
        lambda x: of_sequence.local_rows(x, 1, RANKS),
        lambda: [drawn(2, 8, 3)],
    ),
    "gather sequence": (
        lambda axis, x: context.gather_sequence(x[0], 1, axis),
        lambda x: of_sequence.gather_sequence(x, 1, RANKS),
        lambda: [drawn(2, 4, 3)],
    ),
    "causal": (
        lambda axis, x: causal_attention(*x, axis, enable_gqa=True),
        lambda *x: of_sequence.causal_attention(*x, RANKS, enable_gqa=True),
        attention(),
    ),
    "causal without flash": (
        lambda axis, x: causal_attention(*x, axis, enable_gqa=True),
        lambda *x: of_sequence.causal_attention(*x, RANKS, enable_gqa=True),
        attention(dim=6),
    ),
    "own keys": (
        lambda axis, x: gathered_attention.gathered_attention(*x, None, axis, True, enable_gqa=True),
        lambda *x: of_sequence.gathered_attention(*x, None, RANKS, True, enable_gqa=True),
        attention(keys=8),
    ),
    "own keys without flash": (
        lambda axis, x: gathered_attention.gathered_attention(*x, None, axis, True, enable_gqa=True),
        lambda *x: of_sequence.gathered_attention(*x, None, RANKS, True, enable_gqa=True),
        attention(keys=8, dim=6),
    ),
}
for _name, _dtype in (("", SINGLE), (" half", HALF)):
    CASES |= {
        f"log_softmax{_name}": (
            lambda axis, x: cut_log_softmax(x[0], -1, None, axis, 12),
            lambda x: stand_ins.log_softmax(x, -1),
            lambda dtype=_dtype: [drawn(3, 6, dtype=dtype)],
        ),
        f"softmax{_name}": (
            lambda axis, x: cut_softmax(x[0], -1, None, axis, 12),
            lambda x: stand_ins.softmax(x, -1),
            lambda dtype=_dtype: [drawn(3, 6, dtype=dtype)],
        ),
        f"layer_norm{_name}": (
            lambda axis, x: cut_layer_norm(*x, 1e-5, axis, 12),
            lambda *x: stand_ins.layer_norm(x[0], [12], *x[1:]),
            lambda dtype=_dtype: [drawn(3, 6, dtype=dtype), drawn(6, dtype=dtype), drawn(6, dtype=dtype)],
        ),
        f"rms_norm{_name}": (
            lambda axis, x: cut_rms_norm(*x, None, axis, 12),
            lambda *x: stand_ins.rms_norm(x[0], [12], *x[1:]),
            lambda dtype=_dtype: [drawn(3, 6, dtype=dtype), drawn(6, dtype=dtype)],
        ),
        f"cross_entropy{_name}": (
            lambda axis, x: vocabulary_cross_entropy(*x, axis, 12),
            stand_ins.cross_entropy,
            lambda dtype=_dtype: [drawn(50, 6, dtype=dtype), ids(12, 50)],
        ),
        f"cross_entropy of each{_name}": (
            lambda axis, x: vocabulary_cross_entropy(*x, axis, 12, reduction=0),
            lambda *x: stand_ins.cross_entropy(*x, reduction=0),
            lambda dtype=_dtype: [drawn(50, 6, dtype=dtype), ids(12, 50)],
        ),
    }
SMALL = 64  # bytes of scalars, which a loss keeps as it likes


@pytest.fixture(scope="module")
def kept() -> dict[str, list[tuple[set[int], int, list[Like]]]]:
    """By case, of each rank: which operands are kept, bytes of what else is, and the operands."""
    torch.manual_seed(0)
    given = {name: [make() for _ in range(RANKS)] for name, (_, _, make) in CASES.items()}

    def run(rank: int) -> dict[str, tuple[set[int], int, list[Like]]]:
        found = {}
        for name, (real, _, _) in CASES.items():
            operands, axis = given[name][rank], AxisHandle("tp", RANKS, rank)
            axis.group = torch.distributed.group.WORLD
            _, saved = kept_by(lambda real=real, axis=axis, operands=operands: real(axis, operands), ())
            places = {place_of(t): i for i, t in enumerate(operands)}
            beside = sum(size for place, size in saved.bytes_at.items() if place not in places)
            held = {places[place] for place in saved.bytes_at if place in places}
            found[name] = (held, beside, [Like.of(t) for t in operands])
        return found

    ranks = on_threads(RANKS, run)
    return {name: [of_rank[name] for of_rank in ranks] for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_a_stand_in_keeps_what_the_op_keeps(name: str, kept: dict[str, list[tuple[set[int], int, list[Like]]]]) -> None:
    for held, beside, operands in kept[name]:
        seen = observe(CASES[name][1], tuple(Operand(i) for i in range(len(operands))), {}, operands)
        told = sum(seen.hidden) + sum(seen.made[n].bytes for n in seen.results)
        assert set(seen.operands) == held
        assert told == pytest.approx(beside, abs=SMALL)
        assert seen.gradients, "its backward was not seen"
