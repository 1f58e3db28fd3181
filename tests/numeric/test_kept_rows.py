"""Tokens by kept keys and values are those of the whole forward, on every layout: greedy ones and sampled ones."""

from __future__ import annotations

from typing import Any

import pytest

from tests.numeric.test_generation import COUNT, INTERLEAVED, SHARDS
from tests.tools.generation_jobs import both_ways
from tests.tools.laboratory import Case, Lab

WAYS = ("greedy", "hot", "both")
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "tp 2": ({"tp": 2}, {}),
    "pp 2": ({"pp": 2}, {}),
    "tp 2, pp 2": ({"tp": 2, "pp": 2}, {}),
    "dp 2, tp 2": ({"tp": 2, "dp": 2}, {}),
    "two chunks a rank": ({"pp": 2, "vpp": 2}, INTERLEAVED),
    "weights in shards": ({"dp": 2}, SHARDS),
}


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_kept_rows_give_the_tokens_of_one_process_on_every_layout(lab: Lab, layout: str) -> None:
    mesh, rest = LAYOUTS[layout]
    (alone,) = lab.run(Case("gpt2", {}, num_sequences=4, job=both_ways, job_arguments=(COUNT, WAYS)))
    for found in lab.run(Case("gpt2", mesh, rest, job=both_ways, job_arguments=(COUNT, WAYS))):
        assert found["is cached"] == {True}, found["because"]
        assert found["kept"] == found["whole"] == alone["whole"]
