"""Where one capture says that the batch may be, two captures of different sizes show it: nowhere else."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from passes.partition.batch.mixing import batch_flow
from planner import capture as capture_once
from planner import plan
from planner.capture.export import capture
from tests.models import custom_functions, slots, sorted_experts
from tests.models.sorted_experts import Sorting

SPEC = {
    "mesh": {"tp": 2},
    "batch": {"global": 8, "micro": 2},
    "inputs": {"ids": {"shape": [6], "dtype": "int64", "high": 20}, "labels": {"like": "ids"}},
}


class Model(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.tokens, self.body, self.head = nn.Embedding(20, 16), body, nn.Linear(16, 20)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.body(self.tokens(ids))).flatten(0, 1), labels.flatten())


class Seq2Seq(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Transformer(16, 4, 1, 1, 32, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x)


class TimeFirst(nn.Module):
    """Sequences first, heads merged with the batch, and pieces along dim 0."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(x.transpose(0, 1)).unflatten(-1, (3, 16)).permute(2, 0, 1, 3).unbind(0)
        q, k, v = (z.reshape(t, b * 4, 4).transpose(0, 1) for z in (q, k, v))
        mixed = torch.softmax(q @ k.transpose(1, 2), -1) @ v
        return mixed.transpose(0, 1).reshape(t, b, 16).transpose(0, 1)


class Rounding(TimeFirst):
    """Behind a user's own backward."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(custom_functions.Rounded.apply(x, 4))  # pyright: ignore


class Mixing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.transpose(0, 1).flip(1).mean(1, keepdim=True).transpose(0, 1)


class Vector(nn.Module):
    """Products with a vector, on either side, which take a dim away."""

    def __init__(self) -> None:
        super().__init__()
        self.right, self.left = nn.Parameter(torch.ones(16)), nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return x * (x @ self.right).unsqueeze(-1) + (self.left @ x).unsqueeze(1)


class Convolved(nn.Module):
    """Along time, with the sequences in front."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv1d(16, 16, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x.transpose(1, 2)).transpose(1, 2)


class ConvolvedUnbatched(nn.Module):
    """One image whose channels are the sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(1, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x.flatten(1).unsqueeze(0)).view_as(x)


class Chosen(nn.Module):
    """The two best of four experts by token."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        logits = self.router(rows)
        weights, chosen = logits.softmax(-1).topk(2, dim=-1)
        share = torch.zeros_like(logits).scatter(1, chosen, weights)
        return sum(share[:, i, None] * expert(rows) for i, expert in enumerate(self.experts)).view_as(x)  # pyright: ignore


class Spectral(nn.Module):
    """A filter along time."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x, dim=1) * 0.5, n=x.shape[1], dim=1)


class SpectralOverBatch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x, dim=0) * 0.5, n=x.shape[0], dim=0)


BODIES = [
    Spectral,
    SpectralOverBatch,
    Chosen,
    nn.Identity,
    Seq2Seq,
    TimeFirst,
    Rounding,
    Mixing,
    Vector,
    Convolved,
    ConvolvedUnbatched,
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("body", BODIES)
def test_what_changes_with_the_batch_is_among_the_dims_that_may_hold_it(body: Callable[[], nn.Module]) -> None:
    model = Model(body())
    ids = (torch.zeros(n, 6, dtype=torch.int64) for n in (2, 3))
    small, large = (capture(model, {"ids": x, "labels": x}) for x in ids)
    on_batch = {n for n in small.graph.graph.nodes if n.name in small.inputs}
    for node in small.graph.graph.nodes:
        if any(n in on_batch for n in node.all_input_nodes):
            on_batch.add(node)
    flow = batch_flow(small, on_batch)
    others = {n.name: n for n in large.graph.graph.nodes}
    compared = 0
    for node, dims in flow.items():
        a, b = node.meta.get("val"), others[node.name].meta.get("val")
        if dims is not None and isinstance(a, Tensor) and isinstance(b, Tensor):
            compared += 1
            assert {d for d in range(a.dim()) if a.shape[d] != b.shape[d]} <= dims, node
    assert compared > 5


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("body", "captures"),
    [
        (Seq2Seq, 1),
        (TimeFirst, 1),
        (Rounding, 1),
        (Vector, 1),
        (Convolved, 1),
        (Chosen, 1),
        (Spectral, 1),
        (SpectralOverBatch, 2),
        (Mixing, 2),
        (ConvolvedUnbatched, 2),
    ],
)
def test_one_capture_is_enough_where_no_op_runs_along_the_batch(body: Callable[[], nn.Module], captures: int) -> None:
    captured = capture_once(Model(body()), SPEC)
    warnings = [row.what for row in plan(captured, SPEC).diagnostics if "mixes the sequences" in row.what]
    assert (len(captured.batch_sizes), bool(warnings)) == (captures, captures == 2)


class OfAll(torch.autograd.Function):
    """A gradient that is scaled by that of the whole batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient / gradient.norm()


