"""Silent errors that are planted in the runtime, in passes or in the planner: each one is found by a drawn case.

Options that are added are left out (``search.case_of``). If options change otherwise, a seed may draw a case that no
longer shows its fault:
``python -m tests.tools.planted.search 'NAME'`` finds another seed.
"""

from __future__ import annotations

import pytest

from runtime.fuzz.forks import StoreHost, in_fork, prepare
from runtime.fuzz.run import CASE_SECONDS, Verdict
from tests.tools.planted.search import outcomes_of
from tests.tools.planted.table import FAULTS

OF_SEEDS = {
    seed: [name for name, fault in FAULTS.items() if fault.seed == seed]
    for seed in sorted({f.seed for f in FAULTS.values()})
}


@pytest.fixture(scope="module")
def host() -> StoreHost:
    prepare()
    return StoreHost()


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("seed", OF_SEEDS)
def test_each_fault_planted_in_a_case_is_found_and_without_one_it_is_equal(seed: int, host: StoreHost):
    limit = CASE_SECONDS * (1 + len(OF_SEEDS[seed]))
    found = in_fork(outcomes_of, seed, OF_SEEDS[seed], host, timeout_seconds=limit)
    wanted = {"": Verdict.EQUAL} | dict.fromkeys(OF_SEEDS[seed], Verdict.DIFFERS)
    assert {name: outcome.verdict for name, outcome in found.items()} == wanted, found
