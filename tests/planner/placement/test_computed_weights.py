"""A product with a weight that the forward computes of parameters alone is sharded as one with the weight itself."""

from __future__ import annotations

import pytest

from tests.models.computed_weights import COMPUTED
from tests.models.needless import Layered, batch
from tests.tools.simulated_model import assert_equals_one_process


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", COMPUTED)
def test_products_with_computed_weights_are_sharded(name):
    made = assert_equals_one_process(lambda: Layered(COMPUTED[name]), batch(), 2)
    assert made.summary.flops_sharded_fraction == 1.0
