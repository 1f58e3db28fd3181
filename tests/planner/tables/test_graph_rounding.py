"""The plan warns where Transformer Engine's graphs round gradients of weights before they are added."""

from typing import Any

import pytest

from planner.tables.tables import Diagnostic
from tests.models import families
from tests.tools.captures import plan_again
from tests.tools.graphed_runs import spec_of

HALF = {"precision": {"parameters": "bfloat16"}}


def warnings(impl: str, **sections: Any) -> list[Diagnostic]:
    entry = families.build("gpt2")
    spec = spec_of(entry, ["attn", "mlp"], **sections)
    spec["cuda_graphs"]["impl"] = impl
    return [row for row in plan_again(entry.model, spec).diagnostics if row.where == "cuda_graphs.impl"]


@pytest.mark.thorough
def test_half_precision_under_transformer_engine_is_warned_of():
    (row,) = warnings("transformer_engine", **HALF)
    assert row.level == "warning"
    assert "weights in graphs are rounded to bfloat16 in each microbatch and summed in float32" in row.what
    assert "impl: local" in row.fix


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("impl", "sections"),
    [
        ("local", HALF),
        ("emulate", HALF),
        ("transformer_engine", {}),
        ("transformer_engine", {"precision": {"parameters": "bfloat16", "gradients": "bfloat16"}}),
    ],
)
def test_where_nothing_is_rounded_more_nothing_is_said(impl: str, sections: dict[str, Any]):
    assert warnings(impl, **sections) == []
