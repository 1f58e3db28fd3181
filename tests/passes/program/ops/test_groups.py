"""Groups of ops: what stands in one does as its name says."""

from typing import Any

import pytest
import torch
from torch import Tensor

from passes.program.ops import groups
from passes.program.ops.aten import aten, packet_of
from passes.program.ops.groups import Ops
from passes.rules.trials import called
from tests.passes.rules.test_table import EXAMPLES

GROUPS = {name: group for name, group in vars(groups).items() if isinstance(group, Ops)}


def examples(*wanted: Ops) -> list[Any]:
    return [t for t in EXAMPLES if isinstance(t, torch._ops.OpOverload) and any(t in group for group in wanted)]


def test_a_group_holds_all_overloads_of_an_op_and_no_other_op():
    assert aten.add.Tensor in Ops("add")
    assert aten.add.Scalar in Ops("add") | Ops("mul")
    assert aten.sub.Tensor not in Ops("add") | Ops("mul")
    assert "add" not in Ops("add")
    assert Ops("add no_such_op").packets == Ops("add").packets


@pytest.mark.parametrize("name", GROUPS)
def test_no_group_is_empty(name: str):
    assert GROUPS[name].packets


@pytest.mark.parametrize("target", examples(groups.SAME, groups.RESHAPES, groups.PERMUTES), ids=str)
def test_the_same_elements(target: Any):
    for given in EXAMPLES[target]:
        words = given[-1] if isinstance(given[-1], dict) else {}
        node, _ = called(target, *(g for g in given if g is not words), **words)
        before, after = given[0], node.meta["val"]
        assert torch.equal(before.flatten().sort()[0], after.flatten().to(before.dtype).sort()[0])
        if target in groups.RESHAPES:
            assert torch.equal(before.flatten(), after.flatten())
        if target in groups.SAME:
            assert before.shape == after.shape


@pytest.mark.parametrize("target", examples(groups.FILLED), ids=str)
def test_filled_without_reading(target: Any):
    """New tensors are the same, however the operand's values are."""
    given = EXAMPLES[target][0]
    others = tuple(-3 * g if isinstance(g, Tensor) else g for g in given)
    results = [called(target, *args)[0].meta["val"] for args in (given, others)]
    assert packet_of(target) in groups.FILLED.packets
    assert results[0].shape == results[1].shape
    if "empty" not in str(target):
        assert torch.equal(*results)


@pytest.mark.parametrize("target", examples(groups.EXTREMES, groups.SOFTMAXES, groups.LOG_SOFTMAXES), ids=str)
def test_arithmetic(target: Any):
    x = torch.tensor([[1.0, 3.0, 2.0]], dtype=torch.float64)
    names = {a.name for a in target._schema.arguments}
    given = [1] + ([False] if "half_to_float" in names else [])
    found = target(x, *([[1]] if target in groups.EXTREMES else given))
    if target in groups.EXTREMES:
        assert found.item() in (1.0, 3.0)
    else:
        shares = found.exp() if target in groups.LOG_SOFTMAXES else found
        assert shares.sum().item() == pytest.approx(1)
