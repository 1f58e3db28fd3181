"""Rows of a batch repeated as a whole beside rows that keep the heads of a sequence together: a warning, by line."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from planner import plan
from tests.passes.partition.batch.test_flow import Model

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
