"""Compiled pieces are one kernel each way, of the bytes that cross their border: counted by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from planner import plan
from planner.cost.cut.units import Op, Phase
from planner.cost.planned import planned_work
from planner.spec.spec import Spec

ROWS, WIDE, INNER = 4, 8, 16


class Gated(nn.Module):
    """Between two products a chain of four ops, which reads the first product twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDE, INNER, bias=False), nn.Linear(INNER, WIDE, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        return self.down(torch.tanh(up * 0.5) * up + up).square().sum()


def phases(**keys: Any) -> tuple[Phase, Phase]:
    spec = {
        "mesh": {},
        "batch": {"global": ROWS, "micro": ROWS},
        "inputs": {"x": {"shape": [WIDE], "dtype": "float32"}},
        **keys,
    }
    (unit,) = planned_work(plan(Gated(), spec).lowered(), Spec.load(spec)).units
    return unit.work.forward, unit.work.backward


def moved(phase: Phase) -> list[int]:
    """Bytes of each kernel that is no product, ascending."""
    return sorted(int(op.bytes.at(ROWS)) for op, count in phase.ops for _ in range(count) if not _multiplies(op))


def _multiplies(op: Op) -> bool:
    return op.sides is not None


def test_the_chain_is_one_kernel_each_way() -> None:
    forward, backward = phases(compile=True)
    inner = ROWS * INNER * 4
    assert moved(forward).count(2 * inner) == 1  # reads the product, writes the other's operand
    assert moved(backward).count(3 * inner) == 1  # the gradient, the product again, and the product's gradient
    alone, alone_backward = phases(compile=False)
    assert len(moved(alone)) - len(moved(forward)) == 3  # four ops are one
    assert sum(moved(alone)) > 2 * sum(moved(forward))
    assert sum(moved(alone_backward)) > sum(moved(backward))


def test_products_are_the_same() -> None:
    for fused, alone in zip(phases(compile=True), phases(compile=False), strict=True):
        assert {op: n for op, n in fused.ops if _multiplies(op)} == {op: n for op, n in alone.ops if _multiplies(op)}
