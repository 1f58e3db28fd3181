"""Where three products stand in a chain, the sum after the second goes out in parts to the ranks that read parts."""

from __future__ import annotations

import pytest

from tests.models.needless import Layered, batch
from tests.models.recurrences import CHAINS
from tests.tools.simulated_model import assert_equals_one_process


@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_of_products_is_sharded_whole(name):
    made = assert_equals_one_process(lambda: Layered(CHAINS[name]), batch(), 2)
    assert made.summary.flops_sharded_fraction == 1.0
    assert any(row.kind == "reduce_scatter" and row.phase == "forward" for row in made.collectives)
