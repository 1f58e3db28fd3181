"""Features of which parts are written are sharded part by part."""

from __future__ import annotations

import pytest

from tests.models.needless import Layered, batch
from tests.models.written_parts import WAYS, Written
from tests.tools.simulated_model import assert_equals_one_process


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", WAYS)
def test_a_layer_that_writes_into_features_is_sharded(name):
    made = assert_equals_one_process(lambda: Layered(lambda: Written(WAYS[name])), batch(), 2)
    assert made.summary.flops_sharded_fraction == 1.0
