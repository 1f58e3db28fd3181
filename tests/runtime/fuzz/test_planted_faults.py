"""Silent errors that are planted in the runtime, in passes or in the planner: each one is found by a drawn case.

Options that are added are left out (``search.case_of``). If options change otherwise, a seed may draw a case that no
longer shows its fault:
``python -m tests.tools.planted.search 'NAME'`` finds another seed.
"""

from __future__ import annotations

import pytest

from runtime.fuzz.campaign import Campaign
from runtime.fuzz.prepare import prepare
from runtime.fuzz.run import Outcome, Verdict
from tests.fuzz.drawing import campaign_of
from tests.tools.planted.search import MOST_RANKS, case_of
from tests.tools.planted.table import FAULTS


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    prepare()
    return campaign_of(0, MOST_RANKS, tmp_path_factory.mktemp("fuzz"))


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, campaign: Campaign):
    fault = FAULTS[name]
    with fault.planted():
        outcome = campaign.outcome_of(case_of(fault.seed))
    assert outcome.verdict is Verdict.DIFFERS, outcome.words


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("seed", sorted({fault.seed for fault in FAULTS.values()}))
def test_a_case_without_its_fault_is_equal(seed: int, campaign: Campaign):
    assert campaign.outcome_of(case_of(seed)) == Outcome(Verdict.EQUAL)