class Scaling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return OfAll.apply(x)


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize(("body", "is_mixed"), [(Rounding, False), (Scaling, True)])
def test_an_own_backward_is_warned_of_if_it_mixes_however_few_sequences_are_captured(
    body: type[nn.Module], is_mixed: bool, micro: int
) -> None:
    """Trials on one sequence show nothing about several: those of the second capture do."""
    made = plan(Model(body()), SPEC | {"batch": {"global": 4, "micro": micro}})
    assert any("mixes the sequences" in row.what for row in made.diagnostics) is is_mixed


class Dropped(nn.Module):
    """Dropout behind ``inner``: its numbers need to know which dim holds the sequences."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.inner(x), 0.1, self.training)


class Stacked(nn.Module):
    """All of four experts by einsum, weighted by the two best."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.weight = nn.Linear(16, 4), nn.Parameter(torch.randn(4, 16, 16))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        logits = self.router(rows)
        weights, chosen = logits.softmax(-1).topk(2, dim=-1)
        share = torch.zeros_like(logits).scatter(1, chosen, weights)
        return torch.einsum("th,ehi,te->ti", rows, self.weight, share).view_as(x)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("inner", [Convolved, Chosen, Stacked, partial(Sorting, sorted_experts.by_places, hidden=16)])
def test_dropout_has_a_layout_invariant_name_behind(inner: Callable[[], nn.Module]) -> None:
    made = plan(Model(Dropped(inner())).train(), SPEC | {"dropout": "layout_invariant"})
    draws = [n.meta["draw"] for n in made.to_run()[0].program.graph.graph.nodes if "draw" in n.meta]
    assert [(draw.shape, draw.batch, draw.by_sample) for draw in draws] == [((2, 6, 16), (0, 1, 2), True)]


class Routed(nn.Module):
    """Experts with slots; ``way`` is how tokens come into them."""

    def __init__(self, way: slots.Way) -> None:
        super().__init__()
        self.layer = slots.Slots(way, hidden=16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x)


@pytest.mark.thorough
@pytest.mark.parametrize("way", [slots.one_hot, slots.scattered, slots.written, slots.by_sequence])
def test_tokens_of_all_sequences_that_compete_for_slots_are_warned_of(way: slots.Way) -> None:
    """Their places are numbers without a gradient, made of the router's choices."""
    warnings = [row.what for row in plan(Model(Routed(way)), SPEC).diagnostics if "mixes the sequences" in row.what]
    assert any("cumsum" in what for what in warnings) == (way is not slots.by_sequence)


# ---- rows of a batch repeated as a whole beside rows that keep the heads of a sequence together: a warning, by line


HEADS = 2


def heads(x: Tensor) -> Tensor:
    """[b, t, h·d] -> [b·h, t, d], the heads of a sequence together"""
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2).flatten(0, 1)


def whole(x: Tensor) -> Tensor:
    return x.unflatten(0, (-1, HEADS)).transpose(1, 2).flatten(2)


class RepeatedWhole(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        weight = x.mean((1, 2)).view(-1, 1, 1).repeat(HEADS, x.shape[1], 8)
        return whole(heads(x) * weight)


class ExpandedWhole(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        weight = x.mean((1, 2)).expand(HEADS, -1).reshape(-1, 1, 1)
        return whole(heads(x) * weight)


class RepeatedInPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        weight = x.mean((1, 2)).repeat_interleave(HEADS).view(-1, 1, 1)
        return whole(heads(x) * weight)


class BothRepeated(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        weight = x.mean((1, 2)).view(-1, 1, 1)
        return (x.repeat(HEADS, 1, 1) * weight.repeat(HEADS, 1, 1)).unflatten(0, (HEADS, -1)).mean(0)


class AlongTime(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return whole(heads(x) * heads(x.mean(1, keepdim=True).repeat(1, x.shape[1], 1)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize(
    ("body", "is_mixed"),
    [(RepeatedWhole, True), (ExpandedWhole, True), (RepeatedInPlace, False), (BothRepeated, False), (AlongTime, False)],
)
def test_two_orders_of_the_batch_are_warned_of(body: type[nn.Module], micro: int, is_mixed: bool) -> None:
    spec = {
        "mesh": {"tp": 2},
        "batch": {"global": 4, "micro": micro},
        "inputs": {"ids": {"shape": [6], "dtype": "int64", "high": 20}, "labels": {"like": "ids"}},
    }
    warnings = [row for row in plan(Model(body()), spec).diagnostics if "mixes the sequences" in row.what]
    assert bool(warnings) is is_mixed, warnings
