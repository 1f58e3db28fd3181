"""Families of transformers with patches or frames, cut over cp: equal to one process."""

from __future__ import annotations

import pytest

from tests.models.pictures import PICTURES, made
from tests.tools.simulated_mesh import equals_one_process

CLOSE = {"llava": 1e-6}  # its logits are cast to float32


@pytest.mark.thorough
@pytest.mark.sampled(2)
@pytest.mark.parametrize("mesh", [{"cp": 2}, {"cp": 2, "tp": 2}], ids=["cp2", "cp2·tp2"])
@pytest.mark.parametrize("name", PICTURES)
def test_equal_to_one_process(name: str, mesh: dict[str, int]) -> None:
    most = CLOSE.get(name, 1e-10)
    equals_one_process(lambda: made(name)[0], made(name)[1], mesh, loss=most, gradient=most)
