"""`fuse_norms: true`: losses, gradients and updates on layouts are those of the model itself in one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.tools.laboratory import Case, Lab

FUSED = {"fuse_norms": True}
SEQUENCE = {"tensor_parallel": {"vocabulary_multiple": 8, "sequence_parallel": True}}
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "tp2-pp2-sp": ({"tp": 2, "pp": 2}, SEQUENCE),
    "cp2-dp2": ({"cp": 2, "dp": 2}, {}),
    "tp2-recompute": ({"tp": 2}, {"recompute": "full"}),
    "graphs": ({}, {"cuda_graphs": {"impl": "emulate", "scope": []}}),
}


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_with_norms_of_one_op_equals_one_process(lab: Lab, layout: str) -> None:
    mesh, rest = LAYOUTS[layout]
    case = Case("llama", mesh, FUSED | rest)
    rewritten = [row for row in lab.plan(case).diagnostics if "aten.rms_norm" in row.what]
    assert rewritten
    assert lab.check(case).wrong == []
