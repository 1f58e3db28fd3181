"""The rank generator: groups over masked axes equal the oracle's, and what cannot be laid out is refused."""

from __future__ import annotations

import json

import pytest

from passes.errors import PlanError
from planner.ranks import RankGenerator, masked_groups
from tests.tools.paths import ORACLES

pytestmark = pytest.mark.check

ORACLE = json.loads((ORACLES / "rank_groups.json").read_text())


def test_masked_groups_equal_the_oracle():
    for case in ORACLE["raw_masked"]:
        assert masked_groups(case["parallel_size"], case["mask"]) == case["groups"]


def test_cp_and_ep_cannot_stand_in_one_generator():
    (case,) = [case for case in ORACLE["errors"] if "rank_generator" in case]
    with pytest.raises(PlanError, match="cp = 2 and ep = 2 are in one rank generator"):
        RankGenerator.of("tp-cp-ep-dp-pp", case["rank_generator"])
