"""Where three products stand in a chain, what is sharded of it equals one process."""

from __future__ import annotations

import pytest

from tests.models.needless import Layered, batch
from tests.models.recurrences import CHAINS
from tests.tools.simulated_model import assert_equals_one_process

SHARDED = {  # of the FLOPs at tp 2; the rest is computed whole on each rank
    "lstm cell": 2 / 11,
    "gru cell": 2 / 9,
    "gru cell without biases": 2 / 9,
    "rnn cell": 2 / 5,
    "scalar memory": 15 / 17,
    "focal modulation": 1.0,
    "gated mixing": 5 / 6,
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_of_products_equals_one_process(name):
    made = assert_equals_one_process(lambda: Layered(CHAINS[name]), batch(), 2)
    assert made.summary.flops_sharded_fraction == pytest.approx(SHARDED[name])
