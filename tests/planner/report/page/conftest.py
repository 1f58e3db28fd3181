"""A plan with experts, a pipeline, graphs and what is computed again, planned once for all tests of the page."""

import pytest

from planner import plan
from planner.frozen_plan import Plan
from planner.report.page.plan_page import plan_page
from tests.tools.html_page import Element, read_page

SPEC = {
    "mesh": {"tp": 2, "pp": 2, "dp": 2, "ep": 4, "etp": 1},
    "batch": {"global": 8, "micro": 2},
    "inputs": {"input_ids": {"shape": [32], "dtype": "int64", "high": 256}, "targets": {"like": "input_ids"}},
    "recompute": "selective",
    "cuda_graphs": {"impl": "local", "scope": ["attn"]},
    "cluster": "dgx-h100",
}


@pytest.fixture(scope="session")
def moe_plan() -> Plan:
    from examples.moe import build

    return plan(build(), SPEC)


@pytest.fixture(scope="session")
def moe_text(moe_plan: Plan) -> str:
    return plan_page(moe_plan)


@pytest.fixture(scope="session")
def moe_page(moe_text: str) -> Element:
    return read_page(moe_text)
