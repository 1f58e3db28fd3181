"""What compiled pieces save, the cut of least bytes, and move, one kernel each way: counted by hand."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from planner import plan
from planner.compiled.pieces import decide_compiled
from planner.cost.cut.fused import with_fused_saves
from planner.cost.cut.units import Op, Phase
from planner.cost.planned import cut_work, planned_work
from planner.frozen_plan import Plan
from planner.spec.spec import Spec
from planner.trace.lowered import Lowered
from tests.tools.saved_memory import kept_bytes

ROWS, WIDE, INNER = 4, 8, 16


class Gated(nn.Module):
    """Between two products a chain of four ops: each saves what it reads, or gives."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDE, INNER, bias=False), nn.Linear(INNER, WIDE, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        return self.down(torch.tanh(up * 0.5) * up + up).sum()


class Normed(nn.Module):
    """A norm in float32 of values in bfloat16, between residual blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDE, dtype=torch.bfloat16))
        self.first, self.up = (nn.Linear(WIDE, WIDE, bias=False, dtype=torch.bfloat16) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (self.up(normed.to(x.dtype) * self.weight) + x).float().sum()


def planned(model: nn.Module, dtype: str = "float32", **keys: Any) -> Plan:
    inputs = {"x": {"shape": [WIDE], "dtype": dtype}}
    return plan(model, {"mesh": {}, "batch": {"global": ROWS, "micro": ROWS}, "inputs": inputs, **keys})


def saved(decided: Plan) -> tuple[int, int]:
    """Bytes that one microbatch keeps, op by op and with compiled pieces."""
    lowered = Lowered(*decided.to_run())
    pieces = decide_compiled(True, lowered).pieces
    return kept_bytes(lowered.trace(0)), kept_bytes(with_fused_saves(lowered.trace(0), pieces))


def test_a_chain_saves_the_product_it_reads_and_none_of_its_values() -> None:
    eager, compiled = saved(planned(Gated()))
    inner = ROWS * INNER * 4
    assert compiled == 2 * inner  # the first product, and the operand of the second
    assert eager == 3 * inner  # tanh's result besides


def test_a_norm_in_float32_saves_its_input_as_it_came() -> None:
    eager, compiled = saved(planned(Normed(), "bfloat16", precision={"parameters": "bfloat16"}))
    row = ROWS * WIDE
    assert compiled == 2 * row + 2 * row  # the input, and the operand of the product
    assert eager >= compiled + 4 * row  # the same input in float32


def test_without_pieces_nothing_changes() -> None:
    decided = planned(Gated())
    trace = Lowered(*decided.to_run()).trace(0)
    assert with_fused_saves(trace, ()).calls == trace.calls


@pytest.mark.thorough
def test_the_plan_and_its_search_count_the_same() -> None:
    plain, compiled = planned(Gated()), planned(Gated(), compile=True)
    fewer = ROWS * INNER * 4
    assert plain.memory[0].of_microbatch[0] - compiled.memory[0].of_microbatch[0] == fewer

    def kept_by_search(decided: Plan) -> int:
        work = cut_work(*decided.to_run(), Spec.load(decided.spec), ("none",))
        assert work.memory is not None
        return int(work.memory("none", work.source, ROWS, False).kept)

    assert kept_by_search(plain) - kept_by_search(compiled) == fewer


# ---- Compiled pieces are one kernel each way, of the bytes that cross their border: counted by hand


class Chain(nn.Module):
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
    (unit,) = planned_work(plan(Chain(), spec).lowered(), Spec.load(spec)).units
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
