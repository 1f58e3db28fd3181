"""Whatever is done to a plan's file, it loads and prints, or is one PlanError."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.frozen_plan import Plan
from planner.report.sections import sections
from tests.models.tiny import planned
from tests.tools.mutations import mutants, peak_bytes, survivors


def check(count: int, seed: int, path: Path) -> int:
    planned(tp=2, pp=2).save(path)
    texts = list(mutants(path.read_text(), count, seed, json.loads, json.dumps))
    before = peak_bytes()

    def load(text: str) -> str:
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        loaded = Plan.load(path)
        text = loaded.describe() if len(text) % 8 == 0 else ""  # drawing tables is slow, what they hold is what counts
        return str(sections(loaded)) + str(sections(loaded, full=True)) + text + loaded.hash()

    good, bad = survivors(texts, load)
    assert not bad, f"{len(bad)} of {len(texts)}:\n" + "\n".join(bad[:5])
    assert peak_bytes() - before < 1 << 30
    return len(good)


def test_mutated_plans_load_or_are_one_error(tmp_path):
    assert 5 < check(150, 1, tmp_path / "plan.json") < 75


@pytest.mark.thorough
@pytest.mark.slow
def test_two_thousand_mutated_plans_load_or_are_one_error(tmp_path):
    assert 50 < check(2_000, 2, tmp_path / "plan.json") < 1_000
