"""Ops of lowered graphs, run without values and without ranks, save what autograd saves, and make no large matrix."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from passes.ops import collectives, context, gathered_attention
from passes.ops.attention import causal_attention, shared_key_attention
from passes.ops.axis import AxisHandle
from passes.ops.dropout import stream_dropout
from passes.ops.over_ranks import cut_gather, cut_layer_norm, cut_log_softmax, cut_logsumexp, cut_rms_norm, cut_softmax
from passes.ops.random_state import RandomState
from passes.ops.slots import return_slots, send_slots
from passes.ops.vocabulary import vocabulary_cross_entropy, vocabulary_embedding
from passes.types.types import I, P, Placement, R, V
from planner import plan
from planner.trace.handles import planned
from planner.trace.lowered import Lowered
from planner.trace.observe import Like, Operand, observe
from tests.tools.ranks import Ranks
from tests.tools.saved_memory import kept_by, place_of

RANKS = 2
HALF, SINGLE = torch.bfloat16, torch.float32


def drawn(*shape: int, dtype: torch.dtype = SINGLE) -> Tensor:
    return torch.randn(shape).to(dtype).requires_grad_()


def ids(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape)


Case = tuple[Callable[..., Any], Callable[[], list[Tensor]]]  # of the axis and operands; what operands


def converted(name: str, before: Placement, after: Placement) -> Case:
    cut = (before if before.is_sharded else after,) if name in collectives.TAKES_CUT else ()
    cut = (before, after) if name == "exchange" else cut
    shape = before.local_shape((4, 8, 6), RANKS)
    return lambda axis, x: collectives.BY_NAME[name](x, axis, *cut), lambda: [drawn(*shape)]


def attention(heads: int = 4, keys: int = 16, dim: int = 8) -> list[Tensor]:
    return [drawn(2, heads, 8, dim), drawn(2, 2, keys, dim), drawn(2, 2, keys, 8)]


def own_keys(axis: AxisHandle, *x: Tensor) -> Tensor:
    return gathered_attention.gathered_attention(*x, None, axis, True, enable_gqa=True)


def causal(axis: AxisHandle, *x: Tensor) -> Tensor:
    return causal_attention(*x, axis, enable_gqa=True)


def slots(axis: AxisHandle, x: Tensor) -> Tensor:
    one = AxisHandle("etp", 1, 0)
    sent = send_slots(x, 0, 1, None, one, axis, one, None, 0)  # pyright: ignore[reportArgumentType]
    return return_slots(sent * 2, 0, 1, one, axis, one, x.shape[1])


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
    "embedding": (lambda axis, w, i: vocabulary_embedding(w, i, axis, 20), lambda: [drawn(10, 4), ids(20, 3, 5)]),
    "logsumexp": (lambda axis, x: cut_logsumexp(x, [-1], True, axis, 12), lambda: [drawn(3, 6)]),
    "gather picked": (lambda axis, x, i: cut_gather(x, 1, i, axis, 12), lambda: [drawn(3, 6), ids(12, 3, 1)]),
    "shared keys": (
        lambda axis, *x: shared_key_attention(*x, axis),
        lambda: [drawn(2, 4, 8, 8), drawn(2, 1, 8, 8), drawn(2, 1, 8, 8)],
    ),
    "local rows": (lambda axis, x: context.local_rows(x, 1, axis), lambda: [drawn(2, 8, 3)]),
    "gather sequence": (lambda axis, x: context.gather_sequence(x, 1, axis), lambda: [drawn(2, 4, 3)]),
    "causal": (causal, attention),
    "causal without flash": (causal, partial(attention, dim=6)),
    "own keys": (own_keys, partial(attention, keys=8)),
    "own keys without flash": (own_keys, partial(attention, keys=8, dim=6)),
    "slots": (slots, lambda: [drawn(4, 6, 3)]),
}
for _name, _dtype in (("", SINGLE), (" half", HALF)):
    CASES |= {
        f"log_softmax{_name}": (
            lambda axis, x: cut_log_softmax(x, -1, None, axis, 12),
            lambda dtype=_dtype: [drawn(3, 6, dtype=dtype)],
        ),
        f"softmax{_name}": (
            lambda axis, x: cut_softmax(x, -1, None, axis, 12),
            lambda dtype=_dtype: [drawn(3, 6, dtype=dtype)],
        ),
        f"layer_norm{_name}": (
            lambda axis, *x: cut_layer_norm(*x, 1e-5, axis, 12),
            lambda dtype=_dtype: [drawn(3, 6, dtype=dtype), drawn(6, dtype=dtype), drawn(6, dtype=dtype)],
        ),
        f"rms_norm{_name}": (
            lambda axis, *x: cut_rms_norm(*x, None, axis, 12),
            lambda dtype=_dtype: [drawn(3, 6, dtype=dtype), drawn(6, dtype=dtype)],
        ),
        f"cross_entropy{_name}": (
            lambda axis, *x: vocabulary_cross_entropy(*x, axis, 12),
            lambda dtype=_dtype: [drawn(50, 6, dtype=dtype), ids(12, 50)],
        ),
        f"cross_entropy of each{_name}": (
            lambda axis, *x: vocabulary_cross_entropy(*x, axis, 12, reduction=0),
            lambda dtype=_dtype: [drawn(50, 6, dtype=dtype), ids(12, 50)],
        ),
    }


Kept = dict[str, list[tuple[set[int], int, list[Like]]]]


@pytest.fixture(scope="module")
def kept() -> Kept:
    """By case, of each rank: which operands are saved, bytes of everything else that is, and the operands."""
    torch.manual_seed(0)
    given = {name: [make() for _ in range(RANKS)] for name, (_, make) in CASES.items()}

    def run(rank: int) -> dict[str, tuple[set[int], int, list[Like]]]:
        found = {}
        for name, (op, _) in CASES.items():
            operands, axis = given[name][rank], AxisHandle("tp", RANKS, rank)
            axis.group = torch.distributed.group.WORLD
            _, saved = kept_by(lambda op=op, axis=axis, operands=operands: op(axis, *operands), ())
            places = {place_of(t): i for i, t in enumerate(operands)}
            beside = sum(size for place, size in saved.bytes_at.items() if place not in places)
            held = {places[place] for place in saved.bytes_at if place in places}
            found[name] = (held, beside, [Like.of(t) for t in operands])
        return found

    ranks = Ranks(RANKS).run(run)
    return {name: [of_rank[name] for of_rank in ranks] for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_an_op_saves_as_much_without_values(name: str, kept: Kept) -> None:
    axis = planned(AxisHandle("tp", RANKS, 1))
    for held, beside, operands in kept[name]:
        seen = observe(CASES[name][0], (axis, *map(Operand, range(len(operands)))), {}, operands)
        found = sum(seen.hidden) + sum(seen.made[n].bytes for n in seen.results)
        assert (set(seen.operands), found) == (held, beside)
        assert seen.gradients, "its backward was not seen"


def test_draws_of_all_ops_are_one_call_and_leave_the_generator_as_it_was() -> None:
    like, before = Like.contiguous((3, 6), SINGLE, requires_grad=True), torch.get_rng_state()
    random = planned(RandomState(1, 0))
    assert random is planned(RandomState(2, 1))
    seen = observe(stream_dropout, (Operand(0), 0.1, random, 0, False), {}, [like])
    assert sum(seen.hidden) == 3 * 6  # one byte for each element
    assert torch.equal(torch.get_rng_state(), before)


# ---- at 32,768 tokens over cp, no call of a rank makes a matrix of its rows and all keys, by tensors without values


LENGTH, CP, VOCABULARY, WIDTH, HEADS = 1 << 15, 8, 61, 16, 2


class Latent(nn.Module):
    """Values narrower than keys, as in multi-head latent attention."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(WIDTH, HEADS * 12), nn.Linear(WIDTH, HEADS * 12)
        self.v, self.out = nn.Linear(WIDTH, HEADS * 8), nn.Linear(HEADS * 8, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
        return self.out(y.transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(Latent() for _ in range(2))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.loss(self.tokens(tokens), None, targets)

    def loss(self, x: Tensor, mask: Tensor | None, targets: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, mask)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def largest_bytes(kind: type[nn.Module], names: tuple[str, ...], **more: Any) -> dict[str, int]:
    """The most bytes that a call of a rank holds at once, or that one of its results has, by its name."""
    with torch.device("meta"):
        model = kind()
    inputs = {name: {"shape": [LENGTH], "dtype": "int64", "high": VOCABULARY} for name in names}
    decided = plan(model, {"mesh": {"cp": CP}, "batch": {"global": 1, "micro": 1}, "inputs": inputs} | more)
    trace = Lowered(*decided.to_run()).trace(0)
    assert not trace.unseen
    held = {call.name: max(call.seen.peak, call.seen.backward_peak) for call in trace.calls}
    for call in trace.calls:
        held[call.name] = max([held[call.name], *(trace.bytes_of[m] for m in (*call.makes, *call.reads))])
    return {name: size for name, size in held.items() if size >= LENGTH * LENGTH // CP}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("more", [{}, {"attention": "cudnn"}], ids=["flash", "cudnn"])
def test_values_narrower_than_keys_need_no_mask(more: dict[str, Any]) -> None:
    assert largest_bytes(Decoder, ("tokens", "targets"), **more) == {}
