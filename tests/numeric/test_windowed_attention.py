"""Attention cut into windows by strides of memory (Longformer, LED) equals one process, wherever its tensor is cut."""

from __future__ import annotations

import pytest

from tests.tools.laboratory import Case, Lab, name_of

LAYOUTS = [
    ("longformer", {"cp": 2}),
    ("longformer", {"tp": 2}),
    ("led", {"tp": 2, "pp": 2}),
    ("led", {"cp": 2}),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("model", "layout"), LAYOUTS, ids=name_of)
def test_windows_equal_one_process(lab: Lab, model: str, layout: dict[str, int]) -> None:
    assert lab.check(Case(model, layout)).wrong == []
