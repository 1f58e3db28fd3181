"""Where three products stand in a chain, what is sharded of it equals one process."""

from __future__ import annotations

import pytest

from tests.models.needless import Layered, batch
from tests.models.recurrences import CHAINS
from tests.tools.simulated_model import assert_equals_one_process


@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_of_products_equals_one_process(name):
    made = assert_equals_one_process(lambda: Layered(CHAINS[name]), batch(), 2)
    assert made.summary.flops_sharded_fraction > 0.1
