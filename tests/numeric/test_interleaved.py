"""Several chunks of layers on each pipeline rank give what one process gives."""

from __future__ import annotations

import pytest

from tests.tools.laboratory import Case, Lab

INTERLEAVED = {"pipeline": {"schedule": "interleaved_1f1b"}}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh", [{"pp": 2, "vpp": 2}, {"tp": 2, "pp": 2, "vpp": 2}], ids=str)
@pytest.mark.parametrize("model", ["gpt", "skips"])
def test_interleaved_chunks_equal_one_process(lab: Lab, model: str, mesh: dict[str, int]) -> None:
    assert lab.check(Case(model, mesh, INTERLEAVED)).wrong == []
